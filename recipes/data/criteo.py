"""``criteo``: click logs in Criteo's format: label, 13 counts, 26 categories, separated by tabs; empty is missing.

Parsed once into arrays in the cache. Counts become log(1 + count), negative and missing ones 0; categories are hashed.
The logs are ordered by time: the last rows are held out, as one would predict tomorrow from today.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.csv
from numpy.typing import NDArray

from recipes.data.cache import prepared_folder
from recipes.data.clicks import CategoryHash, ClickRows, require_clicks
from recipes.data.errors import DataError
from recipes.data.files import existing_path, files_identity, find_files
from recipes.data.progress import Progress
from recipes.data.records import DataInfo, PrepareRequest, Splits
from recipes.schema.data import CriteoConfig

NUM_DENSE = 13
NUM_TABLES = 26
_FORMAT = 1  # of the prepared folder
_META_FILE = "meta.json"
_SUFFIXES = (".tsv", ".txt", ".tsv.gz", ".txt.gz")
_BLOCK_BYTES = 16 << 20  # parsed at once
_DENSE_NAMES = [f"count_{number + 1}" for number in range(NUM_DENSE)]
_TABLE_NAMES = [f"category_{number + 1}" for number in range(NUM_TABLES)]
_ARRAYS = {"dense": ("<f4", NUM_DENSE), "sparse": ("<i4", NUM_TABLES), "labels": ("<u1", 1)}


def prepare(config: CriteoConfig, request: PrepareRequest) -> Splits:
    require_clicks(config.kind, request)
    place = existing_path(config.path, "data.path", "a Criteo file (.tsv, .txt, may end in .gz), or a folder of such")
    files = find_files(place, _SUFFIXES, "data.path")
    key = {
        "format": _FORMAT,
        "rows_per_table": config.rows_per_table,
        "files": files_identity(files, place if place.is_dir() else place.parent),
    }
    folder = prepared_folder(
        request, "criteo", key, lambda folder: _write_arrays(folder, files, config.rows_per_table, request.report)
    )
    meta = json.loads((folder / _META_FILE).read_text())
    num_rows = int(meta["num_rows"])
    dense, sparse, labels = (_mapped(folder, name, num_rows) for name in _ARRAYS)
    num_train = num_rows - round(num_rows * config.eval_fraction)
    if num_train == 0 or (num_train == num_rows and config.eval_fraction > 0):
        raise DataError(
            f"data.path={config.path}: {num_rows} rows are too few to hold out data.eval_fraction="
            f"{config.eval_fraction}; give more rows or another fraction"
        )
    positive_share = meta["num_positive"] / num_rows
    train = ClickRows(dense, sparse, labels[:, 0], np.arange(num_train))
    held_out = ClickRows(dense, sparse, labels[:, 0], np.arange(num_train, num_rows))
    info = DataInfo(
        task="clicks",
        num_dense=NUM_DENSE,
        table_rows=(config.rows_per_table,) * NUM_TABLES,
        num_train=len(train),
        num_eval=len(held_out),
        description=f"{num_rows:,} clicks from {place}, {positive_share:.1%} positive; the last ones held out",
        extras={"fingerprint": f"{num_train}-{meta['checksum']:08x}", "positive_share": positive_share},
    )
    return Splits(train, held_out, info)


def _mapped(folder: Path, name: str, num_rows: int) -> NDArray[Any]:
    dtype, width = _ARRAYS[name]
    return np.memmap(folder / f"{name}.bin", dtype=dtype, mode="r", shape=(num_rows, width))


def _write_arrays(folder: Path, files: list[Path], rows_per_table: int, report: Callable[[str], None]) -> None:
    hashes = [CategoryHash(name, rows_per_table) for name in _TABLE_NAMES]
    num_rows = num_positive = checksum = 0
    progress = Progress(report, "reading clicks", sum(path.stat().st_size for path in files))
    outputs = {name: (folder / f"{name}.bin").open("wb") for name in _ARRAYS}
    try:
        for path in files:
            for batch in _batches(path):
                arrays = _as_arrays(batch, hashes)
                for name, array in arrays.items():
                    raw = array.tobytes()
                    outputs[name].write(raw)
                    checksum = zlib.crc32(raw, checksum)
                num_rows += batch.num_rows
                num_positive += int(arrays["labels"].sum())
            progress.add(path.stat().st_size)
    finally:
        for output in outputs.values():
            output.close()
    if num_rows == 0:
        raise DataError(f"data.path: {files[0]} and {len(files) - 1} further files hold no rows")
    meta = {"num_rows": num_rows, "num_positive": num_positive, "checksum": checksum}
    (folder / _META_FILE).write_text(json.dumps(meta) + "\n")


def _batches(path: Path) -> Iterator[pyarrow.RecordBatch]:
    """The file's rows with typed columns; DataError naming the line where one is not of the format."""
    if path.stat().st_size == 0:
        return
    types: dict[str, pyarrow.DataType] = {"label": pyarrow.uint8()}
    types |= {name: pyarrow.float32() for name in _DENSE_NAMES}
    types |= {name: pyarrow.string() for name in _TABLE_NAMES}
    try:
        with (
            pyarrow.input_stream(str(path), compression="gzip" if path.suffix == ".gz" else None) as stream,
            pyarrow.csv.open_csv(
                stream,
                read_options=pyarrow.csv.ReadOptions(column_names=list(types), block_size=_BLOCK_BYTES),
                parse_options=pyarrow.csv.ParseOptions(delimiter="\t", quote_char=False, ignore_empty_lines=True),
                convert_options=pyarrow.csv.ConvertOptions(column_types=types, null_values=[""]),
            ) as reader,
        ):
            for batch in reader:
                labels = batch.column("label")
                if labels.null_count or labels.to_numpy(zero_copy_only=False).max(initial=0) > 1:
                    raise _explained(path, "a label is not 0 or 1")
                yield batch
    except (pyarrow.ArrowInvalid, OSError) as error:
        raise _explained(path, str(error)) from error


