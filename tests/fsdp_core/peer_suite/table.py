"""The cases as the table of docs/peer_suite.md: one row per model, strategy, number of ranks and extra.

``python -m tests.fsdp_core.peer_suite.table`` prints it.
"""

from __future__ import annotations

from tests.fsdp_core.peer_suite.cases import CASES, Case

HEAD = (
    "| model | strategy | ranks | with | backward prefetch | forward prefetch | wire | result |",
    "|---|---|---|---|---|---|---|---|",
)
EXTRAS = {"": "", "offload": "CPU offload", "scaler": "gradient scaler", "bf16": "bf16"}


def rows() -> list[str]:
    """Every combination of what stands in the columns of a row is a case of its own."""
    groups: dict[tuple[str, str, int, str], list[Case]] = {}
    for case in CASES:
        groups.setdefault((case.model, case.strategy, case.world_size, case.extra), []).append(case)
    found = []
    for (model, strategy, world_size, extra), cases in groups.items():
        backward = list(dict.fromkeys(case.backward_prefetch for case in cases))
        forward = list(dict.fromkeys("on" if case.forward_prefetch else "off" for case in cases))
        wires = list(dict.fromkeys(case.wire for case in cases))
        assert len(cases) == len(backward) * len(forward) * len(wires)
        cells = [model, strategy, str(world_size), EXTRAS[extra], *(", ".join(c) for c in (backward, forward, wires))]
        found.append("| " + " | ".join([*cells, "parity"]) + " |")
    return found


if __name__ == "__main__":
    print("\n".join([*HEAD, *rows()]))
