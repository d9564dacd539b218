"""From the rings of all ranks to words: who is where, who is behind, what the others wait for. Pure.

How the rank to look at is found, in this order:

1. Ranks that began different collectives at the same place of their sequence: one skipped a unit or took another way.
2. Ranks that have begun fewer collectives than others: the first one they are missing is what the others wait in.
3. All have begun the same ones: the ranks that are stopped or gone, else those whose last event is no waiting.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from recipes.flight.recorder import COLLECTIVES, TRAINING
from recipes.flight.ring import Entry, Ring

RUNNING, STOPPED, GONE, UNKNOWN = "running", "stopped", "gone", "on another host"

_DOING = {
    "enter": "at its beginning",
    "pass": "at the beginning of a forward pass",
    "gather": "in the all-gather of {unit}{phase}",
    "await": "waiting for the all-gather of {unit}{phase}",
    "forward": "in the forward of {unit}",
    "forward_end": "after the forward of {unit}",
    "backward": "in the backward of {unit}",
    "reduce": "in the reduction of {unit}, or waiting for earlier ones",
    "finish": "waiting for the reductions of this backward",
    "settle": "waiting until all ranks have read its parameters",
    "backward_end": "after backward",
    "norm": "in the norm of the gradient over all ranks",
    "sum": "in a sum over all ranks{phase}",
    "await_sum": "waiting for a sum over all ranks",
    "max": "in a maximum over all ranks{phase}",
    "collect": "in collecting from all ranks{phase}",
    "data": "waiting for its next batch",
    "optimizer": "in the optimizer",
    "progress": "{unit}",
}
_NAMES = {
    "gather": "the all-gather of {unit}",
    "reduce": "the reduction of {unit}",
    "settle": "the end of a pass",
    "norm": "the norm of the gradient",
    "sum": "a sum over all ranks{phase}",
    "max": "a maximum over all ranks{phase}",
    "collect": "collecting from all ranks{phase}",
}
_WAITING = ("await", "gather", "reduce", "finish", "settle", "norm", "sum", "await_sum", "max", "collect")


@dataclass(frozen=True)
class HangReport:
    """headline: one sentence that names ranks, unit and phase. text: all of it. culprits: ranks to look at first."""

    headline: str
    text: str
    culprits: tuple[int, ...]


def explain(rings: Sequence[Ring | None], states: Mapping[int, str], now_s: float) -> HangReport:
    """rings: of each rank; None where none was found. states: of each rank's process. now_s: since the epoch."""
    headline, culprits = _different(rings) or _behind(rings) or _not_waiting(rings, states)
    return HangReport(headline, "\n".join([headline, "", *_table(rings, states, now_s)]), culprits)


def where(entry: Entry) -> str:
    """``training, step 12: waiting for the all-gather of blocks.5 (forward)``."""
    step = f", step {entry.step}" if entry.step else ""
    return f"{entry.activity}{step}: {_said(_DOING.get(entry.kind, entry.kind), entry)}"


