"""The process of one rank of one contestant.

    python -m engine_bench.worker FD RANK WORLD_SIZE PORT CONTESTANT CASE_JSON

Commands (pickled tuples): ("steps", n) -> Block; ("bytes",) -> bytes sent so far, by primitive, or None.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import sys
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from engine_bench.answers import Block
from engine_bench.cases import Case
from engine_bench.contestants import Training, make
from engine_bench.serve import serve


def cpu_seconds() -> float:
    """User and system time of this process, all threads."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def run_steps(training: Training, count: int) -> Block:
    started, used = time.perf_counter(), cpu_seconds()
    for _ in range(count):
        training.step()
    return Block(time.perf_counter() - started, cpu_seconds() - used, float(training.last_loss))


def main() -> None:
    fd, rank, world_size, port = map(int, sys.argv[1:5])
    serve(fd, lambda: _start(sys.argv[5], Case(**json.loads(sys.argv[6])), rank, world_size, port))


def _start(name: str, case: Case, rank: int, world_size: int, port: int) -> Any:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    if name != "floor":
        store = dist.TCPStore("127.0.0.1", port, is_master=False)
        dist.init_process_group(
            "gloo",
            rank=rank,
            world_size=world_size,
            store=dist.PrefixStore("bench", store),
            timeout=timedelta(minutes=10),
        )
    training = make(name, case, rank)
    gc.collect()

    def answer(command: tuple[Any, ...]) -> Any:
        if command[0] == "steps":
            return run_steps(training, command[1])
        return training.count_bytes() if training.count_bytes is not None else None

    return answer


if __name__ == "__main__":
    main()
