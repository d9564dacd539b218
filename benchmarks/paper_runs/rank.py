"""The process of one rank: joins the group, then runs what it is sent.

    python -m paper_runs.rank FD RANK WORLD_SIZE PORT NAME JSON

Command (pickled tuple): (function, *arguments) -> function(rank, *arguments).
"""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from engine_bench.serve import serve

STORE_PORT = 29400  # on a host of its own: nobody else is there


def main() -> None:
    fd, rank, world_size, port = map(int, sys.argv[1:5])
    serve(fd, lambda: _start(rank, world_size, port, json.loads(sys.argv[6])))


def _start(rank: int, world_size: int, port: int, details: dict[str, Any]) -> Callable[[tuple[Any, ...]], Any]:
    if "store" in details:  # the starting process is on another network
        store = dist.TCPStore(details["store"], STORE_PORT, is_master=rank == 0, wait_for_workers=False)
    else:
        store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group(
        "gloo",
        rank=rank,
        world_size=world_size,
        store=dist.PrefixStore("paper", store),
        timeout=timedelta(minutes=5),
    )

    def answer(command: tuple[Any, ...]) -> Any:
        function, *arguments = command
        torch.manual_seed(0)
        try:
            return function(rank, *arguments)
        finally:
            gc.collect()

    return answer


if __name__ == "__main__":
    main()
