"""The random generators of one rank: Python's, numpy's, torch's on the host and on its GPU, as plain data."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor

from recipes.schema.training import RunConfig
from recipes.seeds import derived_seed, seed_everything

Saved = dict[str, Any]  # JSON values and tensors


def capture(device: torch.device) -> Saved:
    """Of this moment. Dropout draws from torch's generator of the device that computes."""
    version, internal, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    found: Saved = {
        "python": {"version": version, "internal": list(internal), "gauss": gauss},
        "numpy": {"name": name, "position": position, "has_gauss": has_gauss, "cached": cached},
        "numpy_keys": torch.from_numpy(np.asarray(keys).astype(np.int64)),
        "torch": torch.get_rng_state(),
    }
    if device.type == "cuda":
        found["cuda"] = torch.cuda.get_rng_state(device)
    return found


def restore(saved: Saved, device: torch.device) -> None:
    python, numpy = saved["python"], saved["numpy"]
    random.setstate((python["version"], tuple(python["internal"]), python["gauss"]))
    keys: Tensor = saved["numpy_keys"]
    np.random.set_state(
        (numpy["name"], keys.numpy().astype(np.uint32), numpy["position"], numpy["has_gauss"], numpy["cached"])
    )
    torch.set_rng_state(saved["torch"])
    if device.type == "cuda" and "cuda" in saved:
        torch.cuda.set_rng_state(saved["cuda"], device)


def reseed(run: RunConfig, rank: int, step: int) -> None:
    """Where no saved state fits (another number of ranks): streams that follow from the run, the rank and the step,
    so that they do not repeat what the ranks drew before."""
    seed_everything(derived_seed(run.seed, "training", rank, "from step", step))
