"""What the always-on flight recorder costs: per event, per step of many tiny units, per step of gpt_tiny's model.

    python benchmarks/flight_recorder.py            # about a minute on one core
    python benchmarks/flight_recorder.py --smoke

Steps with and without the recorder are interleaved in pairs; the figures are medians over pairs, in CPU time of this
process: the recorder waits for nothing, and other programs on the machine count little.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

import fsdp_core
from recipes.flight import RingRecorder, open_recorder

EVENTS = 20_000


def event_us(recorder: RingRecorder, rounds: int) -> float:
    """The fastest of ``rounds``: the machine's other work only adds."""
    units = [f"blocks.{number}" for number in range(50)]
    found = []
    for _ in range(rounds):
        started = time.process_time()
        for number in range(EVENTS // 4):
            unit = units[number % 50]
            recorder.event("gather", unit, "forward")
            recorder.event("await", unit, "forward")
            recorder.event("forward", unit)
            recorder.event("free", unit)
        found.append((time.process_time() - started) / EVENTS * 1e6)
    return min(found)


def step_of(model: nn.Module, batch: Tensor) -> Callable[[], None]:
    def step() -> None:
        model(batch).float().pow(2).mean().backward()
        model.zero_grad()

    return step


def paired(model: nn.Module, step: Callable[[], None], recorder: RingRecorder, rounds: int) -> tuple[float, float, int]:
    """(milliseconds without, milliseconds with, records of a step); medians of interleaved pairs."""
    times: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(3):
        step()
    for number in range(rounds):
        for is_on in (False, True) if number % 2 else (True, False):
            fsdp_core.record_flight(model, recorder if is_on else None)
            started = time.process_time()
            step()
            times[is_on].append((time.process_time() - started) * 1e3)
    before = recorder.num_events
    fsdp_core.record_flight(model, recorder)
    step()
    return statistics.median(times[False]), statistics.median(times[True]), recorder.num_events - before


def tiny_units(count: int) -> tuple[nn.Module, Tensor]:
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(count)])
    return fsdp_core.fully_shard(model, units=(nn.Linear,)), torch.randn(4, 8)


def transformer() -> tuple[nn.Module, Tensor]:
    """Blocks of the size of gpt_tiny's."""
    layer = nn.TransformerEncoderLayer(128, 4, 512, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
    return fsdp_core.fully_shard(model, units=(nn.TransformerEncoderLayer,)), torch.randn(4, 128, 128)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="a few steps, to see that it works")
    smoke = parser.parse_args().smoke
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        recorder = open_recorder(Path(folder), rank=0, world_size=1, attempt=1, host="")
        assert isinstance(recorder, RingRecorder)
        print(f"one event: {event_us(recorder, 2 if smoke else 15):.2f} us", flush=True)
        print("| model | records of a step | without (ms) | with (ms) | difference |")
        print("|---|---|---|---|---|")
        rounds = 3 if smoke else 40
        for name, (model, batch) in (
            ("200 units of 72 parameters", tiny_units(200)),
            ("4 blocks as gpt_tiny's", transformer()),
        ):
            without, with_it, count = paired(model, step_of(model, batch), recorder, rounds)
            print(
                f"| {name} | {count} | {without:.2f} | {with_it:.2f} | {100 * (with_it / without - 1):+.1f} % |",
                flush=True,
            )


if __name__ == "__main__":
    main()
