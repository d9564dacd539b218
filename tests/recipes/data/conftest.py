"""A request as the loop makes it, and a small corpus of its own words."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import settings

from recipes.data.records import PrepareRequest

# The same examples every time, and no deadline: a test must not fail because the machine is busy.
settings.register_profile("fsdp-launcher", deadline=None, derandomize=True, max_examples=60)
settings.load_profile("fsdp-launcher")

RequestMaker = Callable[..., PrepareRequest]


@pytest.fixture
def reports() -> list[str]:
    """Lines that data sources reported."""
    return []


@pytest.fixture
def make_request(tmp_path: Path, reports: list[str]) -> RequestMaker:
    """``make_request(task, seq_len=..., ...)``: of a single rank with a cache of its own."""
    cache_dir = tmp_path / "cache"
    cache_dir.mkdir()

    def make(task: str, **changes: object) -> PrepareRequest:
        fields: dict[str, object] = {
            "task": task,
            "seed": 0,
            "seq_len": None,
            "image_size": None,
            "is_main": True,
            "barrier": lambda: None,
            "cache_dir": cache_dir,
            "report": reports.append,
        }
        return PrepareRequest(**{**fields, **changes})  # type: ignore[arg-type]

    return make


@pytest.fixture
def corpus_folder(tmp_path: Path) -> Path:
    """Forty files of 100 numbered lines, no line twice: a piece of text tells where it came from."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    for number in range(40):
        lines = [f"line {number:02}-{line:02} of the corpus, naïve and 数えた\n" for line in range(100)]
        (folder / f"file_{number:02}.txt").write_text("".join(lines), encoding="utf-8")
    return folder
