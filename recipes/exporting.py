"""``run``: the whole of ``action=export``, in one process without ranks."""

from __future__ import annotations

from pathlib import Path

import torch

from recipes.checkpoint.errors import CheckpointError
from recipes.data.errors import DataError
from recipes.portable.errors import FolderError
from recipes.portable.export import Exported, export
from recipes.prepare import data_info
from recipes.ranks import Ranks
from recipes.registry import MODELS
from recipes.report import Report
from recipes.schema import RecipeConfig

USERS_ERRORS = (CheckpointError, DataError, FolderError)
_TEXT = ("causal_lm", "seq2seq_lm")


def run(config: RecipeConfig) -> str:
    """Writes ``export.dir`` from the checkpoint ``checkpoint.resume``; a few lines for people.

    Raises:
        One of ``USERS_ERRORS``: what the user must change; nothing has been left behind.
    """
    alone = Ranks(rank=0, world_size=1, device=torch.device("cpu"))
    is_text = MODELS[config.model.kind].task in _TEXT
    info = data_info(config, alone, Report(is_main=True, is_interactive=False)) if is_text else None
    return told(export(Path(config.checkpoint.resume), config.model, info, config.export))


def told(exported: Exported) -> str:
    files = "1 file" if exported.num_files == 1 else f"{exported.num_files} files"
    lines = [f"{exported.num_tensors} tensors, {exported.num_bytes:,} bytes in {files}", *exported.notes]
    return "\n".join([*lines, f"model folder: {exported.folder}"])