def _as_arrays(batch: pyarrow.RecordBatch, hashes: list[CategoryHash]) -> dict[str, NDArray[Any]]:
    counts = np.stack([batch.column(name).to_numpy(zero_copy_only=False) for name in _DENSE_NAMES], axis=1)
    sparse = np.empty((batch.num_rows, NUM_TABLES), dtype="<i4")
    for number, name in enumerate(_TABLE_NAMES):
        encoded = batch.column(name).dictionary_encode()  # hash each distinct value once
        rows = hashes[number].rows([*encoded.dictionary.to_pylist(), None])  # the last one is for missing values
        sparse[:, number] = rows[encoded.indices.fill_null(len(rows) - 1).to_numpy(zero_copy_only=False)]
    return {
        "dense": np.log1p(np.maximum(np.nan_to_num(counts, nan=0.0), 0.0)).astype("<f4"),
        "sparse": sparse,
        "labels": batch.column("label").to_numpy(zero_copy_only=False).astype("<u1"),
    }


def _explained(path: Path, reason: str) -> DataError:
    """Reads the file again, slowly, for the first line that is not of the format."""
    expected = f"expected a label, {NUM_DENSE} counts and {NUM_TABLES} categories, separated by tabs"
    num_fields = 1 + NUM_DENSE + NUM_TABLES
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            for number, raw in enumerate(file, start=1):
                fields = raw.decode("utf-8", errors="replace").rstrip("\r\n").split("\t")
                if fields == [""]:
                    continue
                if len(fields) != num_fields:
                    return DataError(f"{path}:{number}: {len(fields)} fields instead of {num_fields}; {expected}")
                if fields[0] not in ("0", "1"):
                    return DataError(f"{path}:{number}: the label is {fields[0]!r}, not 0 or 1; {expected}")
                for place, field in enumerate(fields[1 : 1 + NUM_DENSE], start=1):
                    if field and not _is_count(field):
                        return DataError(f"{path}:{number}: count {place} is {field!r}, not a number; {expected}")
    except (OSError, EOFError, zlib.error) as error:
        return DataError(f"{path}: cannot be read ({error}); is it complete?")
    return DataError(f"{path}: cannot be parsed ({reason}); {expected}")


def _is_count(field: str) -> bool:
    try:
        float(field)
    except ValueError:
        return False
    return True
