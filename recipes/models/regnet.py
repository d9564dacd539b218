"""RegNet (arXiv 2003.13678): ``RegNetForImageClassification`` of transformers, called for its logits alone.

B samples, pixels [B, 3, H, H]. ``regnet_9b`` has the sizes of regnet-y-10b-seer with 1000 classes: 9,352,215,872
parameters. Units are the layers of the four stages, of very uneven sizes (27 in the preset).

BatchNorm sees the micro-batch of its own rank: its statistics, and so the loss, depend on how samples are spread.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import RegNetConfig as HFConfig
from transformers import RegNetForImageClassification
from transformers.models.regnet.modeling_regnet import RegNetXLayer, RegNetYLayer

from recipes.data.records import DataInfo
from recipes.models.sizes_from_data import at_least_as_data
from recipes.schema.model import RegNetConfig


class RegNet(RegNetForImageClassification):
    """Pixels [B, 3, H, H] to logits [B, classes]."""

    def forward(self, pixels: Tensor) -> Tensor:
        return super().forward(pixel_values=pixels).logits


def build(config: RegNetConfig, info: DataInfo) -> RegNet:
    """Raises ValueError if the sizes contradict each other or the data."""
    if len(config.depths) != len(config.hidden_sizes):
        raise ValueError(f"model.depths has {len(config.depths)} stages, model.hidden_sizes {len(config.hidden_sizes)}")
    for channels in config.hidden_sizes:
        if channels % config.groups_width:
            raise ValueError(f"model.groups_width ({config.groups_width}) does not divide {channels} channels")
    options: dict[str, Any] = {  # by dict: the library declares only some of what it takes
        "num_channels": 3,
        "embedding_size": config.embedding_size,
        "hidden_sizes": list(config.hidden_sizes),
        "depths": list(config.depths),
        "groups_width": config.groups_width,
        "layer_type": config.layer_type,
        "num_labels": at_least_as_data("model.num_classes", config.num_classes, info.num_classes),
    }
    return RegNet(HFConfig(**options))


def unit_classes() -> tuple[type[nn.Module], ...]:
    return (RegNetXLayer, RegNetYLayer)


def forward_flops(config: RegNetConfig, info: DataInfo) -> float:
    """Convolutions and the classifier: 2 k^2 C_in/groups C_out per output pixel."""
    num_classes = at_least_as_data("model.num_classes", config.num_classes, info.num_classes)
    stem = _conv(3, config.embedding_size, 3, 1, _halved(info.image_size or config.image_size))
    return unit_forward_flops(config, info) + stem + 2 * config.hidden_sizes[-1] * num_classes


def unit_forward_flops(config: RegNetConfig, info: DataInfo) -> float:
    """The layers' part of it: what activation checkpointing runs again."""
    side = _halved(info.image_size or config.image_size)
    flops, channels_in = 0, config.embedding_size
    for depth, channels in zip(config.depths, config.hidden_sizes, strict=True):
        flops += _layer(config, channels_in, channels, side, _halved(side))
        side = _halved(side)
        flops += (depth - 1) * _layer(config, channels, channels, side, side)
        channels_in = channels
    return float(flops)


def _layer(config: RegNetConfig, channels_in: int, channels: int, side_in: int, side_out: int) -> int:
    """1x1, grouped 3x3, squeeze-and-excitation (y), 1x1, and a 1x1 shortcut where the shape changes."""
    flops = _conv(channels_in, channels, 1, 1, side_in)
    flops += _conv(channels, channels, 3, max(1, channels // config.groups_width), side_out)
    flops += _conv(channels, channels, 1, 1, side_out)
    if config.layer_type == "y":
        flops += 2 * _conv(channels, round(channels_in / 4), 1, 1, 1)
    if channels_in != channels or side_in != side_out:
        flops += _conv(channels_in, channels, 1, 1, side_out)
    return flops


def _conv(channels_in: int, channels_out: int, kernel: int, groups: int, side_out: int) -> int:
    return 2 * kernel**2 * (channels_in // groups) * channels_out * side_out**2


def _halved(side: int) -> int:
    """Output side of a stride-2 convolution of width 3 with padding 1, or of width 1 without."""
    return (side + 1) // 2
