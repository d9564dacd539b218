"""A process of its own that exports, or imports, a model and says how much memory that took: ``test_memory`` runs it.

    python -m tests.recipes.portable.memory_probe save|export|import RUN_DIR FOLDER

Prints a JSON record: ``grown_bytes``, the largest growth of this process's anonymous memory over what it had before
(mapped files are the kernel's to drop, so they do not count), and ``model_bytes``.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

import fsdp_core
from recipes.portable.export import export
from recipes.schema import RecipeConfig
from recipes.schema.actions import ExportConfig
from tests.recipes.portable.made import built, config_of, info_of, save_checkpoint

# 12 blocks of width 768 on 32,000 tokens: 110 million parameters, 440 MB; the largest tensor has 98 MB.
SIZES = {"num_layers": 12, "num_heads": 12, "hidden_size": 768, "vocab_size": 32_000, "tie_head": True}
LARGEST_BYTES = 32_000 * 768 * 4
_EVERY_S = 0.002


def anonymous_bytes() -> int:
    text = Path("/proc/self/status").read_text()
    return int(next(line for line in text.splitlines() if line.startswith("RssAnon")).split()[1]) * 1024


@contextmanager
def watched(record: dict[str, int]) -> Iterator[None]:
    before, is_over = anonymous_bytes(), threading.Event()
    highest = [before]

    def watch() -> None:
        while not is_over.wait(_EVERY_S):
            highest.append(max(highest.pop(), anonymous_bytes()))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
        record["grown_bytes"] = max(highest[0], anonymous_bytes()) - before


def main(mode: str, run_dir: str, folder: str) -> dict[str, int]:
    torch.set_num_threads(1)
    config: RecipeConfig = config_of("gpt_tiny", **SIZES)
    record: dict[str, int] = {}
    if mode == "save":
        save_checkpoint(None, config, run_dir)
    elif mode == "export":
        checkpoint, info = Path(run_dir) / "checkpoints" / "step_00000007", info_of(config)
        with watched(record):
            record["model_bytes"] = export(checkpoint, config.model, info, ExportConfig(dir=folder)).num_bytes
    else:
        config.model.init_from = folder
        with watched(record):
            model = built(None, config)
        record["model_bytes"] = sum(flat.numel() * 4 for flat in fsdp_core.flat_parameters(model))
    return record


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
