"""Prefetch on and off, backward and forward, on a network that takes as long as computing, half or twice as long."""

from __future__ import annotations

import statistics

from paper_runs import training
from paper_runs.answer import Answer, Chart, Table, median_ratio
from paper_runs.decoder import Sizes
from paper_runs.ranks import Pool, Ranks
from paper_runs.training import Setting, turns

STATEMENT = (
    "Sections 3.3.2 and 3.3.3, figure 6b: backward prefetch takes 18 % off a step of GPT-175B. It was measured with "
    "one model and one network, and forward prefetch was not measured at all."
)
WAYS = {
    "none": Setting(backward_prefetch=False),
    "backward": Setting(),
    "forward": Setting(backward_prefetch=False, forward_prefetch=True),
    "both": Setting(forward_prefetch=True),
}


def run(pool: Pool, small: bool) -> Answer:
    sizes = Sizes(layers=3, width=32, batch=1, seq_len=16) if small else Sizes()
    loads, rounds, count = ((1.0,), 1, 1) if small else ((0.25, 0.5, 1.0, 2.0), 5, 1)
    ranks = pool(2)
    slow = {name: Setting(**{**vars(way), "slow": True}) for name, way in WAYS.items()}
    as_is = {f"{name}, {wire}": Setting(**{**vars(way), "wire": wire}) for wire in WIRES for name, way in WAYS.items()}
    for name, setting in {**slow, **as_is}.items():
        ranks.run(training.start, name, sizes, setting)
    try:
        sent = sum(ranks.run(training.watch, "none")[0].sent.values())
        plain = turns(ranks, list(as_is), rounds, count)
        behind = {load: _behind_a_card(ranks, sent, load, rounds, count) for load in loads}
    finally:
        ranks.run(training.set_card, float("inf"), 0.0)
        ranks.run(training.drop, *slow, *as_is)
    return _answer(sizes, behind, plain, sent)


WIRES = ("gloo_p2p", "collectives")


def _behind_a_card(ranks: Ranks, sent: int, load: float, rounds: int, count: int) -> dict[str, list[float]]:
    """The card takes ``load`` times as long for a step's bytes as the step takes on a card without a limit."""
    times: dict[str, list[float]] = {name: [] for name in ("no network", *WAYS)}
    for turn in range(rounds):
        ranks.run(training.set_card, float("inf"), 0.0)
        step_s = turns(ranks, ["both"], 1, count)["both"][0]
        times["no network"].append(step_s)
        ranks.run(training.set_card, sent / (load * step_s), 0.0)
        names = list(WAYS)
        for name in names[turn % 4 :] + names[: turn % 4]:
            times[name] += turns(ranks, [name], 1, count)[name]
    return times


def _answer(
    sizes: Sizes, behind: dict[float, dict[str, list[float]]], plain: dict[str, list[float]], sent: int
) -> Answer:
    rows, lines = [], {name: [] for name in WAYS}
    for load, times in behind.items():
        over = {name: median_ratio(times[name], times["no network"]) for name in WAYS}
        gain = {name: 1 - median_ratio(times[name], times["none"]) for name in WAYS}
        for name, value in over.items():
            lines[name].append((load, value))
        cells = [f"{over[name]:.2f}" for name in WAYS]
        cells += [f"{100 * gain[name]:.0f} %" for name in ("backward", "forward", "both")]
        rows.append((f"{load:g}", *cells, f"{max(1.0, load):.2f} to {1 + load:.2f}"))
    lines["all hidden"] = [(load, max(1.0, load)) for load in behind]
    lines["nothing hidden"] = [(load, 1 + load) for load in behind]
    table = Table(
        "Behind a card: step time over that without a network, and what prefetch takes off it",
        ("network / computing", *WAYS, "backward: less", "forward: less", "both: less", "all to nothing hidden"),
        rows,
    )
    bare = []
    for wire in WIRES:
        none = plain[f"none, {wire}"]
        ratios = [f"{median_ratio(plain[f'{name}, {wire}'], none):.2f}" for name in WAYS]
        bare.append((wire, *ratios, f"{1e3 * statistics.median(none):.0f}"))
    title = "As is, memory of one machine as the network: step time over that without prefetch"
    return Answer(
        STATEMENT,
        f"2 ranks of one thread, F = 2, RAF, a unit per block, {sizes}, AdamW, {sent / 1e6:.1f} MB sent per rank and "
        "step. The card delays a collective until a network of the given rate would have sent everything handed to "
        "it before; its rate is set anew each round from a step without it. Settings take turns, medians of ratios "
        "of a round.",
        [table, Table(title, ("wire", *WAYS, "none, ms"), bare)],
        {"behind a card": {str(load): times for load, times in behind.items()}, "as is": plain},
        Chart("Prefetch behind a network card", "network time / computing time", "step time / without network", lines),
    )
