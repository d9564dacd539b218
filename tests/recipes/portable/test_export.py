"""From a checkpoint to a folder that transformers loads, and back into shards bit by bit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForImageClassification, AutoTokenizer, GPT2LMHeadModel, T5ForConditionalGeneration

from recipes.checkpoint.errors import CheckpointError
from recipes.checkpoint.reader import CheckpointReader
from recipes.portable.errors import FolderError
from recipes.portable.export import Exported, export
from recipes.schema import RecipeConfig
from recipes.schema.actions import ExportConfig
from tests.recipes.portable.made import built, config_of, info_of, logits, save_checkpoint, whole_state

TEXT = {
    "gpt_tiny": (GPT2LMHeadModel, {}),
    "gpt_tiny tied": (GPT2LMHeadModel, {"tie_head": True}),
    "t5_tiny": (T5ForConditionalGeneration, {}),
    "t5_tiny gated, untied": (
        T5ForConditionalGeneration,
        {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    ),
}


def exported(config: RecipeConfig, tmp_path: Path, **options: object) -> Exported:
    checkpoint = save_checkpoint(None, config, str(tmp_path / "run"))
    chosen = ExportConfig(**({"dir": str(tmp_path / "out")} | options))
    info = info_of(config) if config.model.kind in ("gpt", "t5") else None
    return export(Path(checkpoint), config.model, info, chosen)


def again(config: RecipeConfig, folder: Path) -> RecipeConfig:
    """The same model, from the folder, with other random weights underneath."""
    config.model.init_from, config.run.seed = str(folder), 99
    return config


@pytest.mark.parametrize("case", TEXT)
def test_transformers_computes_the_same_logits(case: str, tmp_path: Path) -> None:
    cls, changes = TEXT[case]
    config = config_of(case.split()[0], **changes)
    result = exported(config, tmp_path)
    theirs = cls.from_pretrained(result.folder)
    ours = built(None, again(config, result.folder))
    difference = (logits(theirs, config) - logits(ours, config)).abs().max()
    assert difference <= 1e-6 * logits(ours, config).abs().max()


@pytest.mark.parametrize("preset", ["gpt_tiny", "t5_tiny", "dhen_tiny", "regnet_tiny", "deepvit_tiny"])
def test_importing_what_was_exported_is_bit_exact(preset: str, tmp_path: Path) -> None:
    config = config_of(preset)
    result = exported(config, tmp_path)
    reader = CheckpointReader(tmp_path / "run" / "checkpoints" / "step_00000007")
    found = whole_state(None, again(config, result.folder))
    expected = {name: reader.whole(name) for kind in ("model", "buffer") for name in reader.names(kind)}
    assert {name.partition("@")[0] for name in found} == set(expected)
    for name, tensor in found.items():
        assert torch.equal(tensor, expected[name.partition("@")[0]]), name


def test_regnet_is_an_image_classifier_of_transformers(tmp_path: Path) -> None:
    config = config_of("regnet_tiny")
    result = exported(config, tmp_path)
    theirs = AutoModelForImageClassification.from_pretrained(result.folder)
    ours = built(None, again(config, result.folder))
    pixels = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(theirs.eval()(pixels).logits, ours.eval()(pixels), rtol=1e-5, atol=1e-6)


def test_several_files_have_an_index(tmp_path: Path) -> None:
    config = config_of("gpt_tiny")
    result = exported(config, tmp_path, max_file_bytes=1_000_000)
    index = json.loads((result.folder / "model.safetensors.index.json").read_text())
    assert result.num_files == len(set(index["weight_map"].values())) > 2
    assert index["metadata"]["total_size"] == result.num_bytes
    ours = built(None, again(config, result.folder))
    torch.testing.assert_close(
        logits(GPT2LMHeadModel.from_pretrained(result.folder), config), logits(ours, config), rtol=1e-5, atol=1e-6
    )


def test_a_narrower_dtype(tmp_path: Path) -> None:
    config = config_of("gpt_tiny")
    result = exported(config, tmp_path, dtype="bfloat16")
    reader = CheckpointReader(tmp_path / "run" / "checkpoints" / "step_00000007")
    stored = load_file(result.folder / "model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {torch.bfloat16}
    assert torch.equal(stored["transformer.wte.weight"], reader.whole("token_embedding.weight").bfloat16())
    assert json.loads((result.folder / "config.json").read_text())["dtype"] == "bfloat16"
    found = whole_state(None, again(config, result.folder))
    assert torch.equal(found["head.weight"], reader.whole("head.weight").bfloat16().float())


@pytest.mark.parametrize("preset", ["gpt_tiny", "t5_tiny"])
def test_the_byte_tokenizer_comes_along(preset: str, tmp_path: Path) -> None:
    config = config_of(preset)
    info = info_of(config)
    theirs = AutoTokenizer.from_pretrained(exported(config, tmp_path).folder)
    text = "def naïve(x):\n    return x"
    ids = theirs(text, add_special_tokens=False).input_ids
    assert ids == info.extras["tokenizer"].encode([text.encode()])[0].tolist()
    assert (theirs.pad_token_id, theirs.eos_token_id) == (0, info.eos_id)
    sentinels = [f"<extra_id_{number}>" for number in range(len(info.extras["sentinel_ids"]))]
    assert tuple(theirs.convert_tokens_to_ids(sentinels)) == info.extras["sentinel_ids"]


def test_a_folder_with_something_in_it_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious.txt").write_text("keep me")
    with pytest.raises(FolderError, match="holds something already"):
        exported(config_of("gpt_tiny"), tmp_path)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["precious.txt"]


def test_a_failed_export_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("recipes.portable.export.write_file", full)
    with pytest.raises(FolderError, match="No space left on device"):
        exported(config_of("gpt_tiny"), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_damaged_checkpoint_is_not_exported(tmp_path: Path) -> None:
    config = config_of("gpt_tiny")
    checkpoint = Path(save_checkpoint(None, config, str(tmp_path / "run")))
    file = checkpoint / "rank_00000.safetensors"
    content = bytearray(file.read_bytes())
    content[-9] ^= 4
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match="its checksum is"):
        export(checkpoint, config.model, info_of(config), ExportConfig(dir=str(tmp_path / "out")))
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
