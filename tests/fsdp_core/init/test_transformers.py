"""Model constructors of the transformers library, with their own weight initialisation."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from fsdp_core.init import deferred_init, is_deferred, materialize, seeded_init

transformers = pytest.importorskip("transformers")


def t5() -> nn.Module:
    config = transformers.T5Config(
        vocab_size=64, d_model=16, d_kv=4, d_ff=32, num_layers=2, num_heads=4, feed_forward_proj="gated-gelu"
    )
    return transformers.T5ForConditionalGeneration(config)


def gpt2() -> nn.Module:
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=64, n_positions=32, n_embd=16, n_layer=2, n_head=2)
    )


def gpt2_bf16_from_config() -> nn.Module:
    config = transformers.GPT2Config(vocab_size=64, n_positions=32, n_embd=16, n_layer=2, n_head=2)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def regnet() -> nn.Module:
    config = transformers.RegNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 2], groups_width=8)
    return transformers.RegNetForImageClassification(config)


def vit() -> nn.Module:
    config = transformers.ViTConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, image_size=16, patch_size=8
    )
    return transformers.ViTModel(config)  # trunc_normal_, whose loop asks the values


@pytest.mark.parametrize("build", [t5, gpt2, gpt2_bf16_from_config, regnet, vit])
def test_deferred_equals_eager(build: Callable[[], nn.Module]) -> None:
    with seeded_init(5):
        expected = build()
    with seeded_init(5):
        module = deferred_init(build)
    assert all(is_deferred(p) for p in module.parameters())
    for part in reversed(list(module.modules())):
        if len(list(part.parameters(recurse=False))):
            materialize(module, only=part)
    materialize(module)
    values = module.state_dict()
    for name, value in expected.state_dict().items():
        assert torch.equal(value, values[name]), name
    assert ties(module) == ties(expected)


def ties(module: nn.Module) -> list[list[str]]:
    """Names of parameters that are one object."""
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [group for group in names.values() if len(group) > 1]
