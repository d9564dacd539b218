"""What this machine has, asked without torch: GPUs and cores."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path


def num_gpus(environ: Mapping[str, str] = os.environ, dev: Path = Path("/dev")) -> int:
    """NVIDIA GPUs a process started here could use: the device files, narrowed by CUDA_VISIBLE_DEVICES."""
    present = len([path for path in dev.glob("nvidia[0-9]*") if path.name.removeprefix("nvidia").isdecimal()])
    if present == 0 and (dev / "dxg").exists():
        present = _listed_by_nvidia_smi()  # Windows' Linux subsystem has no device file per GPU
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return present
    return min(present, _num_visible(visible)) if present else 0


def num_cores() -> int:
    """Cores this process may run on (an affinity mask or a container may allow fewer than the machine has)."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # macOS has no affinity masks
        return os.cpu_count() or 1


def _num_visible(visible: str) -> int:
    """CUDA stops reading the list at the first entry it does not know, such as -1."""
    count = 0
    for entry in (part.strip() for part in visible.split(",")):
        if not entry or entry.startswith("-"):
            break
        count += 1
    return count


def _listed_by_nvidia_smi() -> int:
    command = shutil.which("nvidia-smi")
    if command is None:
        return 0
    try:
        done = subprocess.run([command, "-L"], capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return sum(line.startswith("GPU ") for line in done.stdout.splitlines())
