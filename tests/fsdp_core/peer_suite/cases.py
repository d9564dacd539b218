"""Which models of torch's harness run in which configurations. Plain data: the table in docs/peer_suite.md is of it."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

MODELS = (
    "NestedWrappedModule",
    "AlwaysWrapNestedWrappedModule",
    "TransformerWithSharedParams",
    "NonUniformReqGradNWM",
    "MixtureOfExperts",
    "NestedWrappedModuleWithDelay, after the loss",
    "NestedWrappedModuleWithDelay, before the reduction",
    "MixtureOfExperts, before the reshard",
)
STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD")
HYBRID = ("HYBRID_SHARD", "_HYBRID_SHARD_ZERO2")
BACKWARD_PREFETCH = ("off", "BACKWARD_PRE", "BACKWARD_POST")
FORWARD_PREFETCH = (False, True)
WIRES = ("auto", "collectives")


@dataclass(frozen=True)
class Case:
    """One run of the harness's parity driver.

    extra: what else is switched on: "" | "offload" | "scaler" | "bf16" (bf16 compute, reduction and buffers).
    """

    model: str
    strategy: str
    backward_prefetch: str = "BACKWARD_PRE"
    forward_prefetch: bool = True
    wire: str = "auto"
    world_size: int = 2
    extra: str = ""
    is_quick: bool = False

    @property
    def name(self) -> str:
        parts = [self.model.replace(", ", "-").replace(" ", "_"), self.strategy, self.backward_prefetch]
        parts += ["forward" if self.forward_prefetch else "no_forward", self.wire, f"w{self.world_size}"]
        return "-".join([*parts, self.extra] if self.extra else parts)


def _wires(model: str) -> tuple[str, ...]:
    """The delay before the reduction sits on torch's reduce-scatter: only the collectives wire goes through it."""
    return ("collectives",) if "reduction" in model else WIRES


def _parity() -> list[Case]:
    cases = []
    for model, strategy, backward, forward in product(MODELS, STRATEGIES, BACKWARD_PREFETCH, FORWARD_PREFETCH):
        for wire in _wires(model):
            usual = backward == "BACKWARD_PRE" and forward
            none = backward == "off" and not forward
            is_first = wire == _wires(model)[0]
            is_quick = is_first and (usual or (none and model == "NestedWrappedModule"))
            cases.append(Case(model, strategy, backward, forward, wire, is_quick=is_quick))
    return cases


def _wider() -> list[Case]:
    """Four ranks, and the hybrid strategies with two ranks a sharding group."""
    return [
        Case(model, strategy, world_size=4, is_quick=model == "TransformerWithSharedParams" and strategy in HYBRID)
        for model, strategy in product(MODELS, (*STRATEGIES, *HYBRID))
        if "reduction" not in model
    ]


def _extras() -> list[Case]:
    cases = [Case(model, strategy, extra="offload") for model, strategy in product(MODELS[:5], STRATEGIES)]
    for model, strategy in product(("NonUniformReqGradNWM", "NestedWrappedModule"), STRATEGIES):
        cases.append(Case(model, strategy, extra="scaler", is_quick=model == "NonUniformReqGradNWM"))
        cases.append(Case(model, strategy, extra="scaler", world_size=4))
    for strategy in STRATEGIES:
        cases.append(Case("NestedWrappedModule", strategy, extra="bf16", is_quick=True))
    return cases


CASES = [*_parity(), *_wider(), *_extras()]
QUICK = [case for case in CASES if case.is_quick]
LONG = [case for case in CASES if not case.is_quick]
