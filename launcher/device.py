"""CPU or CUDA for the ranks of one host, decided before any rank starts and without importing torch."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path


def choose_device(wanted: str, num_ranks: int, num_gpus: int, torch_cuda: str | None) -> tuple[str, str | None]:
    """(``cpu`` or ``cuda``, a line that says why it is not cuda although there are GPUs).

    wanted: ``cluster.device``. torch_cuda: the CUDA version torch was built for, None for a CPU build.

    Raises:
        ValueError: cuda was asked for by name and cannot be had.
    """
    if wanted == "cpu" or (wanted == "auto" and num_gpus == 0):
        return "cpu", None
    if num_gpus >= num_ranks and torch_cuda is not None:
        return "cuda", None
    reason = f"{num_ranks} ranks and {num_gpus} GPUs" if torch_cuda is not None else "this torch is built without CUDA"
    if wanted == "cuda":
        raise ValueError(reason)
    return "cpu", f"training on the CPU: {reason}"


def torch_cuda_version() -> str | None:
    """The CUDA version of the installed torch, read from its version file: importing torch takes seconds."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    version_file = Path(spec.origin).with_name("version.py")
    match = re.search(r"^cuda\b[^=\n]*=\s*'([^']+)'", version_file.read_text(), re.MULTILINE)
    return match.group(1) if match else None
