"""What a model folder is taken for: headers, index, damage, pickles. No value is read."""

from __future__ import annotations

import json
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from recipes.portable.errors import FolderError
from recipes.portable.families import family_of
from recipes.portable.folder import open_folder
from recipes.portable.header import read_header
from recipes.portable.tensors import DTYPES, mapped, write_file
from recipes.schema.model import GPTConfig, T5Config

TENSORS = {
    "wide": torch.arange(6, dtype=torch.float64).view(2, 3),
    "number": torch.tensor(7),
    "empty": torch.zeros(0, 4),
    "half": torch.randn(5, 3).bfloat16(),
    "flag": torch.tensor([True, False, True]),
}
GPT = GPTConfig(num_layers=2, num_heads=2, hidden_size=8, max_seq_len=16)
T5 = T5Config(d_model=8, d_kv=4, d_ff=16, num_heads=2, num_layers=1, num_decoder_layers=1)


def shapes(tensors: dict[str, torch.Tensor]) -> dict[str, tuple[str, tuple[int, ...]]]:
    names = {dtype: name for name, dtype in DTYPES.items()}
    return {name: (names[tensor.dtype], tuple(tensor.shape)) for name, tensor in tensors.items()}


def test_safetensors_reads_what_we_write_and_we_read_what_it_writes(tmp_path: Path) -> None:
    ours, theirs = tmp_path / "ours.safetensors", tmp_path / "theirs.safetensors"
    write_file(ours, shapes(TENSORS), (tensor.reshape(-1) for tensor in TENSORS.values()))
    save_file(TENSORS, theirs)
    for name, tensor in TENSORS.items():
        assert torch.equal(load_file(ours)[name], tensor)
        assert torch.equal(mapped(read_header(theirs)[name]), tensor)


def test_a_view_of_a_file_is_private(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(4)}, file)
    mapped(read_header(file)["a"]).zero_()
    assert torch.equal(mapped(read_header(file)["a"]), torch.ones(4))


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-5])


def without_header(file: Path) -> None:
    file.write_bytes(b"\x02\0\0\0\0\0\0\0{]" + file.read_bytes())


def with_another_shape(file: Path) -> None:
    file.write_bytes(file.read_bytes().replace(b"[2,3]", b"[2,4]"))


def short(file: Path) -> None:
    file.write_bytes(b"\x10")


@pytest.mark.parametrize("damage", [cut, without_header, with_another_shape, short])
def test_a_damaged_file_is_named(damage: Any, tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"wide": TENSORS["wide"]}, file)
    damage(file)
    with pytest.raises(FolderError, match=re.escape(str(file))):
        open_folder(str(tmp_path))


class _Bomb:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.mark,)


def test_a_pickle_is_refused_and_not_opened(tmp_path: Path) -> None:
    mark = tmp_path / "was_run"
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(_Bomb(mark)))
    with pytest.raises(FolderError, match="a pickle, which is never loaded"):
        open_folder(str(folder))
    assert not mark.exists()


def test_an_index_names_files_that_must_be_there(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "one.safetensors")
    index = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(FolderError, match=r"not there: two\.safetensors"):
        open_folder(str(tmp_path))
    save_file({"c": torch.ones(2)}, tmp_path / "two.safetensors")
    with pytest.raises(FolderError, match=r"looks for 'b' in two\.safetensors"):
        open_folder(str(tmp_path))
    save_file({"b": torch.ones(2), "unnamed": torch.ones(1)}, tmp_path / "two.safetensors")
    assert list(open_folder(str(tmp_path)).tensors) == ["a", "b"]


def test_an_index_cannot_lead_out_of_the_folder(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "secret.safetensors")
    folder = tmp_path / "model"
    folder.mkdir()
    index = {"weight_map": {"a": "../secret.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(FolderError, match="not there"):
        open_folder(str(folder))


def test_what_is_no_folder_is_told(tmp_path: Path) -> None:
    with pytest.raises(FolderError, match=r"no such folder.*fetch the model elsewhere"):
        open_folder("openai-community/gpt2")
    with pytest.raises(FolderError, match="holds no safetensors file"):
        open_folder(str(tmp_path))


@pytest.mark.parametrize(
    ("model", "config", "keys"),
    [
        (GPT, {"model_type": "gpt2", "n_embd": 8, "n_layer": 3, "tie_word_embeddings": False}, ["model.num_layers"]),
        (GPT, {"model_type": "gpt2"}, ["model.tie_head"]),
        (GPT, {"model_type": "llama"}, ["model.kind"]),
        (GPT, {"activation_function": "relu", "tie_word_embeddings": False}, ["activation"]),
        (T5, {"model_type": "t5", "d_ff": 32, "d_kv": 4}, ["model.d_ff"]),
        (T5, {"model_type": "t5", "tie_word_embeddings": False}, ["model.tie_word_embeddings"]),
        (T5, {}, []),
    ],
)
def test_a_config_of_another_model_is_seen(model: Any, config: dict[str, Any], keys: list[str]) -> None:
    assert [key for key, _, _ in family_of(model).differences(config)] == keys