def ranks_text(ranks: Sequence[int]) -> str:
    """``rank 3``, ``ranks 0-2``, ``ranks 0, 2, 5-7``."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    shown = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
    return f"rank{'' if len(ranks) == 1 else 's'} {shown}"


def _different(rings: Sequence[Ring | None]) -> tuple[str, tuple[int, ...]] | None:
    """The earliest place where ranks began different collectives; the fewest ranks are named."""
    found: list[tuple[float, str, tuple[int, ...]]] = []
    begun = {ring.rank: _begun(ring) for ring in rings if ring is not None}
    for kind in COLLECTIVES:
        columns = {rank: mine[kind] for rank, mine in begun.items()}
        for ordinal in sorted(set.intersection(*(set(column) for column in columns.values())) if columns else ()):
            by_name: dict[str, list[int]] = {}
            for rank, column in columns.items():
                by_name.setdefault(_name(column[ordinal]), []).append(rank)
            if len(by_name) > 1:
                names = sorted(by_name, key=lambda name: len(by_name[name]))
                first = columns[by_name[names[0]][0]][ordinal]
                told = "; ".join(f"{ranks_text(by_name[name])} began {name}" for name in names)
                sentence = f"the ranks went different ways{_at(first)}: {told}"
                found.append((first.time_s, sentence, tuple(by_name[names[0]])))
                break
    return min(found)[1:] if found else None


def _behind(rings: Sequence[Ring | None]) -> tuple[str, tuple[int, ...]] | None:
    """The earliest collective that some ranks began and others never did."""
    found: list[tuple[float, str, tuple[int, ...]]] = []
    begun = {ring.rank: _begun(ring) for ring in rings if ring is not None}
    for kind in COLLECTIVES:
        reached = {rank: max(mine[kind], default=0) for rank, mine in begun.items()}
        lowest = min(reached.values(), default=0)
        behind = [rank for rank, ordinal in reached.items() if ordinal == lowest]
        ahead = [rank for rank, ordinal in reached.items() if ordinal > lowest]
        missing = [begun[rank][kind][lowest + 1] for rank in ahead if lowest + 1 in begun[rank][kind]]
        if missing:
            verb = "waits" if len(ahead) == 1 else "wait"
            sentence = (
                f"{ranks_text(behind)} never entered {_name(missing[0])}{_at(missing[0])}; "
                f"{ranks_text(ahead)} {verb} for {'it' if len(behind) == 1 else 'them'}"
            )
            found.append((min(entry.time_s for entry in missing), sentence, tuple(behind)))
    return min(found)[1:] if found else None


def _not_waiting(rings: Sequence[Ring | None], states: Mapping[int, str]) -> tuple[str, tuple[int, ...]]:
    last = {ring.rank: ring.entries[-1] for ring in rings if ring is not None and ring.entries}
    absent = [rank for rank in range(len(rings)) if rank not in last and states.get(rank) != UNKNOWN]
    if absent:
        return f"{ranks_text(absent)} did not get as far as a flight record (still starting)", tuple(absent)
    lame = [rank for rank in last if states.get(rank) in (STOPPED, GONE)]
    busy = lame or [rank for rank, entry in last.items() if entry.kind not in _WAITING]
    if busy and (lame or len(busy) < len(last)):
        first = busy[0]
        state = f" ({states[first]})" if lame else ""
        return f"{ranks_text(busy)}{state} did not go on: {where(last[first])}", tuple(busy)
    return "all ranks have begun the same collectives and none comes back: the network or a device is stuck", ()


def _begun(ring: Ring) -> dict[str, dict[int, Entry]]:
    found: dict[str, dict[int, Entry]] = {kind: {} for kind in COLLECTIVES}
    for entry in ring.entries:
        if entry.kind in found:
            found[entry.kind][entry.ordinal] = entry
    return found


def _table(rings: Sequence[Ring | None], states: Mapping[int, str], now_s: float) -> list[str]:
    """Ranks that are in the same place share a row."""
    rows: dict[tuple[str, str], list[tuple[int, float | None]]] = {}
    for rank, ring in enumerate(rings):
        last = ring.entries[-1] if ring is not None and ring.entries else None
        key = (states.get(rank, UNKNOWN), where(last) if last is not None else "no flight record")
        rows.setdefault(key, []).append((rank, None if last is None else now_s - last.time_s))
    cells = [("", "process", "since", "where")]
    for (state, place), members in rows.items():
        ages = [age for _, age in members if age is not None]
        since = f"{min(ages):.0f} s" if ages else "-"
        cells.append((ranks_text([rank for rank, _ in members]), state, since, place))
    widths = [max(len(row[column]) for row in cells) for column in range(3)]
    return ["  ".join([*(c.ljust(w) for c, w in zip(row, widths, strict=False)), row[3]]).rstrip() for row in cells]


def _name(entry: Entry) -> str:
    # the phase of a gather says why it was issued, which may differ between ranks (ahead of time or on demand)
    return _said(_NAMES[entry.kind], entry)


def _at(entry: Entry) -> str:
    phase = f"{entry.phase}, " if entry.kind == "gather" and entry.phase else ""
    activity = "" if entry.activity == TRAINING else f"{entry.activity}, "
    return f" ({phase}{activity}step {entry.step})"


def _said(text: str, entry: Entry) -> str:
    return text.format(unit=entry.unit, phase=f" ({entry.phase})" if entry.phase else "")
