"""A plugin: a one-block GPT that, in its second forward on one rank, does what a test asks for."""

from __future__ import annotations

import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipes.registry import register_model
from recipes.schema.fields import described
from recipes.schema.model import GPTConfig

HOW = ("train", "raise", "raise_once", "kill", "leave", "memory", "wait", "stop", "sleep")


@dataclass
class MisbehavingConfig(GPTConfig):
    kind: str = described("misbehaving", "misbehaving")
    num_layers: int = described(1, "blocks")
    num_heads: int = described(2, "heads")
    hidden_size: int = described(16, "width")
    max_seq_len: int = described(32, "positions")
    how: str = described("train", "what to do", choices=HOW)
    at_rank: int = described(0, "which rank does it")
    in_block: bool = described(False, "do it in the last block's forward instead of the model's")
    ready_dir: str = described("", "folder in which each rank leaves a file when it gets there")


@register_model("misbehaving", MisbehavingConfig, task="causal_lm")
class Misbehaving:
    @staticmethod
    def build(config: MisbehavingConfig, info: Any) -> Any:
        from recipes.models import gpt  # imports torch: only where a model is built

        model = gpt.build(config, info)
        num_calls = 0

        def before_forward(module: Any, inputs: Any) -> None:
            nonlocal num_calls
            num_calls += 1
            if num_calls == 2:
                _misbehave(config)

        place = model.blocks[-1] if config.in_block else model
        place.register_forward_pre_hook(before_forward)
        return model

    @staticmethod
    def unit_classes() -> tuple[type, ...]:
        from recipes.models import gpt

        return gpt.unit_classes()


def _is_first_attempt(config: MisbehavingConfig) -> bool:
    """Attempts are counted by torchrun, or by the mark that the first one leaves."""
    mark = Path(config.ready_dir or ".", f"misbehaved_{os.environ['RANK']}")
    is_first = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0" and not mark.exists()
    if config.ready_dir:
        mark.touch()
    return is_first


def _misbehave(config: MisbehavingConfig) -> None:
    rank = int(os.environ["RANK"])
    if config.ready_dir:
        (Path(config.ready_dir) / f"ready_{rank}").touch()
    if config.how == "wait":
        time.sleep(600)
    if rank != config.at_rank:
        return
    if config.how == "raise" or (config.how == "raise_once" and _is_first_attempt(config)):
        raise RuntimeError("this rank does not like the weather")
    if config.how == "memory":
        raise MemoryError("no room")
    if config.how == "leave":
        sys.stdout.flush()
        os._exit(0)
    if config.how == "stop":
        time.sleep(0.5)  # what this rank has begun in the background is complete
        os.kill(os.getpid(), signal.SIGSTOP)
    if config.how == "sleep":
        time.sleep(600)
    if config.how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
