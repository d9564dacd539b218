"""What each block on a tape is for, told from who made it, when, and how long it stays."""

from __future__ import annotations

from fsdp_core.simulate import tape as t

_BY_ROLE = {
    "engine.shard": "parameters",
    "engine.full": "gathered",
    "engine.grad_full": "reduction",
    "engine.grad_shard": "reduction",
}


def kinds_of(tape: t.Tape, last_step: int, gradients: frozenset[int]) -> dict[int, str]:
    """By block. last_step: entry where the last step begins. gradients: blocks that reduced gradients lie in.

    What an optimizer makes and keeps beyond its step is its state.
    """
    kinds = {alloc.block: _BY_ROLE.get(alloc.what, "other") for alloc in tape.held}
    state: set[int] = set()
    is_optimizing = False
    for index, entry in enumerate(tape.entries):
        match entry:
            case t.Mark(kind="phase", phase=phase):
                is_optimizing = phase == "backward"  # a mark ends its phase; the optimizer's comes next
            case t.Mark(kind="forward"):
                is_optimizing = False  # of the next micro-batch
            case t.Alloc():
                kinds[entry.block] = _BY_ROLE.get(entry.what, "activations")
                if is_optimizing and index < last_step and kinds[entry.block] == "activations":
                    state.add(entry.block)
            case t.Free() if index < last_step:
                state.discard(entry.block)
    return kinds | dict.fromkeys(state, "optimizer") | dict.fromkeys(gradients, "gradients")


def bytes_by_kind(tape: t.Tape, kinds: dict[int, str], first: int) -> tuple[dict[str, int], dict[str, int], int]:
    """(bytes by kind where their sum is largest, the largest of each kind, entry of that sum), from entry ``first``."""
    live: dict[str, int] = {}
    sizes = {alloc.block: alloc.nbytes for alloc in tape.held}
    for block, nbytes in sizes.items():
        live[kinds[block]] = live.get(kinds[block], 0) + nbytes
    total, most, peak_at = sum(sizes.values()), -1, first
    at_peak: dict[str, int] = {}
    largest: dict[str, int] = {}
    for index, entry in enumerate(tape.entries):
        if isinstance(entry, t.Alloc):
            kind, sizes[entry.block] = kinds[entry.block], entry.nbytes
            live[kind] = live.get(kind, 0) + entry.nbytes
            total += entry.nbytes
        elif isinstance(entry, t.Free):
            nbytes = sizes.pop(entry.block)
            live[kinds[entry.block]] -= nbytes
            total -= nbytes
        if index < first:
            continue
        if index == first:
            largest = dict(live)
        if isinstance(entry, t.Alloc):
            largest[kind] = max(largest.get(kind, 0), live[kind])
        if total > most:
            most, peak_at, at_peak = total, index, dict(live)
    return at_peak, largest, peak_at
