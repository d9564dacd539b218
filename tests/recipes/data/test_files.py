"""Reading files: each format, and messages that name the file and the line."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from recipes.data import files
from recipes.data.errors import DataError


def texts(path: Path, field: str = "text") -> list[str]:
    return [text for text, _ in files.read_documents(path, field)]


def written(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def test_plain_text_is_one_document(tmp_path: Path) -> None:
    assert texts(written(tmp_path / "a.md", "one\ntwo\n")) == ["one\ntwo\n"]
    assert texts(written(tmp_path / "bom.txt", b"\xef\xbb\xbfone")) == ["one"]
    assert texts(written(tmp_path / "empty.txt", "")) == []


def test_a_long_file_is_cut_between_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "PIECE_BYTES", 20)
    path = written(tmp_path / "a.txt", "".join(f"line {number}\n" for number in range(9)))
    pieces = list(files.read_documents(path, ""))
    assert len(pieces) > 2 and all(text.endswith("\n") for text, _ in pieces)
    assert "".join(text for text, _ in pieces) == path.read_text()
    assert pieces[1][1] == f"{path}:{1 + pieces[0][0].count(chr(10))}"


def test_jsonl_is_a_document_a_line(tmp_path: Path) -> None:
    lines = [json.dumps({"body": "one"}), "", json.dumps({"body": None}), json.dumps({"body": "three\nlines"})]
    path = written(tmp_path / "a.jsonl", "\n".join(lines))
    assert list(files.read_documents(path, "body")) == [
        ("one", f"{path}:1"),
        ("", f"{path}:3"),
        ("three\nlines", f"{path}:4"),
    ]


@pytest.mark.parametrize("kind", [pyarrow.string(), pyarrow.large_string()])
def test_parquet_is_a_document_a_row(tmp_path: Path, kind: pyarrow.DataType) -> None:
    path = tmp_path / "a.parquet"
    column = pyarrow.array(["one", None, "three"], kind)
    pyarrow.parquet.write_table(pyarrow.table({"id": [1, 2, 3], "body": column}), path)
    assert texts(path, "body") == ["one", "", "three"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"good\nbad \xff\n", r"a\.txt:2: not UTF-8 \(byte 0xff"),
        ("a.jsonl", b'{"text": "ok"}\n{"text": \n', r"a\.jsonl:2: not JSON"),
        ("b.jsonl", b'{"text": "ok"}\n\n{"body": 1, "id": 2}', r"b\.jsonl:3: no field 'text'.* has: body, id"),
        ("c.jsonl", b"[1, 2]", r"c\.jsonl:1: expected a JSON object .*got list"),
        ("d.jsonl", b'{"text": 3}', r"d\.jsonl:1: field 'text' must be a string, got int"),
        ("e.jsonl", b'{"text": "\xff"}', r"e\.jsonl:1: not UTF-8"),
        ("a.parquet", b"not parquet at all", r"a\.parquet: not a readable parquet file"),
    ],
)
def test_an_unreadable_file_is_named_with_its_line(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    with pytest.raises(DataError, match=message):
        texts(written(tmp_path / name, content))


@pytest.mark.parametrize(
    ("field", "message"),
    [("text", "no column 'text'; its columns are: id, body"), ("id", "column 'id' must hold strings, it holds int64")],
)
def test_a_wrong_parquet_column_lists_the_right_ones(tmp_path: Path, field: str, message: str) -> None:
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"id": [1], "body": ["x"]}), path)
    with pytest.raises(DataError, match=message):
        texts(path, field)


def test_finding_files_goes_below_in_order_and_leaves_hidden_ones_out(tmp_path: Path) -> None:
    for name in ("b.txt", "a.MD", "sub/c.jsonl", ".hidden/d.txt", "sub/.e.txt", "f.pdf"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.touch()
    found = files.find_files(tmp_path, files.TEXT_SUFFIXES, "data.path")
    assert [str(path.relative_to(tmp_path)) for path in found] == ["a.MD", "b.txt", "sub/c.jsonl"]


def test_a_folder_of_other_files_says_what_it_holds(tmp_path: Path) -> None:
    (tmp_path / "a.pdf").touch()
    with pytest.raises(DataError, match=r"no \.txt, .*\.parquet files .*other kinds \(\.pdf\)"):
        files.find_files(tmp_path, files.TEXT_SUFFIXES, "data.path")
    (tmp_path / "a.pdf").unlink()
    with pytest.raises(DataError, match="it holds no files"):
        files.find_files(tmp_path, files.TEXT_SUFFIXES, "data.path")


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("", "data.path is empty"),
        ("/no/such/folder", "no such file or folder"),
        ("wikitext", "nothing is downloaded"),
        ("some-user/some-corpus", "nothing is downloaded"),
    ],
)
def test_a_path_that_is_not_there(path: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        files.existing_path(path, "data.path", "a folder")
