"""Folders of others, and our own, into shards: any F, recorded or built whole; what does not fit is named at once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, T5Config, T5ForConditionalGeneration

from recipes.portable.errors import FolderError
from recipes.schema import RecipeConfig
from tests.recipes.portable.made import built, config_of, logits, whole_state, whole_states
from tests.support.ranks import Pools

GPT = {"num_layers": 2, "num_heads": 2, "hidden_size": 24, "max_seq_len": 48, "vocab_size": 259}
T5 = {"d_model": 24, "d_kv": 8, "d_ff": 32, "num_heads": 2, "num_layers": 2, "num_decoder_layers": 1}


def gpt2_folder(folder: Path, **changes: object) -> Path:
    """Of transformers, with random weights."""
    torch.manual_seed(3)
    sizes = {"n_layer": 2, "n_head": 2, "n_embd": 24, "n_positions": 48, "vocab_size": 259}
    options = {"embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0, "bos_token_id": 1, "eos_token_id": 1}
    GPT2LMHeadModel(GPT2Config(**(sizes | options | changes))).save_pretrained(folder)
    return folder


def t5_folder(folder: Path) -> Path:
    torch.manual_seed(3)
    config = T5Config(**T5, vocab_size=359, dropout_rate=0.0, decoder_start_token_id=0, pad_token_id=0)
    T5ForConditionalGeneration(config).save_pretrained(folder, max_shard_size="40KB")
    return folder


def from_folder(preset: str, folder: Path, **changes: object) -> RecipeConfig:
    sizes = GPT | {"tie_head": True} if preset == "gpt_tiny" else T5
    return config_of(preset, **(sizes | {"init_from": str(folder)} | changes))


def test_a_gpt2_of_transformers(tmp_path: Path) -> None:
    folder = gpt2_folder(tmp_path)
    config = from_folder("gpt_tiny", folder)
    theirs = GPT2LMHeadModel.from_pretrained(folder)
    torch.testing.assert_close(logits(built(None, config), config), logits(theirs, config), rtol=1e-5, atol=1e-6)


def test_the_published_gpt2_spelling(tmp_path: Path) -> None:
    """Without the prefix, with the constant masks that the first folders hold, and in half precision."""
    folder = gpt2_folder(tmp_path / "new")
    stored = load_file(folder / "model.safetensors")
    bare = {name.removeprefix("transformer."): tensor.half() for name, tensor in stored.items()}
    bare["h.0.attn.bias"] = torch.ones(1, 1, 48, 48)
    old = tmp_path / "old"
    old.mkdir()
    save_file(bare, old / "model.safetensors")
    found = whole_state(None, from_folder("gpt_tiny", old))
    wanted = whole_state(None, from_folder("gpt_tiny", folder))
    assert all(torch.equal(found[name], wanted[name].half().float()) for name in wanted)


def test_a_t5_of_transformers_in_many_files(tmp_path: Path) -> None:
    folder = t5_folder(tmp_path)
    assert len(list(folder.glob("*.safetensors"))) > 1
    config = from_folder("t5_tiny", folder)
    theirs = T5ForConditionalGeneration.from_pretrained(folder)
    torch.testing.assert_close(logits(built(None, config), config), logits(theirs, config), rtol=1e-5, atol=1e-6)


def test_every_rank_reads_its_own_part(tmp_path: Path, ranks: Pools) -> None:
    """F = 1, 2, 4 of 4 ranks, units of any size, recorded or built whole: everywhere the folder's bits."""
    gpt, t5 = gpt2_folder(tmp_path / "gpt"), t5_folder(tmp_path / "t5")
    configs = [
        from_folder("gpt_tiny", gpt, factor=4),
        from_folder("gpt_tiny", gpt, factor=2, init="eager"),
        from_folder("gpt_tiny", gpt, factor=1, reshard_after_forward=False),
        from_folder("gpt_tiny", gpt, factor=4, units="root"),
        from_folder("t5_tiny", t5, factor=4),
        from_folder("t5_tiny", t5, factor=2, init="eager", units="root"),
    ]
    alone: dict[str, dict[str, Tensor]] = {
        "gpt": whole_state(None, from_folder("gpt_tiny", gpt)),
        "t5": whole_state(None, from_folder("t5_tiny", t5)),
    }
    for of_rank in ranks(4).run(whole_states, configs):
        for config, state in zip(configs, of_rank, strict=True):
            expected = alone[config.model.kind]
            assert set(state) == set(expected)
            assert all(torch.equal(state[name], expected[name]) for name in expected)


def test_everything_that_does_not_fit_is_named_at_once(tmp_path: Path) -> None:
    folder = gpt2_folder(tmp_path)
    stored = load_file(folder / "model.safetensors")
    stored["transformer.wpe.weight"] = torch.zeros(40, 24)
    stored["transformer.h.2.ln_1.weight"] = torch.zeros(24)
    del stored["transformer.h.1.mlp.c_fc.bias"]
    save_file(stored, folder / "model.safetensors")
    with pytest.raises(FolderError) as raised:
        built(None, from_folder("gpt_tiny", folder))
    text = str(raised.value)
    assert "this model needs, and the folder has not: transformer.h.1.mlp.c_fc.bias" in text
    assert "the folder has, and this model has not: transformer.h.2.ln_1.weight" in text
    assert "transformer.wpe.weight [40, 24] there, [48, 24] here" in text


def test_an_untied_head_is_not_in_a_tied_folder(tmp_path: Path) -> None:
    with pytest.raises(FolderError, match=r"has not: lm_head\.weight\n.*model\.tie_head is True there and False here"):
        built(None, from_folder("gpt_tiny", gpt2_folder(tmp_path), tie_head=False))


def test_a_vocabulary_left_to_the_data_gets_its_number(tmp_path: Path) -> None:
    folder = gpt2_folder(tmp_path, vocab_size=300)
    with pytest.raises(FolderError, match=r"wte\.weight \[300, 24\] there, \[259, 24\] here\n.*model\.vocab_size=300"):
        built(None, from_folder("gpt_tiny", folder, vocab_size=None))
