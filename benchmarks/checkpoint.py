"""What a checkpoint costs: training time stolen by an asynchronous save, and write speed beside plain file writes.

    python benchmarks/checkpoint.py            # 100M parameters, 2 ranks, 4 pairs: five minutes; nothing else may run
    python benchmarks/checkpoint.py --smoke    # seconds: does everything still run?

Two CPU ranks train a GPT (F = 2, AdamW, float32). Blocks of 20 steps take turns: one begins with a save, one saves
nothing. Stolen: how much longer the block with the save took, its wait for the end of the writing included. Write
speed: synchronous saves and plain writes of the same bytes into one file a rank (both synced to the disk) take turns.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from engine_bench.report import conditions, paired_ratio, spread, write

import fsdp_core
from recipes.checkpoint.checkpointer import Checkpointer, TrainState
from recipes.data.records import DataInfo
from recipes.models import gpt
from recipes.ranks import Ranks
from recipes.schema.model import GPTConfig
from recipes.schema.training import CheckpointConfig
from recipes.step import Trainee

RESULTS = Path(__file__).resolve().parent / "results"
WORLD_SIZE = 2
SEQ_LEN = 32
Times = dict[str, list[float]]


def main(arguments: list[str] | None = None) -> int:
    options = _options(arguments)
    if options.rank is not None:
        _rank(options)
        return 0
    facts = {**conditions(), "ranks": WORLD_SIZE, "threads a rank": 1}
    with tempfile.TemporaryDirectory(dir=options.dir, prefix="checkpoint-benchmark-") as folder:
        command = [sys.executable, __file__, *sys.argv[1:], "--folder", folder]
        ranks = [subprocess.Popen([*command, "--rank", str(rank)]) for rank in range(WORLD_SIZE)]
        ends = [rank.wait() for rank in ranks]
        if any(ends):
            return 1
        data = json.loads((Path(folder) / "times.json").read_text())
    body = table(data["times"], data["parameters"], data["bytes"], data["steps"])
    print(body)
    stem = "checkpoint-smoke" if options.smoke else "checkpoint"
    print("written:", *[path.name for path in write(options.out, stem, facts, body, data)])
    return 0


def table(times: Times, num_parameters: int, num_bytes: int, steps: int) -> str:
    """Of one run; times in seconds, the slower rank's."""
    stolen = spread([with_save - without for with_save, without in zip(times["saving"], times["quiet"], strict=True)])
    speeds = {way: spread([num_bytes / 1e9 / seconds for seconds in times[way]]) for way in ("save", "plain")}
    ratio = paired_ratio(times["save"], times["plain"])
    return "\n".join(
        [
            f"{num_parameters:,} parameters, {num_bytes / 1e9:.2f} GB a checkpoint, blocks of {steps} steps; median "
            "[quartiles] of pairs.",
            "",
            "| what | seconds |",
            "|---|---|",
            f"| {steps} steps without a save | {spread(times['quiet'])} |",
            f"| {steps} steps that begin with an asynchronous save, which is complete at their end "
            f"| {spread(times['saving'])} |",
            f"| **stolen per save**, paired | {stolen} |",
            f"| of it: training stands still for the copy | {spread(times['still'])} |",
            f"| of it: waiting for the writing at the end of the block | {spread(times['wait'])} |",
            "",
            "| writing | GB/s, all ranks |",
            "|---|---|",
            f"| synchronous save: checksum, fsync, manifest, marker, rename | {speeds['save']} |",
            f"| the same bytes, plain writes and fsync | {speeds['plain']} |",
            f"| time of a save over plain writes, paired | {ratio} |",
        ]
    )


def _rank(options: argparse.Namespace) -> None:
    """One rank of the measurement; rank 0 leaves times.json."""
    torch.set_num_threads(1)
    folder = Path(options.folder)
    store = dist.FileStore(str(folder / "store"), WORLD_SIZE)
    dist.init_process_group(
        "gloo", rank=options.rank, world_size=WORLD_SIZE, store=store, timeout=timedelta(minutes=10)
    )
    work, num_parameters = _trainee(options.rank, options.smoke)
    pairs, steps = (1, 2) if options.smoke else (options.pairs, 20)
    _train(work, 3)  # the optimizer's state exists, buffers are warm
    times: Times = {name: [] for name in ("quiet", "saving", "still", "wait", "save", "plain")}
    _steal(work, folder, times, pairs, steps)
    num_bytes = _write(work, folder, times, pairs)
    if options.rank == 0:
        facts = {"times": times, "parameters": num_parameters, "bytes": num_bytes, "steps": steps}
        (folder / "times.json").write_text(json.dumps(facts))
    dist.barrier()
    dist.destroy_process_group()


