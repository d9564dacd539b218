"""Units from the whole model down to single parameters: memory, collectives and time."""

from __future__ import annotations

from paper_runs import training
from paper_runs.answer import Answer, Chart, Table, mb, median_ratio
from paper_runs.decoder import Sizes
from paper_runs.ranks import Pool
from paper_runs.training import Setting, turns

STATEMENT = (
    "Section 3.2.1 and 4.2: the size of units trades memory against communication ('finer-grained units may reduce "
    "peak memory but may reduce throughput'). No size but one block was measured."
)


def run(pool: Pool, small: bool) -> Answer:
    sizes = Sizes(layers=4, width=32, batch=1, seq_len=16) if small else Sizes()
    cuts = ("one", "4", "2", "1", "layers")
    names = {"one": "the whole model", "4": "4 blocks", "2": "2 blocks", "1": "1 block", "layers": "one parameter"}
    latencies, rounds = ((0.0, 2e-3), 1 if small else 4)
    ranks = pool(2)
    settings = {cut: Setting(cut=cut, forward_prefetch=True, slow=True, buffers="allocator") for cut in cuts}
    reports = {cut: ranks.run(training.start, cut, sizes, setting)[0] for cut, setting in settings.items()}
    try:
        watched = {cut: ranks.run(training.watch, cut)[0] for cut in cuts}
        bare = turns(ranks, list(cuts), rounds, 1)
        rate = 2 * sum(watched["1"].sent.values()) / min(bare["1"])  # half as long as computing
        times = {}
        for latency_s in latencies:
            ranks.run(training.set_card, rate, latency_s)
            times[latency_s] = turns(ranks, list(cuts), rounds, 1)
    finally:
        ranks.run(training.set_card, float("inf"), 0.0)
        ranks.run(training.drop, *cuts)
    rows = []
    for cut in cuts:
        one = watched[cut]
        ratios = [median_ratio(times[latency_s][cut], bare["1"]) for latency_s in latencies]
        rows.append(
            (
                names[cut],
                str(len(reports[cut].units)),
                str(sum(one.calls.values())),
                mb(one.gathered),
                mb(one.live),
                mb(sum(one.sent.values())),
                f"{median_ratio(bare[cut], bare['1']):.2f}",
                *(f"{ratio:.2f}" for ratio in ratios),
            )
        )
    header = ("unit", "units with the root", "collectives", "gathered MB at most", "buffers MB at most", "sent MB")
    header += ("no network", *(f"network, {1e3 * latency_s:g} ms latency" for latency_s in latencies))
    lines = {
        f"{1e3 * latency_s:g} ms a collective": [
            (len(reports[cut].units), median_ratio(times[latency_s][cut], bare["1"])) for cut in cuts
        ]
        for latency_s in latencies
    }
    return Answer(
        STATEMENT,
        f"2 ranks of one thread, F = 2, RAF, both prefetches, limit 2, {sizes}, AdamW. Every leaf module holds one "
        "parameter. The card moves a step's bytes in half the time of computing; a latency is paid by every "
        "collective, one after the other. Step times are over that of one block a unit without a network, medians of "
        "ratios of a round.",
        [Table("Unit size", header, rows)],
        {
            "no network": bare,
            "times": {str(latency_s): found for latency_s, found in times.items()},
            "watched": {cut: vars(one) for cut, one in watched.items()},
        },
        Chart("Unit size behind a network card", "units", "step time / blocks without network", lines, log_x=True),
    )
