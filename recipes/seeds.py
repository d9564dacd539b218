"""Seeds of a run: one for the weights, the same on all ranks; one for dropout, different on every rank."""

from __future__ import annotations

import hashlib
import os
import random

import numpy as np
import torch

from recipes.schema.training import RunConfig


def derived_seed(*parts: int | str) -> int:
    """A 63-bit seed from the run's seed and what it is for; no two purposes share a stream."""
    text = "/".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def seed_everything(seed: int) -> None:
    """torch on every device, numpy and ``random``, from now on in this process."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def seed_training(run: RunConfig, rank: int) -> None:
    """For everything random after the model exists (dropout): each rank its own, as its samples are its own."""
    seed_everything(derived_seed(run.seed, "training", rank))


def choose_kernels(run: RunConfig) -> None:
    """Deterministic kernels where ``run.deterministic`` asks for them; an operation without one raises."""
    torch.use_deterministic_algorithms(run.deterministic)
    if torch.cuda.is_available():
        torch.backends.cudnn.benchmark = not run.deterministic
    if run.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts, at the first product
