"""Finding files and reading documents from them: .txt, .md, .jsonl, .parquet. No torch here."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from recipes.data.errors import DataError, listed

Key = dict[str, Any]  # what a cached folder follows from; JSON values only

TEXT_SUFFIXES = (".txt", ".md", ".jsonl", ".parquet")
PIECE_BYTES = 8 << 20  # a plain text file longer than this becomes several documents, cut between lines
_PARQUET_ROWS = 1024  # read at once


def file_stats(path: Path, base: Path) -> list[str | int]:
    """What stands for a file's content: its name relative to ``base``, size and time of change."""
    stat = path.stat()
    return [str(path.relative_to(base)), stat.st_size, stat.st_mtime_ns]


def files_identity(paths: list[Path], base: Path) -> Key:
    """What stands for the content of many files in a key, in one line: how many, their bytes, a hash of their stats."""
    stats = [file_stats(path, base) for path in paths]
    digest = hashlib.sha256(json.dumps(stats).encode()).hexdigest()[:24]
    return {"num_files": len(paths), "num_bytes": sum(int(stat[1]) for stat in stats), "stats": digest}


def existing_path(path: str, key: str, expected: str) -> Path:
    """``path`` with ``~`` expanded; DataError, in the words of config key ``key``, if nothing is there."""
    problem = path_problem(path, key, expected)
    if problem:
        raise DataError(problem)
    return expanded(path)


def expanded(path: str) -> Path:
    """``path`` with a leading ``~`` or ``~user`` replaced by that home folder; unknown users stay as written.

    (``Path.expanduser`` raises for those.)
    """
    return Path(os.path.expanduser(path))


def path_problem(path: str, key: str, expected: str) -> str | None:
    """What is wrong with a path that must exist, or None."""
    if not path.strip():
        return f"{key} is empty; expected {expected}"
    place = expanded(path)
    if place.exists():
        return None
    message = f"{key}={path}: no such file or folder (looked for {place.absolute()}); expected {expected}"
    if path.count("/") <= 1 and not path.startswith((".", "/", "~")):
        message += ". If this is a name on a hub: nothing is downloaded; fetch it elsewhere and give the saved folder"
    return message


def find_files(place: Path, suffixes: tuple[str, ...], key: str) -> list[Path]:
    """``place`` itself if it is a file, else the files below it with one of ``suffixes``, sorted; hidden ones left out.

    Raises DataError if there are none, naming what the folder holds instead.
    """
    if place.is_file():
        return [place]
    found: list[Path] = []
    others: set[str] = set()
    for folder, subfolders, names in os.walk(place):
        subfolders[:] = sorted(name for name in subfolders if not name.startswith("."))
        for name in names:
            path = Path(folder, name)
            if name.startswith("."):
                continue
            if name.lower().endswith(suffixes):
                found.append(path)
            else:
                others.add(path.suffix or name)
    if not found:
        holds = f"it holds files of other kinds ({listed(sorted(others))})" if others else "it holds no files"
        raise DataError(f"{key}={place}: no {', '.join(suffixes)} files in this folder or below; {holds}")
    return sorted(found)


def read_documents(path: Path, text_field: str) -> Iterator[tuple[str, str]]:
    """(text, where) of each document of one file: its suffix decides how; an unknown one is read as plain text."""
    suffix = path.suffix.lower()
    try:
        if suffix == ".jsonl":
            yield from _jsonl_documents(path, text_field)
        elif suffix == ".parquet":
            yield from _parquet_documents(path, text_field)
        else:
            yield from _plain_documents(path)
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error})") from error


def _plain_documents(path: Path) -> Iterator[tuple[str, str]]:
    line = 1
    with path.open("rb") as file:
        while lines := file.readlines(PIECE_BYTES):  # whole lines, about so many bytes
            raw = b"".join(lines)
            yield _decoded(raw, path, line), f"{path}:{line}"
            line += len(lines)


def _decoded(raw: bytes, path: Path, first_line: int) -> str:
    try:
        return raw.decode("utf-8-sig" if first_line == 1 else "utf-8")
    except UnicodeDecodeError as error:
        line = first_line + raw.count(b"\n", 0, error.start)
        raise DataError(
            f"{path}:{line}: not UTF-8 (byte 0x{raw[error.start]:02x}: {error.reason}). Convert the file "
            f"(iconv -f latin1 -t utf-8, say) or leave it out of the folder"
        ) from None


def _jsonl_documents(path: Path, text_field: str) -> Iterator[tuple[str, str]]:
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            if raw.strip():
                where = f"{path}:{number}"
                yield _text_of_record(_decoded(raw, path, number), text_field, where), where


def _text_of_record(line: str, text_field: str, where: str) -> str:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(f"{where}: not JSON ({error.msg}, column {error.colno}); expected one object a line") from None
    if not isinstance(record, dict):
        raise DataError(f"{where}: expected a JSON object with the field '{text_field}', got {type(record).__name__}")
    if text_field not in record:
        raise DataError(
            f"{where}: no field '{text_field}'; this record has: {listed(sorted(record))}. Set data.text_field"
        )
    text = record[text_field]
    if text is None:
        return ""
    if not isinstance(text, str):
        raise DataError(f"{where}: field '{text_field}' must be a string, got {type(text).__name__}")
    return text


def _parquet_documents(path: Path, text_field: str) -> Iterator[tuple[str, str]]:
    import pyarrow  # only for the folders that hold such files
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            check_text_column(file.schema_arrow, text_field, str(path))
            row = 0
            for batch in file.iter_batches(batch_size=_PARQUET_ROWS, columns=[text_field]):
                for text in batch.column(0).to_pylist():
                    yield text or "", f"{path}, row {row}"
                    row += 1
    except pyarrow.ArrowInvalid as error:
        raise DataError(f"{path}: not a readable parquet file ({error})") from error


def check_text_column(schema: Any, text_field: str, where: str) -> None:
    """``schema``: a pyarrow schema. Raises DataError, listing the columns, unless it has this column, of strings."""
    import pyarrow

    if text_field not in schema.names:
        raise DataError(
            f"{where}: no column '{text_field}'; its columns are: {listed(schema.names)}. Set data.text_field"
        )
    kind = schema.field(text_field).type
    if not (pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind)):
        raise DataError(f"{where}: column '{text_field}' must hold strings, it holds {kind}. Set data.text_field")
