"""The short version of ``python tests/faults/kill_resume.py``."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.faults import kill_resume


def test_four_kills_leave_the_same_bits(tmp_path: Path) -> None:
    seed = random.SystemRandom().randrange(10**6)
    problems = kill_resume.kill_and_resume(tmp_path, 4, seed)
    assert not problems, f"seed {seed}:\n" + "\n".join(problems)


@pytest.mark.full
def test_twelve_kills_leave_the_same_bits(tmp_path: Path) -> None:
    problems = kill_resume.kill_and_resume(tmp_path, 12, seed=1)
    assert not problems, "\n".join(problems)
