"""Cost of initialisation: record a 175B-parameter GPT, and give a smaller one its memory in each way.

    python benchmarks/init.py                 # 175B recorded; 20M parameters materialised; under a minute
    python benchmarks/init.py --size 1b       # the same with 1B parameters: about 10 GB of memory, minutes

Every row runs in a process of its own, so that its peak is its own. Columns: wall time in seconds; peak memory above
the idle process in MB, beside what the way should need (shards of 1/F, plus the largest unit where it is streamed).
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn

from fsdp_core.init import deferred_init, is_deferred, materialize, seeded_init, stream_unit

SHARDING_FACTOR = 4
BYTES_PER_PARAMETER = 4


@dataclass(frozen=True)
class Size:
    vocab: int
    width: int
    layers: int
    context: int


SIZES = {
    "20m": Size(vocab=4096, width=384, layers=10, context=256),
    "1b": Size(vocab=50257, width=2048, layers=18, context=1024),
    "175b": Size(vocab=50257, width=12288, layers=96, context=2048),
}


class Block(nn.Module):
    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc, self.out = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        for linear, std in ((self.qkv, 0.02), (self.fc, 0.02), (self.proj, layers**-0.5), (self.out, layers**-0.5)):
            nn.init.normal_(linear.weight, std=std)
            nn.init.zeros_(linear.bias)


class GPT(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.tokens = nn.Embedding(size.vocab, size.width)
        self.positions = nn.Embedding(size.context, size.width)
        self.blocks = nn.ModuleList(Block(size.width, size.layers) for _ in range(size.layers))
        self.ln = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, size.vocab, bias=False)
        self.head.weight = self.tokens.weight


def units(model: GPT) -> Iterator[list[nn.Parameter]]:
    """Parameters of each unit: the root's (embeddings), then each block's."""
    in_blocks = {id(p) for p in model.blocks.parameters()}
    yield [p for p in model.parameters() if id(p) not in in_blocks]
    for block in model.blocks:
        yield list(block.parameters())


def keep_shard(unit: list[Tensor], shards: list[Tensor]) -> None:
    """What one rank keeps of a unit whose tensors are all there."""
    flat = torch.cat([t.detach().reshape(-1) for t in unit])
    shards.append(flat[: -(-flat.numel() // SHARDING_FACTOR)].clone())


def record(size: Size) -> None:
    with seeded_init(0):
        model = deferred_init(GPT, size)
    assert is_deferred(model)


def deferred_whole(size: Size) -> None:
    with seeded_init(0):
        model = deferred_init(GPT, size)
    materialize(model)


def deferred_by_unit(size: Size) -> None:
    """As an engine does it: each tensor goes into the shard and is dropped before the next one is made."""
    with seeded_init(0):
        model = deferred_init(GPT, size)
    shards: list[Tensor] = []
    for unit in units(model):
        shard_numel = -(-sum(p.numel() for p in unit) // SHARDING_FACTOR)
        shard, filled = torch.empty(shard_numel), 0
        for _, real in stream_unit(unit):
            part = real.reshape(-1)[: shard_numel - filled]
            shard[filled : filled + part.numel()] = part
            filled += part.numel()
            del real, part
        shards.append(shard)


def streamed_from_cpu(size: Size) -> None:
    with seeded_init(0):
        model = GPT(size)
    shards: list[Tensor] = []
    for unit in units(model):
        keep_shard(list(unit), shards)
        for parameter in unit:
            parameter.data = torch.empty(0)


def on_the_device(size: Size) -> None:
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"), seeded_init(0):
        model = GPT(size)
    shards: list[Tensor] = []
    for unit in units(model):
        keep_shard(list(unit), shards)


def plain_eager(size: Size) -> None:
    GPT(size)


WAYS: dict[str, Callable[[Size], None]] = {
    way.__name__: way
    for way in (record, deferred_by_unit, deferred_whole, streamed_from_cpu, on_the_device, plain_eager)
}


@dataclass(frozen=True)
class Result:
    way: str
    size: str
    num_parameters: int
    seconds: float
    peak_mb: float
    expected_mb: float


def expected_bytes(way: str, num_parameters: int, largest_unit: int) -> int:
    shards = -(-num_parameters // SHARDING_FACTOR)
    needed = {
        "record": 0,
        "deferred_by_unit": shards + largest_unit,
        "streamed_from_cpu": num_parameters + largest_unit,
        "on_the_device": num_parameters + shards + largest_unit,
    }
    return needed.get(way, num_parameters) * BYTES_PER_PARAMETER


def measure(way: str, size_name: str) -> Result:
    size = SIZES[size_name]
    model = deferred_init(GPT, size)  # also warms up what a first recording imports
    counts = [sum(p.numel() for p in unit) for unit in units(model)]
    del model
    torch.ones(8, 8).normal_() @ torch.ones(8, 8)
    idle_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.perf_counter()
    WAYS[way](size)
    seconds = time.perf_counter() - start
    peak_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - idle_kb
    expected = expected_bytes(way, sum(counts), max(counts))
    return Result(way, size_name, sum(counts), seconds, peak_kb / 1024, expected / 2**20)


def run_alone(way: str, size_name: str) -> Result:
    """Measure in a fresh process."""
    command = [sys.executable, __file__, "--one", way, "--size", size_name]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return Result(**json.loads(output.splitlines()[-1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=list(SIZES), default="20m")
    parser.add_argument("--one", choices=list(WAYS), help=argparse.SUPPRESS)
    known = parser.parse_args()
    if known.one:
        print(json.dumps(asdict(measure(known.one, known.size))))
        return
    print(f"F = {SHARDING_FACTOR}, one process, {torch.get_num_threads()} threads, torch {torch.__version__}\n")
    print("| way | parameters | seconds | peak MB | expected MB |\n|---|---:|---:|---:|---:|")
    rows = [("record", "175b"), *((way, known.size) for way in WAYS)]
    for way, size_name in rows:
        r = run_alone(way, size_name)
        print(
            f"| {r.way} | {r.num_parameters:,} | {r.seconds:.2f} | {r.peak_mb:,.0f} | {r.expected_mb:,.0f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
