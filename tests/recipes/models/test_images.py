"""RegNet and DeepViT alone."""

from __future__ import annotations

import pytest
import torch

from recipes.data.records import DataInfo
from recipes.models import deepvit
from tests.recipes.models.tiny import DEEPVIT, REGNET


def test_patches_are_cut_row_by_row() -> None:
    model = DEEPVIT.build()
    pixels = torch.arange(3 * 24 * 24, dtype=torch.float32).view(1, 3, 24, 24)
    patches = model._patches(pixels)
    assert patches.shape == (1, 9, 3 * 8 * 8)
    second_row_third = pixels[0, :, 8:16, 16:24].permute(1, 2, 0).flatten()
    assert torch.equal(patches[0, 5], second_row_third)
    channels_last = pixels.contiguous(memory_format=torch.channels_last)
    assert torch.equal(model._patches(channels_last), patches)


def test_reattention_by_hand() -> None:
    """The unit against the formula written with loops over samples and heads."""
    unit, x = DEEPVIT.build().layers[0], torch.randn(2, 10, 32)
    heads, width = unit.num_heads, unit.head_dim
    expected = []
    for sample in unit.norm(x):
        q, k, v = unit.qkv(sample).view(10, 3, heads, width).unbind(1)
        maps = [torch.softmax(q[:, h] @ k[:, h].T / width**0.5, dim=-1) for h in range(heads)]
        mixed = torch.stack([sum(maps[h] * unit.head_mix[h, g] for h in range(heads)) for g in range(heads)])
        normal = torch.nn.functional.layer_norm(mixed.movedim(0, -1), (heads,)).movedim(-1, 0)
        expected.append(torch.cat([normal[g] @ v[:, g] for g in range(heads)], dim=-1))
    torch.testing.assert_close(unit(x), x + unit.out(torch.stack(expected)), rtol=1e-4, atol=1e-5)


def test_logits_come_from_the_class_token() -> None:
    model = DEEPVIT.build()
    read: list[torch.Tensor] = []
    model.final_norm.register_forward_hook(lambda _module, args, _out: read.append(args[0]))
    model.layers[-1].register_forward_hook(lambda _module, _args, out: read.append(out[:, 0]))
    model(DEEPVIT.batch(2)["pixels"])
    assert torch.equal(read[0], read[1])


def test_deepvit_refusals() -> None:
    with pytest.raises(ValueError, match="images of 3 x 24 x 16; the model wants 3 x 24 squared"):
        DEEPVIT.build()(torch.zeros(1, 3, 24, 16))
    with pytest.raises(ValueError, match=r"patch_size \(7\) does not divide image_size \(24\)"):
        DEEPVIT.with_config(patch_size=7).build()
    with pytest.raises(ValueError, match="the data's images have 32 pixels a side, the model wants 24"):
        deepvit.build(DEEPVIT.config, DataInfo("images", num_classes=6, image_size=32))


def test_regnet_keeps_running_statistics() -> None:
    model, batch = REGNET.build(), REGNET.batch(4)
    mean = model.regnet.embedder.embedder.normalization.running_mean
    model.train()(batch["pixels"])
    moved = mean.clone()
    assert moved.count_nonzero() > 0
    model.eval()(batch["pixels"])
    assert torch.equal(mean, moved)


def test_regnet_refusals() -> None:
    with pytest.raises(ValueError, match=r"groups_width \(8\) does not divide 20 channels"):
        REGNET.with_config(hidden_sizes=[16, 20]).build()
    with pytest.raises(ValueError, match=r"model.depths has 3 stages, model.hidden_sizes 2"):
        REGNET.with_config(depths=[1, 1, 1]).build()
