"""Work in a copy of this process: its answer, and every way of not giving one."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import psutil
import pytest
import torch

from recipes.plan.aside import NoAnswer, answer_of


def fails() -> None:
    raise ValueError("not today\nand more")


def test_an_answer_of_any_size_comes_back_and_nothing_else_changes() -> None:
    before = signal.getsignal(signal.SIGTERM)
    changed: list[int] = []

    def work() -> dict[str, Any]:
        changed.append(1)
        return {"text": "x" * 300_000, "threads": torch.get_num_threads(), "sum": float(torch.ones(1 << 20).sum())}

    found = answer_of(work, 60)
    assert (len(found["text"]), found["threads"], found["sum"]) == (300_000, 1, 1 << 20)
    assert not changed
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize(
    ("work", "says"),
    [
        (fails, "ValueError: not today$"),
        (lambda: os._exit(0), "ended without a word"),
        (lambda: os.kill(os.getpid(), signal.SIGTERM), "ended without a word"),
        (lambda: object(), "not JSON serializable"),
    ],
    ids=["raises", "leaves", "killed", "no JSON"],
)
def test_no_answer_is_told(work: Callable[[], Any], says: str) -> None:
    with pytest.raises(NoAnswer, match=says):
        answer_of(work, 60)


def test_who_hangs_is_ended() -> None:
    before = {child.pid for child in psutil.Process().children()}
    with pytest.raises(NoAnswer, match=r"more than 0.3 s"):
        answer_of(lambda: time.sleep(600), 0.3)
    with pytest.raises(NoAnswer, match="nobody asks any more"):
        answer_of(lambda: time.sleep(600), 60, lambda: "nobody asks any more")
    assert {child.pid for child in psutil.Process().children()} <= before
