"""``forward_flops`` against torch's own counter, exactly: what a formula leaves out on purpose is spelled out here."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from recipes.registry import MODELS
from tests.recipes.models.tiny import ALL, DEEPVIT, DHEN, GPT, REGNET, T5, Tiny


def units_counted(tiny: Tiny) -> int:
    """The part of one sample's forward that happens inside units."""
    model = tiny.build().train()
    names = {name for name, module in model.named_modules() if module in tiny.unit_modules(model)}
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter, torch.no_grad():
        tiny.loss(model, tiny.batch(1))
    per_module = counter.get_flop_counts()
    root = type(model).__name__
    return sum(sum(per_module.get(f"{root}.{name}", {}).values()) for name in names)


def counted(tiny: Tiny) -> int:
    """One sample's forward; biases are no matrix products to the counter."""
    model = tiny.build().train()
    batch = tiny.batch(2)
    # The counter knows the products of plain attention; torch's fused kernel for CPUs it does not count at all.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter, torch.no_grad():
        tiny.loss(model, batch)
    total = counter.get_total_flops()
    assert total % 2 == 0
    return total // 2


def biases(model: nn.Module) -> int:
    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    return sum(linear.out_features for linear in linears if linear.bias is not None)


@pytest.mark.parametrize(
    "tiny",
    [GPT, T5, T5.with_config(feed_forward_proj="gated-gelu"), REGNET, REGNET.with_config(layer_type="x")],
    ids=["gpt", "t5", "t5_gated", "regnet_y", "regnet_x"],
)
def test_equals_the_counter(tiny: Tiny) -> None:
    assert tiny.flops() == counted(tiny)


def test_deepvit_leaves_out_patches_and_classifier() -> None:
    width, patch, classes = DEEPVIT.config.hidden_size, DEEPVIT.config.patch_size, DEEPVIT.info.num_classes
    patches = (DEEPVIT.config.image_size // patch) ** 2
    left_out = 2 * patches * 3 * patch**2 * width + 2 * width * classes
    assert DEEPVIT.flops() + left_out == counted(DEEPVIT)


@pytest.mark.parametrize("modules", [["advanced_dlrm", "dcn_low_rank"], ["dcn_low_rank"], ["advanced_dlrm"] * 3])
def test_dhen_counts_a_bias_like_a_weight(modules: list[str]) -> None:
    tiny = DHEN.with_config(modules=modules)
    assert tiny.flops() == counted(tiny) + 2 * biases(tiny.build())


@pytest.mark.parametrize("tiny", ALL, ids=lambda tiny: tiny.kind)
def test_what_checkpointing_runs_again(tiny: Tiny) -> None:
    entry = MODELS[tiny.kind]
    if entry.offers("unit_forward_flops"):
        again = entry.load("unit_forward_flops")(tiny.config, tiny.info)
    else:
        again = tiny.flops()  # of DeepViT, which counts its units alone
    extra = sum(2 * biases(unit) for unit in tiny.unit_modules(tiny.build())) if tiny is DHEN else 0
    assert again == units_counted(tiny) + extra
