"""Sizes as people read them."""

from __future__ import annotations

import pytest

from recipes.amounts import gb


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (74.62e9, "74.6 GB"),
        (-8.019e9, "-8.02 GB"),
        (126.4e9, "126 GB"),
        (999.4e6, "999 MB"),
        (999.7e6, "1 GB"),
        (2.5e12, "2.5 TB"),
        (1500, "1.5 kB"),
        (0, "0 B"),
    ],
)
def test_plans_speak_decimal_units(nbytes: float, text: str) -> None:
    assert gb(nbytes) == text
