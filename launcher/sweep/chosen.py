"""Which backend runs a sweep's jobs."""

from __future__ import annotations

import os
from collections.abc import Sequence

from launcher.device import torch_cuda_version
from launcher.machine import num_cores, num_gpus
from launcher.sweep import slurm
from launcher.sweep.backends import Backend
from launcher.sweep.folder import Sweep
from launcher.sweep.local import LocalBackend, Machine, gpu_names, job_command


def backend_of(sweep: Sweep, plugins: Sequence[str], max_parallel: int) -> Backend:
    """plugins: the user's files, as typed now. max_parallel: jobs at once, at most as many as there are."""
    if sweep.asked.backend == slurm.NAME:
        return slurm.SlurmBackend(sweep, plugins, max_parallel, os.environ)
    gpus = gpu_names(num_gpus(), os.environ)
    machine = Machine(num_cores(), gpus, torch_cuda_version() if gpus else None)
    return LocalBackend(job_command(plugins), machine, max_parallel, cwd=sweep.asked.cwd)
