"""A model folder of this machine as it is on disk: which tensors lie in which file, and its ``config.json``.

No torch here, and never a pickle: loading one runs whatever code its author put there.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipes.data.files import expanded
from recipes.portable.errors import FolderError
from recipes.portable.header import StoredTensor, read_header

CONFIG_FILE = "config.json"
GENERATION_FILE = "generation_config.json"
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
EXPECTED = f"a folder with {SINGLE_FILE}, or with {INDEX_FILE} and the files it names"
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


@dataclass(frozen=True)
class ModelFolder:
    """tensors: by their names in the files. config: of ``config.json``, empty where there is none."""

    path: Path
    tensors: dict[str, StoredTensor]
    config: dict[str, Any]


def open_folder(path: str, key: str = "model.init_from") -> ModelFolder:
    """Reads headers, the index and ``config.json``; no values.

    Raises:
        FolderError: in the words of config key ``key``, where the folder cannot be used.
    """
    folder = expanded(path)
    problem = folder_problem(path, key)
    if problem is not None:
        raise FolderError(problem)
    try:
        tensors = _indexed(folder) if (folder / INDEX_FILE).is_file() else _all_of(_safetensors(folder))
        return ModelFolder(folder.absolute(), tensors, _json(folder / CONFIG_FILE))
    except OSError as error:
        raise FolderError(f"{key}={path}: cannot be read: {error.strerror or error}: {error.filename}") from error


def folder_problem(path: str, key: str) -> str | None:
    """Why this is no folder to start from, in one sentence with the remedy; None if it may be one."""
    folder = expanded(path)
    if not folder.exists():
        text = f"{key}={path}: no such folder (looked for {folder.absolute()}); expected {EXPECTED}"
        is_hub_name = path.count("/") <= 1 and not path.startswith((".", "/", "~"))
        return text + (". Nothing is downloaded: fetch the model elsewhere and name its folder" if is_hub_name else "")
    if not folder.is_dir():
        return f"{key}={path}: this is a file; expected {EXPECTED}"
    if (folder / INDEX_FILE).is_file() or _safetensors(folder):
        return None
    pickles = sorted(file.name for file in folder.iterdir() if file.suffix in _PICKLES)
    if pickles:
        return (
            f"{key}={path}: holds only {pickles[0]}, a pickle, which is never loaded here: it may run any code. "
            f"Expected {EXPECTED}; transformers' save_pretrained() writes them"
        )
    return f"{key}={path}: holds no safetensors file; expected {EXPECTED}"


def _safetensors(folder: Path) -> list[Path]:
    """``model.safetensors`` alone where it is there: other files beside it are other variants of the model."""
    single = folder / SINGLE_FILE
    return [single] if single.is_file() else sorted(folder.glob("*.safetensors"))


def _all_of(files: Iterable[Path]) -> dict[str, StoredTensor]:
    tensors: dict[str, StoredTensor] = {}
    for file in files:
        for name, stored in read_header(file).items():
            if name in tensors:
                raise FolderError(f"{name!r} is in {tensors[name].file.name} and in {file.name} of {file.parent}")
            tensors[name] = stored
    return tensors


def _indexed(folder: Path) -> dict[str, StoredTensor]:
    """What the index names, each in the file that it names; files it does not name are left alone."""
    places = _json(folder / INDEX_FILE).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(file, str) for file in places.values()):
        raise FolderError(f"{folder / INDEX_FILE} has no map from tensors to files (weight_map)")
    files = {file: folder / Path(file).name for file in sorted(set(places.values()))}
    absent = [file for file, place in files.items() if not place.is_file()]
    if absent:
        raise FolderError(f"{folder}: {INDEX_FILE} names files that are not there: {', '.join(absent)}")
    headers = {file: read_header(place) for file, place in files.items()}
    lost = [name for name, file in places.items() if name not in headers[file]]
    if lost:
        raise FolderError(f"{folder}: {INDEX_FILE} looks for {lost[0]!r} in {places[lost[0]]}, which does not hold it")
    return {name: headers[file][name] for name, file in places.items()}


def _json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise FolderError(f"{file} is no JSON: {error}") from None
    if not isinstance(content, dict):
        raise FolderError(f"{file} is no map of keys")
    return content
