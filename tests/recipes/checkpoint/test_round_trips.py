"""Saved on some ranks, loaded on others, cut otherwise: bit for bit the same, for every optimizer."""

from __future__ import annotations

from pathlib import Path

from tests.recipes.checkpoint.trainees import KINDS, Cut, load_some, save_some
from tests.support.ranks import Pools

ALL = list(KINDS)


def test_four_two_three_one(ranks: Pools, tmp_path: Path) -> None:
    """W, F, RAF and units change at every step; each load is compared with what was saved before."""
    first, second, third = tmp_path / "first", tmp_path / "second", tmp_path / "third"
    ranks(4).run(save_some, ALL, Cut(4), first, timeout_s=120)
    assert ranks(2).run(load_some, ALL, Cut(2, 1, False), first, second, timeout_s=120) == [[], []]
    assert ranks(3).run(load_some, ALL, Cut(1), second, third, timeout_s=120) == [[], [], []]
    assert load_some(None, ALL, Cut(1, 1), third, None) == []
