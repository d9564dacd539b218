"""Click sources: real flights, Criteo's format, planted synthetic clicks."""

from __future__ import annotations

import gzip
import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from recipes.data import criteo, flights, synthetic_clicks
from recipes.data.clicks import CategoryHash
from recipes.data.errors import DataError
from recipes.data.records import Batch, Dataset, PrepareRequest, Splits
from recipes.schema.data import CriteoConfig, FlightsConfig, SyntheticClicksConfig


def whole(dataset: Dataset) -> Batch:
    return dataset.batch(range(len(dataset)), 0)


def check_shapes(splits: Splits) -> None:
    """What the contract says of clicks, and what the model relies on: ids inside their tables."""
    info = splits.info
    assert info.task == "clicks" and info.num_dense is not None and info.table_rows is not None
    for dataset in (splits.train, splits.eval):
        batch = dataset.batch(range(min(len(dataset), 5000)), 0)
        count = len(batch["labels"])
        assert batch["dense"].shape == (count, info.num_dense) and batch["dense"].dtype == torch.float32
        assert batch["sparse"].shape == (count, len(info.table_rows)) and batch["sparse"].dtype == torch.int64
        assert batch["labels"].dtype == torch.float32 and set(batch["labels"].tolist()) <= {0.0, 1.0}
        assert batch["dense"].isfinite().all()
        assert (batch["sparse"] >= 0).all() and (batch["sparse"] < torch.tensor(info.table_rows)).all()
    assert (info.num_train, info.num_eval) == (len(splits.train), len(splits.eval))


def held_out_auc(splits: Splits, num_train: int, steps: int) -> float:
    """Of a logistic regression: the least that a model of clicks must learn."""
    assert splits.info.table_rows is not None
    torch.manual_seed(0)
    train, held_out = splits.train.batch(range(num_train), 0), whole(splits.eval)
    offsets = torch.tensor([0, *np.cumsum(splits.info.table_rows)[:-1].tolist()])
    table, dense = torch.zeros(sum(splits.info.table_rows)), torch.zeros(train["dense"].shape[1])
    parameters = [parameter.requires_grad_() for parameter in (table, dense)]
    optimizer = torch.optim.Adam(parameters, lr=0.03)

    def logits(batch: Batch) -> torch.Tensor:
        return table[batch["sparse"] + offsets].sum(dim=1) + batch["dense"] @ dense

    for _ in range(steps):
        chosen = torch.randint(0, num_train, (2048,))
        batch = {name: tensor[chosen] for name, tensor in train.items()}
        optimizer.zero_grad()
        F.binary_cross_entropy_with_logits(logits(batch), batch["labels"]).backward()
        optimizer.step()
    with torch.no_grad():
        return auc(logits(held_out), held_out["labels"])


def auc(scores: torch.Tensor, labels: torch.Tensor) -> float:
    ranks = torch.empty(len(scores), dtype=torch.float64)
    ranks[scores.argsort()] = torch.arange(1, len(scores) + 1, dtype=torch.float64)
    positives = float(labels.sum())
    return (float(ranks[labels > 0.5].sum()) - positives * (positives + 1) / 2) / (
        positives * (len(labels) - positives)
    )


def test_a_value_keeps_its_row() -> None:
    """Trained tables hang on it."""
    rows = CategoryHash("tailnum", 4096).rows(["N14228", "N24211", "", None, "N14228"]).tolist()
    assert rows == [4050, 1790, 0, 0, 4050]
    assert CategoryHash("flight", 4096).rows(["N14228"]).tolist() != rows[:1]


@pytest.fixture(scope="module")
def splits(tmp_path_factory: pytest.TempPathFactory) -> Splits:
    """The real flights, read once."""
    folder = tmp_path_factory.mktemp("cache")
    request = PrepareRequest("clicks", 0, None, None, True, lambda: None, folder, lambda line: None)
    return flights.prepare(FlightsConfig(), request)


