"""Pure parts of the checker: one value against one annotation, near matches, time limits, ranks and GPUs found."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest

from launcher import time_limit
from launcher.check.near import did_you_mean, near, near_keys
from launcher.check.values import BadValue, Limits, expected, is_readable, read
from launcher.environment import JoinedRanks, joined_ranks
from launcher.errors import ConfigErrors, Problem, describe
from launcher.machine import num_gpus


@pytest.mark.parametrize(
    ("annotation", "value", "result"),
    [
        (int, 1000, 1000),
        (int, 1e3, 1000),
        (int, "1e3", 1000),
        (int, "1_000", 1000),
        (int, " 7 ", 7),
        (float, 3, 3.0),
        (float, "3e-4", 3e-4),
        (bool, True, True),
        (bool, "False", False),
        (bool, "yes", True),
        (bool, "off", False),
        (str, "a", "a"),
        (str, 7, "7"),
        (int | None, None, None),
        (int | None, 7.0, 7),
        (list[int], [1, 2e0], [1, 2]),
        (list[str], [], []),
        (dict[str, str], {"A": 1, "B": "x"}, {"A": "1", "B": "x"}),
        (list[int] | None, None, None),
        (Literal["a", "b"], "b", "b"),
    ],
)
def test_values_that_fit(annotation: Any, value: Any, result: Any) -> None:
    got = read(annotation, value, Limits())
    assert got == result
    assert type(got) is type(result)


@pytest.mark.parametrize(
    ("annotation", "value"),
    [
        (int, 1.5),
        (int, True),
        (int, "1.5"),
        (int, "a"),
        (int, None),
        (int, [1]),
        (int, float("inf")),
        (float, "nan"),
        (float, False),
        (float, {}),
        (bool, 1),
        (bool, 0.0),
        (bool, "maybe"),
        (bool, None),
        (str, None),
        (str, 1.5),
        (str, True),
        (str, ["a"]),
        (list[int], 3),
        (list[int], [1, "a"]),
        (list[int], {"a": 1}),
        (dict[str, str], ["a"]),
        (dict[str, str], {"A": True}),
        (Literal["a", "b"], "c"),
    ],
)
def test_values_that_do_not_fit(annotation: Any, value: Any) -> None:
    with pytest.raises(BadValue):
        read(annotation, value, Limits())


def test_text_keeps_what_was_typed() -> None:
    """``run.name=1e3`` is a name, although the grammar reads a number."""
    typed = {"": "1e3", "A": "true"}.get
    assert read(str, 1000.0, Limits(), typed) == "1e3"
    assert read(dict[str, str], {"A": True}, Limits(), typed) == {"A": "true"}


@pytest.mark.parametrize(
    ("limits", "good", "bad"),
    [
        (Limits(at_least=1), 1, 0),
        (Limits(above=0), 0.1, 0),
        (Limits(at_most=1), 1, 1.1),
        (Limits(below=1), 0.9, 1),
    ],
)
def test_bounds(limits: Limits, good: float, bad: float) -> None:
    assert read(float, good, limits) == good
    with pytest.raises(BadValue):
        read(list[float], [good, bad], limits)


def test_annotations_in_words() -> None:
    assert expected(int | None, Limits(at_least=1)) == "a whole number, at least 1, or null"
    assert expected(list[float], Limits(at_least=0, below=1)) == "a list, each a number, at least 0, below 1"
    assert expected(str, Limits(choices=("a", "b"))) == "one of a, b"
    assert expected(dict[str, str], Limits()) == "a map of names, each text"


@pytest.mark.parametrize("annotation", [complex, set[int], list[complex], int | str, dict[int, str], tuple[int, ...]])
def test_annotations_that_yaml_cannot_give(annotation: Any) -> None:
    assert not is_readable(annotation)


def test_near_matches() -> None:
    assert near("stepz", ["steps", "seed"])[0] == "steps"
    assert near("GPT-Tiny", ["gpt_tiny", "t5_tiny"])[0] == "gpt_tiny"
    assert near("zzz", ["steps"]) == []
    keys = ["train.steps", "optimizer.lr", "sharding.factor"]
    assert near_keys("train.lr", keys) == ["optimizer.lr"]
    assert near_keys("shardng.factor", keys) == ["sharding.factor"]
    assert did_you_mean(["a", "b", "c"]) == "did you mean a, b or c?"
    assert did_you_mean([]) == ""


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("24:00:00", 86400),
        (86400, 86400),  # what YAML 1.1 makes of an unquoted 24:00:00
        ("1-12:00:00", 129600),
        ("2-6", 194400),
        ("7200", 7200),
        ("90:00", 5400),
        ("1:30", 90),
        ("00:00:01", 1),
    ],
)
def test_time_limits(text: str | int, seconds: int) -> None:
    assert time_limit.seconds_of(text) == seconds
    assert time_limit.seconds_of(time_limit.canonical(seconds)) == seconds


@pytest.mark.parametrize("text", ["", "0", 0, -5, "1h", "1:2:3:4", "1-24:00:00", "1:90:00", "1:00:75", "a-b", "1.5"])
def test_no_time_limits(text: str | int) -> None:
    with pytest.raises(ValueError, match="."):
        time_limit.seconds_of(text)


def test_canonical_spelling() -> None:
    assert time_limit.canonical(5400) == "01:30:00"
    assert time_limit.canonical(129600) == "1-12:00:00"


def test_ranks_of_the_environment() -> None:
    assert joined_ranks({}) is None
    ranks = joined_ranks({"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"})
    assert ranks == JoinedRanks(rank=5, world_size=8, local_rank=1, local_world_size=4)
    assert (ranks.num_nodes, ranks.node_rank) == (2, 1)
    alone = joined_ranks({"RANK": "1", "WORLD_SIZE": "2"})
    assert alone == JoinedRanks(rank=1, world_size=2, local_rank=1, local_world_size=2)


@pytest.mark.parametrize(
    ("environ", "expected_text"),
    [
        ({"RANK": "0"}, "RANK is set but WORLD_SIZE is not"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE is set but RANK is not"),
        ({"RANK": "a", "WORLD_SIZE": "2"}, "RANK is no whole number"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "do not fit together"),
        ({"RANK": "0", "WORLD_SIZE": "5", "LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": "0"}, "different numbers of ranks"),
    ],
)
def test_broken_environments(environ: dict[str, str], expected_text: str) -> None:
    with pytest.raises(ConfigErrors, match=expected_text):
        joined_ranks(environ)


def test_gpus_are_device_files_that_cuda_may_see(tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia1", "nvidia2", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert num_gpus({}, tmp_path) == 3
    assert num_gpus({"CUDA_VISIBLE_DEVICES": "0,2"}, tmp_path) == 2
    assert num_gpus({"CUDA_VISIBLE_DEVICES": ""}, tmp_path) == 0
    assert num_gpus({"CUDA_VISIBLE_DEVICES": "0,-1,2"}, tmp_path) == 1
    assert num_gpus({"CUDA_VISIBLE_DEVICES": "0"}, tmp_path / "nothing") == 0


def test_problems_as_text() -> None:
    one = Problem("it is wrong", "a.b", got="1", source="here", expected="2", remedy="a.b=2")
    assert describe([one]) == (
        "1 problem in the config:\n\n"
        "1. a.b: it is wrong\n   got:      1\n   from:     here\n   expected: 2\n   remedy:   a.b=2"
    )
    assert describe([one, Problem("x")]).startswith("2 problems in the config:")
