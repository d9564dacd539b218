"""What each local rank is started with: command line and environment, as data. Starts nothing, imports no torch."""

from __future__ import annotations

import site
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import launcher
from launcher.rank_process import RankCommand
from launcher.run_folder import rank_log
from launcher.schema import ClusterConfig

LOOPBACK = "127.0.0.1"
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def rank_commands(
    run_dir: Path,
    plugins: Sequence[str],
    cluster: ClusterConfig,
    *,
    attempt: int,
    ends_at: float | None,
    device: str,
    listen_fd: int,
    port: int,
    num_cores: int,
    base: Mapping[str, str],
    is_deterministic: bool,
    is_interactive: bool,
) -> list[RankCommand]:
    """The ranks of a run on this host alone: rank and local rank are one number.

    ends_at: when the time limit is over, on this host's monotonic clock, so that the ranks save before it.
    device: ``cpu`` or ``cuda``; each rank takes the GPU of its local rank among the visible ones.
    listen_fd, port: the rendezvous' socket, already listening, so that no other process can take the port between
        choosing and using it; rank 0 inherits it.
    base: the environment to start from; ``cluster.env`` wins over everything.
    """
    argv = [sys.executable, "-P", "-m", "launcher.worker", "--run-dir", str(run_dir), "--device", device]
    argv += ["--attempt", str(attempt)]
    if ends_at is not None:
        argv += ["--ends-at", repr(ends_at)]
    for plugin in plugins:
        argv += ["--plugin", str(Path(plugin).absolute())]
    world_size = cluster.nproc_per_node
    shared = {
        **base,
        **python_path(base),
        **_threads(base, cluster.cpu_threads_per_rank, num_cores, world_size),
        "PYTHONUNBUFFERED": "1",  # a log can be followed, and nothing is lost when a rank is killed
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": str(port),
    }
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):  # one host: nothing needs to listen to the network
        shared.setdefault(name, loopback_interface())
    if is_deterministic:
        shared.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it once, when CUDA starts
    commands = []
    for rank in range(world_size):
        own_argv = list(argv)
        inherit: tuple[int, ...] = ()
        if rank == 0 and world_size > 1:
            own_argv += ["--listen-fd", str(listen_fd)]
            inherit = (listen_fd,)
        if rank == 0 and is_interactive:
            own_argv.append("--interactive")
        env = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank), **cluster.env}
        commands.append(RankCommand(rank, tuple(own_argv), env, rank_log(run_dir, rank), inherit))
    return commands


def loopback_interface() -> str:
    """``lo`` on Linux, ``lo0`` on macOS."""
    names = [name for _, name in socket.if_nameindex() if name.startswith("lo")]
    return "lo" if "lo" in names or not names else names[0]


def _threads(base: Mapping[str, str], threads_per_rank: int | None, num_cores: int, num_ranks: int) -> dict[str, str]:
    """Cores divided among ranks, unless the config or the user's environment says otherwise."""
    if threads_per_rank is None and "OMP_NUM_THREADS" in base:
        return {}
    count = threads_per_rank or max(1, num_cores // num_ranks)
    return dict.fromkeys(_THREAD_VARIABLES, str(count))


def python_path(base: Mapping[str, str]) -> dict[str, str]:
    """Ranks import the launcher this process runs, also from a checkout that was never installed."""
    root = str(Path(launcher.__file__).parent.parent)
    if root in {*site.getsitepackages(), site.getusersitepackages()}:
        return {}
    before = base.get("PYTHONPATH")
    return {"PYTHONPATH": f"{root}:{before}" if before else root}
