"""The documented example of a data source outside the package."""

from __future__ import annotations

import csv
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from recipes.data.errors import DataError
from recipes.registry import DATA, Entry

EXAMPLE = Path(__file__).parents[3] / "examples" / "my_data.py"


@pytest.fixture
def csv_text() -> Iterator[Entry]:
    spec = importlib.util.spec_from_file_location("my_data_example", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield DATA["csv_text"]
    DATA.discard("csv_text")
    del sys.modules[spec.name]


@pytest.fixture
def tickets(tmp_path: Path) -> Path:
    path = tmp_path / "tickets.csv"
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["id", "body"])
        writer.writerows([number, f'ticket {number}: it says "no", again'] for number in range(200))
    return path


def test_the_example_prepares_its_own_text(csv_text: Entry, make_request, tickets: Path) -> None:
    config = csv_text.config(path=str(tickets), column="body", seq_len=32)
    splits = csv_text.load("prepare")(config, make_request("causal_lm"))
    assert splits.info.num_train > 150 and splits.info.num_eval > 0
    text = splits.info.extras["tokenizer"].decode(splits.train.batch([0], 0)["input_ids"][0].numpy())
    assert text == 'ticket 0: it says "no", again' + "ti"  # the end-of-document id stands for no text


def test_the_example_names_a_wrong_column(csv_text: Entry, make_request, tickets: Path) -> None:
    config = csv_text.config(path=str(tickets), column="text", seq_len=32)
    with pytest.raises(DataError, match=r"tickets\.csv: no column 'text'; its columns are: \['id', 'body'\]"):
        csv_text.load("prepare")(config, make_request("causal_lm"))


def test_registering_a_name_twice_is_refused(csv_text: Entry) -> None:
    with pytest.raises(ValueError, match="'csv_text' is already registered"):
        DATA.add(csv_text)
