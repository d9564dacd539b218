"""Names, retention, spans, ``checkpoint.every``, the fence: what needs no model."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load

from recipes.checkpoint import folder
from recipes.checkpoint.due import SaveTimes
from recipes.checkpoint.errors import CheckpointError, Superseded
from recipes.checkpoint.every import Every, every_of
from recipes.checkpoint.fence import Fence
from recipes.checkpoint.folder import Found
from recipes.checkpoint.manifest import Piece, TensorSpec, joined
from recipes.checkpoint.parts import Part, own_share
from recipes.checkpoint.records import plain, plain_settings
from recipes.checkpoint.retention import to_remove
from recipes.checkpoint.safe_file import CODES, Entry, chunks_of, in_file_order
from recipes.ranks import Ranks
from tests.support.ranks import ROOT


def test_what_the_launcher_reads_loads_no_torch() -> None:
    modules = ("folder", "manifest", "retention", "every", "fence", "errors")
    code = (
        "import sys, " + ", ".join(f"recipes.checkpoint.{name}" for name in modules) + "; print('torch' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "False"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("100", Every(steps=100)),
        ("1e3", Every(steps=1000)),
        ("1_000", Every(steps=1000)),
        ("10min", Every(seconds=600.0)),
        ("0.5 min", Every(seconds=30.0)),
    ],
)
def test_every(text: str, expected: Every) -> None:
    assert every_of(text) == expected


@pytest.mark.parametrize("text", ["0", "-3", "2.5", "0min", "soon", "10 s", "1h", "nan", "inf", ""])
def test_every_refuses(text: str) -> None:
    with pytest.raises(ValueError, match="is n"):
        every_of(text)


def test_by_minutes_rank_0_decides_and_a_save_starts_the_clock_again() -> None:
    now = [0.0]
    times = [SaveTimes(Every(seconds=60), Ranks(r, 2, torch.device("cpu")), lambda: now[0]) for r in (0, 1)]
    now[0] = 59.0
    assert not times[0].wants(3)
    now[0] = 60.0
    assert [one.wants(4) for one in times] == [True, False]
    times[0].saved()
    assert not times[0].wants(5)


def found(*steps: int, losses: dict[int, float] | None = None) -> list[Found]:
    return [Found(step, Path(f"step_{step}"), (losses or {}).get(step)) for step in steps]


@pytest.mark.parametrize(
    ("rules", "kept"),
    [
        ({"keep_last": 1, "keep_every": None, "keep_best": 0}, [60]),
        ({"keep_last": 2, "keep_every": None, "keep_best": 0}, [50, 60]),
        ({"keep_last": 1, "keep_every": 20, "keep_best": 0}, [20, 40, 60]),
        ({"keep_last": 1, "keep_every": None, "keep_best": 2}, [10, 30, 60]),
        ({"keep_last": 9, "keep_every": None, "keep_best": 0}, [10, 20, 30, 40, 50, 60]),
    ],
)
def test_what_stays(rules: dict[str, int], kept: list[int]) -> None:
    losses = {10: 1.0, 20: float("nan"), 30: 1.0, 40: 2.0}
    checkpoints = found(60, 50, 40, 30, 20, 10, losses=losses)
    removed = {one.step for one in to_remove(checkpoints, **rules)}
    assert [one.step for one in reversed(checkpoints) if one.step not in removed] == kept


def part(
    name: str, numel: int, holders: tuple[int, ...], dtype: torch.dtype = torch.float32, kind: str = "model"
) -> Part:
    return Part(name, kind, (numel,), None, 0, numel, torch.arange(numel).to(dtype), holders)


@pytest.mark.parametrize("num_holders", [1, 2, 3, 7])
def test_every_element_is_written_once_and_ranks_write_alike_much(num_holders: int) -> None:
    holders = tuple(range(num_holders))
    sizes = [("a", 1, torch.float32), ("b", 1000, torch.float32), ("c", 0, torch.float32), ("d", 333, torch.bfloat16)]
    parts = [part(name, numel, holders, dtype) for name, numel, dtype in sizes]
    shares = [own_share(parts, rank) for rank in holders]
    specs = []
    for rank, share in enumerate(shares):
        for one in share:
            pieces = (Piece(str(rank), one.name, one.start, one.stop),) if one.stop > one.start else ()
            specs.append((one.name, TensorSpec("model", "x", one.shape, None, pieces)))
            assert one.values.tolist() == torch.arange(one.start, one.stop).to(one.values.dtype).tolist()
    assert set(joined(specs)) == {"a", "b", "c", "d"}
    written = [sum(one.num_bytes for one in share) for share in shares]
    assert max(written) - min(written) <= 8


def test_what_others_write_is_not_written_here() -> None:
    assert own_share([part("buffer", 4, (0,), kind="buffer")], rank=1) == []


@pytest.mark.parametrize(
    ("spans", "words"),
    [
        ([(0, 3), (4, 6)], "do not meet"),
        ([(0, 4), (3, 6)], "do not meet"),
        ([(0, 5)], r"no rank wrote elements \[5, 6\)"),
    ],
)
def test_gaps_and_overlaps_are_refused(spans: list[tuple[int, int]], words: str) -> None:
    specs = [("x", TensorSpec("model", "float32", (6,), None, (Piece("f", "k", *span),))) for span in spans]
    with pytest.raises(ValueError, match=words):
        joined(specs)


def test_the_safetensors_library_reads_what_is_written() -> None:
    values = [torch.arange(5).to(dtype) for dtype in CODES]
    entries = in_file_order([Entry(str(tensor.dtype), tensor) for tensor in values])
    again = load(b"".join(bytes(chunk) for chunk in chunks_of(entries)))
    assert {name: tensor.tolist() for name, tensor in again.items()} == {str(t.dtype): t.tolist() for t in values}
    with pytest.raises(CheckpointError, match="complex128"):
        list(chunks_of([Entry("x", torch.zeros(1, dtype=torch.complex128))]))


def test_plain_data() -> None:
    assert plain({"a": (1, 2.5, None)}, "it") == {"a": [1, 2.5, None]}
    with pytest.raises(CheckpointError, match="the run's state cannot be saved"):
        plain({"a": object()}, "the run's state")
    assert plain_settings({"params": [1], "lr": 0.1, "hook": print, "betas": (0.9, 0.95)}) == {
        "lr": 0.1,
        "betas": [0.9, 0.95],
    }


def test_a_later_attempt_shuts_an_earlier_one_out(tmp_path: Path) -> None:
    first, second, again = Fence(tmp_path, 1), Fence(tmp_path, 2), Fence(tmp_path, 2)
    first.claim()
    with first.held():
        pass
    second.claim()
    with pytest.raises(Superseded, match="attempt 2 of this run has taken over from attempt 1"), first.held():
        pass
    with pytest.raises(Superseded):
        first.claim()
    again.claim()  # the same number started twice: the later start has it
    with pytest.raises(Superseded), second.held():
        pass


def test_names_sort_and_only_final_ones_are_taken(tmp_path: Path) -> None:
    assert sorted([folder.final_name(9), folder.final_name(10)]) == [folder.final_name(9), folder.final_name(10)]
    for name in (folder.partial_name(3, 0, "ab"), folder.removed_name(folder.final_name(2)), folder.final_name(1)):
        (tmp_path / name).mkdir()
    assert folder.complete_checkpoints(tmp_path) == []
    assert {path.name for path in folder.leftovers(tmp_path).useless} == {
        ".step_00000003.attempt_0.ab",
        ".removing_step_00000002",
    }
    assert folder.newest_complete(tmp_path / "nowhere") is None
