"""Optimizers whose result does not depend on sharding, parameter groups by name, and the check that refuses others."""

from fsdp_core.numerics.optimizers.adafactor import Adafactor
from fsdp_core.numerics.optimizers.exactness import check_optimizer
from fsdp_core.numerics.optimizers.groups import FlatSlice, GroupRule, no_decay, parameter_groups
from fsdp_core.numerics.optimizers.lamb import LAMB
from fsdp_core.numerics.optimizers.muon import Muon
from fsdp_core.numerics.optimizers.whole_parameter import WholeParameterOptimizer

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
