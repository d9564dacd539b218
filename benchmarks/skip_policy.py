"""What train.on_bad_loss=skip costs in each step: one sum of a number over ranks before the optimizer, and reading it.

    python benchmarks/skip_policy.py            # under a minute on two cores
    python benchmarks/skip_policy.py --smoke

Two ranks on the CPU train gpt_tiny's model. Steps with and without the question are interleaved in pairs, in both
orders; the figures are of rank 0's wall time: medians, and the middle half of the differences within pairs.
"""

from __future__ import annotations

import argparse
import socket
import statistics
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import yaml

from recipes.build import build_trainee
from recipes.context import RankContext
from recipes.data.records import DataInfo
from recipes.loss_guard import LossGuard
from recipes.metrics.clock import step_clock
from recipes.ranks import Ranks
from recipes.registry import MODELS
from recipes.schema import RecipeConfig
from recipes.schema.training import AdamWConfig
from recipes.step import train_step

WORLD_SIZE, BATCH, SEQ_LEN, VOCAB = 2, 4, 128, 259
PRESET = Path(__file__).resolve().parents[1] / "configs" / "model" / "gpt_tiny.yaml"


def config_of() -> RecipeConfig:
    config = RecipeConfig()
    config.model = MODELS["gpt"].config(**yaml.safe_load(PRESET.read_text()))
    config.optimizer = AdamWConfig(lr=1e-3)
    config.train.steps, config.train.global_batch = 1, WORLD_SIZE * BATCH
    config.train.on_bad_loss = "skip"
    return config


def work(rank: int, port: int, rounds: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=WORLD_SIZE)
    config = config_of()
    context = RankContext(rank, WORLD_SIZE, rank, WORLD_SIZE, 0, 1, ("here",) * WORLD_SIZE, "cpu", Path("nowhere"))
    ranks = Ranks.of(context)
    info = DataInfo("causal_lm", vocab_size=VOCAB, seq_len=SEQ_LEN, num_train=BATCH, num_eval=0, description="random")
    trainee = build_trainee(config, context, ranks, info).trainee
    guard = LossGuard(config.train, False, ranks, lambda line: None)
    tokens = torch.randint(0, VOCAB, (BATCH, SEQ_LEN + 1))
    batch = {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:].clone()}
    clock, times = step_clock(ranks.device), dict[bool, list[float]]({False: [], True: []})
    for number in range(-3, rounds):
        for asks in (False, True) if number % 2 else (True, False):
            ranks.barrier()
            clock.start()
            started = time.perf_counter()
            train_step(trainee, [batch], 1e-3, clock, (), guard.veto(1) if asks else None)
            if number >= 0:
                times[asks].append((time.perf_counter() - started) * 1e3)
    if rank == 0:
        without, with_it = statistics.median(times[False]), statistics.median(times[True])
        extra = sorted(b - a for a, b in zip(times[False], times[True], strict=True))
        low, middle, high = (extra[len(extra) * part // 4] for part in (1, 2, 3))
        print(f"a step without: {without:.2f} ms, with: {with_it:.2f} ms ({rounds} pairs)")
        print(f"difference within a pair: {middle:+.2f} ms (middle half {low:+.2f} to {high:+.2f})", flush=True)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="a few steps, to see that it works")
    rounds = 3 if parser.parse_args().smoke else 200
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.spawn(work, args=(port, rounds), nprocs=WORLD_SIZE)


if __name__ == "__main__":
    main()