class TestFlights:
    def test_facts(self, splits: Splits) -> None:
        check_shapes(splits)
        assert len(splits.train) + len(splits.eval) == 327_346  # 336,776 without the 9,430 that never arrived
        assert splits.info.extras["positive_share"] == pytest.approx(0.2447, abs=1e-4)
        assert splits.info.extras["tables"] == (
            "carrier", "origin", "dest", "tailnum", "flight", "hour", "month", "day", "weekday",
        )  # fmt: skip

    def test_nothing_that_is_known_only_later_is_read(self) -> None:
        assert set(flights._COLUMNS) & {"dep_time", "dep_delay", "arr_time", "air_time"} == set()

    def test_whole_days_are_held_out(self, splits: Splits) -> None:
        names = splits.info.extras["tables"]
        assert isinstance(names, tuple)
        month, day = names.index("month"), names.index("day")
        days = [
            {(row[month], row[day]) for row in whole(split)["sparse"].tolist()} for split in (splits.train, splits.eval)
        ]
        assert (len(days[0]), len(days[1])) == (329, 36) and not days[0] & days[1]
        assert {month for month, _ in days[1]} >= set(range(10))  # from the whole year

    def test_times_lie_on_circles(self, splits: Splits) -> None:
        dense = whole(splits.eval)["dense"]
        for place in (0, 2, 4):
            assert torch.allclose(dense[:, place] ** 2 + dense[:, place + 1] ** 2, torch.tensor(1.0), atol=1e-5)
        assert (dense[:, 6] >= 0).all() and (dense[:, 6] <= 2.4).all()

    def test_the_first_flight(self, splits: Splits) -> None:
        """517 from Newark to Houston on 1 January, a Tuesday: scheduled 5:15 to 8:19, 1,400 miles, 11 minutes late."""
        split = splits.train if not flights._held_out_days(0.1)[0] else splits.eval
        first = split.batch([0], 0)
        names = splits.info.extras["tables"]
        values = dict(zip(names, first["sparse"][0].tolist(), strict=True))  # type: ignore[call-overload]
        assert (values["hour"], values["month"], values["day"], values["weekday"]) == (5, 0, 0, 1)
        assert first["dense"][0, 6].item() == pytest.approx((8 * 60 + 19 - 5 * 60 - 15) / 600)
        assert first["dense"][0, 7].item() == pytest.approx(1.4)
        assert first["labels"].item() == 0

    def test_lateness_is_a_choice(self, make_request, splits: Splits) -> None:
        hour = flights.prepare(FlightsConfig(late_minutes=60), make_request("clicks"))
        share = hour.info.extras["positive_share"]
        assert isinstance(share, float) and 0 < share < 0.1

    def test_lateness_can_be_learned(self, splits: Splits) -> None:
        assert held_out_auc(splits, num_train=100_000, steps=40) > 0.6

    def test_without_the_package(self, make_request, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
        with pytest.raises(DataError, match=r"pip install 'fsdp-launcher\[flights\]'"):
            flights.prepare(FlightsConfig(), make_request("clicks"))


def criteo_line(number: int, label: int | str = 0) -> str:
    counts = [str(number), "", "-2", *["3"] * 10]
    categories = [f"{number % 5:08x}", "", *["68fd1e64"] * 24]
    return "\t".join([str(label), *counts, *categories]) + "\n"


class TestCriteo:
    def config(self, path: Path, **changes: object) -> CriteoConfig:
        return CriteoConfig(path=str(path), **{"rows_per_table": 1000, "eval_fraction": 0.25, **changes})  # type: ignore[arg-type]

    def test_values(self, make_request, tmp_path: Path) -> None:
        (tmp_path / "day.tsv").write_text("".join(criteo_line(number, number % 2) for number in range(8)))
        splits = criteo.prepare(self.config(tmp_path / "day.tsv"), make_request("clicks"))
        check_shapes(splits)
        assert (len(splits.train), len(splits.eval)) == (6, 2)
        batch = whole(splits.train)
        assert torch.allclose(batch["dense"][:, 0], torch.arange(6).float().log1p())
        assert (batch["dense"][:, 1:3] == 0).all()  # missing, and negative
        assert batch["labels"].tolist() == [0, 1, 0, 1, 0, 1]
        assert batch["sparse"][0, 0] == batch["sparse"][5, 0] != batch["sparse"][1, 0]
        assert (batch["sparse"][:, 1] == 0).all()
        assert len(set(batch["sparse"][0, 2:].tolist())) > 20  # the same value, another row in each table
        assert whole(splits.eval)["dense"][:, 0].tolist() == pytest.approx([np.log(7), np.log(8)])  # the last rows

    def test_folder_and_compression(self, make_request, tmp_path: Path) -> None:
        for number in range(3):
            raw = "".join(criteo_line(10 * number + row) for row in range(10)).encode()
            (tmp_path / f"day_{number}.txt.gz").write_bytes(gzip.compress(raw))
        splits = criteo.prepare(self.config(tmp_path, eval_fraction=0.0), make_request("clicks"))
        assert whole(splits.train)["dense"][:, 0].tolist() == pytest.approx(np.log1p(np.arange(30)).tolist())

    def test_parsed_once(self, make_request, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "day.tsv").write_text(criteo_line(1) * 8)
        first = criteo.prepare(self.config(tmp_path), make_request("clicks"))
        monkeypatch.setattr(criteo, "_batches", None)
        second = criteo.prepare(self.config(tmp_path, eval_fraction=0.5), make_request("clicks"))
        assert (len(first.train), len(second.train)) == (6, 4)

    @pytest.mark.parametrize(
        ("line", "message"),
        [
            ("0\t1\t2\n", r"day\.tsv:3: 3 fields instead of 40; expected a label, 13 counts and 26 categories"),
            (criteo_line(1, "x"), r"day\.tsv:3: the label is 'x', not 0 or 1"),
            (criteo_line(1, 2), r"day\.tsv:3: the label is '2', not 0 or 1"),
            (criteo_line(1, ""), r"day\.tsv:3: the label is '', not 0 or 1"),
            (criteo_line(1).replace("-2", "many"), r"day\.tsv:3: count 3 is 'many', not a number"),
        ],
    )
    def test_a_bad_line_is_named(self, make_request, tmp_path: Path, line: str, message: str) -> None:
        (tmp_path / "day.tsv").write_text(criteo_line(1) * 2 + line + criteo_line(1))
        with pytest.raises(DataError, match=message):
            criteo.prepare(self.config(tmp_path), make_request("clicks"))

    def test_a_cut_off_archive(self, make_request, tmp_path: Path) -> None:
        (tmp_path / "day.tsv.gz").write_bytes(gzip.compress((criteo_line(1) * 1000).encode())[:-20])
        with pytest.raises(DataError, match=r"day\.tsv\.gz: cannot be (read|parsed)"):
            criteo.prepare(self.config(tmp_path), make_request("clicks"))

    def test_too_few_rows(self, make_request, tmp_path: Path) -> None:
        (tmp_path / "day.tsv").touch()
        with pytest.raises(DataError, match="hold no rows"):
            criteo.prepare(self.config(tmp_path), make_request("clicks"))
        (tmp_path / "day.tsv").write_text(criteo_line(1))
        with pytest.raises(DataError, match="1 rows are too few"):
            criteo.prepare(self.config(tmp_path), make_request("clicks"))


class TestSynthetic:
    def test_facts(self, make_request) -> None:
        splits = synthetic_clicks.prepare(SyntheticClicksConfig(num_samples=5000), make_request("clicks"))
        check_shapes(splits)
        assert (len(splits.train), len(splits.eval)) == (5000, 100)
        assert "SYNTHETIC" in splits.info.description
        assert 0.2 < float(whole(splits.train)["labels"].mean()) < 0.4

    @pytest.mark.parametrize(("num_dense", "num_tables"), [(0, 1), (3, 1), (0, 5)])
    def test_small_shapes(self, make_request, num_dense: int, num_tables: int) -> None:
        config = SyntheticClicksConfig(num_samples=50, num_dense=num_dense, num_tables=num_tables, rows_per_table=2)
        check_shapes(synthetic_clicks.prepare(config, make_request("clicks")))

    def test_a_sample_is_the_same_everywhere(self, make_request) -> None:
        first, second = (
            synthetic_clicks.prepare(SyntheticClicksConfig(), make_request("clicks", seed=seed)) for seed in (0, 1)
        )
        several, alone = first.train.batch([5, 199_999], 0), second.train.batch([199_999], 7)
        assert all(several[name][1].equal(alone[name][0]) for name in several)
        assert not several["dense"][1].equal(first.eval.batch([0], 0)["dense"][0])

    def test_the_planted_structure_can_be_learned(self, make_request) -> None:
        splits = synthetic_clicks.prepare(SyntheticClicksConfig(), make_request("clicks"))
        assert isinstance(splits.eval, synthetic_clicks.PlantedClicks)
        best = auc(torch.from_numpy(splits.eval.drawn(range(4000))[2]), whole(splits.eval)["labels"])
        learned = held_out_auc(splits, num_train=30_000, steps=30)
        assert 0.8 < best < 0.95 and 0.7 < learned < best

    def test_clicks_for_a_text_model(self, make_request) -> None:
        with pytest.raises(DataError, match="the model's task is causal_lm; choose a click model"):
            synthetic_clicks.prepare(SyntheticClicksConfig(), make_request("causal_lm"))
