"""Optimizers that are exact on shards, parameter groups by name, and the check that refuses other optimizers."""

from fsdp_core.numerics.optimizers import (
    LAMB,
    Adafactor,
    FlatSlice,
    GroupRule,
    Muon,
    WholeParameterOptimizer,
    check_optimizer,
    no_decay,
    parameter_groups,
)

__all__ = [
    "LAMB",
    "Adafactor",
    "FlatSlice",
    "GroupRule",
    "Muon",
    "WholeParameterOptimizer",
    "check_optimizer",
    "no_decay",
    "parameter_groups",
]