def _steal(work: Trainee, folder: Path, times: Times, pairs: int, steps: int) -> None:
    saver = _checkpointer(work, folder / "asynchronous", asynchronous=True)
    saver.save(TrainState(0, {}, {}))  # the first one allocates the host copy, once a run
    saver.wait()
    for pair in range(pairs):
        for is_saving in (True, False) if pair % 2 else (False, True):
            dist.barrier()
            started = time.perf_counter()
            if is_saving:
                saver.save(TrainState(pair + 1, {}, {}))
                times["still"].append(_slowest(work, time.perf_counter() - started))
            _train(work, steps)
            trained = time.perf_counter()
            if is_saving:
                saver.wait()
                times["wait"].append(_slowest(work, time.perf_counter() - trained))
            times["saving" if is_saving else "quiet"].append(_slowest(work, time.perf_counter() - started))


def _write(work: Trainee, folder: Path, times: Times, pairs: int) -> int:
    """Returns the bytes of a checkpoint's files, over all ranks."""
    root, plain = folder / "synchronous", folder / f"plain{work.ranks.rank}"
    saver = _checkpointer(work, root, asynchronous=False)
    saver.save(TrainState(0, {}, {}))
    own = (root / "step_00000000" / f"rank_{work.ranks.rank:05d}.safetensors").stat().st_size
    content = memoryview(torch.randint(256, (own,), dtype=torch.uint8).numpy())
    for pair in range(pairs):
        for is_save in (True, False) if pair % 2 else (False, True):
            plain.unlink(missing_ok=True)
            dist.barrier()
            started = time.perf_counter()
            if is_save:
                saver.save(TrainState(pair + 1, {}, {}))
            else:
                with plain.open("wb", buffering=0) as file:
                    for start in range(0, own, 16 << 20):
                        file.write(content[start : start + (16 << 20)])
                    os.fsync(file.fileno())
            times["save" if is_save else "plain"].append(_slowest(work, time.perf_counter() - started))
    shutil.rmtree(folder / "asynchronous", ignore_errors=True)
    return int(work.ranks.sum(torch.tensor(own)).item())


def _slowest(work: Trainee, seconds: float) -> float:
    return float(work.ranks.max(torch.tensor(seconds, dtype=torch.float64)).item())


def _checkpointer(work: Trainee, root: Path, *, asynchronous: bool) -> Checkpointer:
    config = CheckpointConfig(keep_last=1, asynchronous=asynchronous)
    return Checkpointer(root, work, work.ranks, config, 0, {})


def _trainee(rank: int, is_small: bool) -> tuple[Trainee, int]:
    layers, width, vocab = (2, 64, 100) if is_small else (12, 768, 10_000)
    config = GPTConfig(num_layers=layers, num_heads=width // 64, hidden_size=width, max_seq_len=SEQ_LEN)
    info = DataInfo("causal_lm", vocab_size=vocab, seq_len=SEQ_LEN)
    with fsdp_core.seeded_init(0):
        model = fsdp_core.deferred_init(gpt.build, config, info)
    fsdp_core.fully_shard(model, units=gpt.unit_classes(), device="cpu", ranks_per_host=WORLD_SIZE)
    optimizer = torch.optim.AdamW(fsdp_core.flat_parameters(model), lr=1e-4, fused=True)
    scaler = fsdp_core.ShardedGradScaler(model, "cpu", enabled=False)
    ranks = Ranks(rank, WORLD_SIZE, torch.device("cpu"))
    work = Trainee(model, None, optimizer, (), scaler, ranks, math.inf, False)  # type: ignore[arg-type]
    return work, fsdp_core.describe(model).num_parameters


def _train(work: Trainee, steps: int) -> None:
    generator = torch.Generator().manual_seed(work.ranks.rank)
    for _ in range(steps):
        tokens = torch.randint(100, (1, SEQ_LEN), generator=generator)
        output: Any = work.model(tokens)
        output.float().square().mean().backward()
        work.optimizer.step()
        work.optimizer.zero_grad()


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="a tiny model, one pair")
    parser.add_argument("--pairs", type=int, default=4, help="pairs of blocks and of writes")
    parser.add_argument("--dir", type=Path, help="folder on the disk to measure; default: the system's temporary one")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the table and JSON")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
