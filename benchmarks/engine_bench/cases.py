"""What is measured, and which bars each case has to clear. Data only."""

from __future__ import annotations

from dataclasses import dataclass

SHARDED_PEERS = ("fsdp1", "fsdp2", "deepspeed")


@dataclass(frozen=True)
class Case:
    """One training job that every contestant runs.

    replicate: F = 1 (parameters whole on every rank); otherwise F = W.
    reshard: free gathered parameters between forward and backward (RAF) or keep them (NRAF).
    """

    name: str
    model: str  # "gpt" | "t5"
    world_size: int
    reshard: bool = True
    precision: str = "fp32"  # "fp32" | "bf16" (compute and reduction; parameters and optimizer stay fp32)
    replicate: bool = False
    size: str = "34m"  # "34m" | "tiny"


@dataclass(frozen=True)
class Bar:
    """``ours`` must take at most ``ratio`` times as long (or as much memory) as the fastest of ``against``."""

    ours: str
    against: tuple[str, ...]
    ratio: float
    quantity: str = "step"  # "step" | "memory"


def cases(size: str = "34m") -> tuple[Case, ...]:
    made = []
    for model in ("gpt", "t5"):
        made += [
            Case(f"{model}-w2-raf-fp32", model, 2, size=size),
            Case(f"{model}-w2-nraf-fp32", model, 2, reshard=False, size=size),
            Case(f"{model}-w2-raf-bf16", model, 2, precision="bf16", size=size),
            Case(f"{model}-w2-f1-fp32", model, 2, reshard=False, replicate=True, size=size),
        ]
    made.append(Case("gpt-w4-raf-fp32", "gpt", 4, size=size))
    return tuple(made)


def contestants(case: Case) -> tuple[str, ...]:
    """Engines that can run the case, by the names of ``contestants.py``."""
    ours = ("ours_shared_memory", "ours_gloo_p2p", "ours_collectives")
    if case.replicate:
        return ("floor", "ddp", "fsdp1", *ours)
    return ("floor", "ddp", *SHARDED_PEERS, *ours)


def bars(case: Case) -> tuple[Bar, ...]:
    if case.replicate:
        return (
            Bar("ours_shared_memory", ("ddp",), 0.97),
            Bar("ours_shared_memory", ("floor",), 1.12),
            Bar("ours_shared_memory", ("ddp",), 1.0, "memory"),
        )
    made = [
        Bar("ours_shared_memory", SHARDED_PEERS, 0.85),
        Bar("ours_gloo_p2p", SHARDED_PEERS, 0.92),
        Bar("ours_shared_memory", SHARDED_PEERS, 1.0, "memory"),
    ]
    if case.world_size == 2:
        made.append(Bar("ours_shared_memory", ("floor",), 1.12))
    return tuple(made)
