"""DeepViT (arXiv 2103.11886): a vision transformer whose heads exchange their attention maps (re-attention).

B samples, P patches, T = P + 1 tokens (a class token comes first), D hidden size, H heads, inner = H * head_dim,
M width of the feed-forward.

Parameters: attention unit 3 D inner + H^2 + 2 H + (inner + 1) D + 2 D, feed-forward unit 2 D M + M + D + 2 D, root
(patches, class token, positions, last norm, classifier); with D = 1024, 16 heads of 64, M = 2048, 952 layers, patches
of 32 on 256 pixels and 1000 classes that is 7,998,269,160 in 1904 units of 4.2 million and a root of 4,241,384.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recipes.data.records import DataInfo
from recipes.models.initialised import NormalLinear, normal_
from recipes.models.sizes_from_data import at_least_as_data
from recipes.schema.model import DeepViTConfig

INIT_STD = 0.02
CHANNELS = 3


class ReAttention(nn.Module):
    """One unit: x + attention(norm(x)), [B, T, D] in and out.

    After softmax the maps of the H heads are mixed by a learned [H, H] matrix and normalised over heads, so that
    deep layers do not all attend alike. The maps are needed whole: fused attention cannot be used here.
    """

    def __init__(self, config: DeepViTConfig) -> None:
        super().__init__()
        inner = config.num_heads * config.head_dim
        self.num_heads, self.head_dim = config.num_heads, config.head_dim
        self.norm = nn.LayerNorm(config.hidden_size)
        self.qkv = NormalLinear(config.hidden_size, 3 * inner, std=INIT_STD, bias=False)
        self.head_mix = nn.Parameter(torch.empty(config.num_heads, config.num_heads))
        self.head_norm = nn.LayerNorm(config.num_heads)
        self.out = NormalLinear(inner, config.hidden_size, std=INIT_STD)
        self.dropout = nn.Dropout(config.dropout)
        normal_(self.head_mix)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        qkv = self.qkv(self.norm(x)).view(batch, tokens, 3, self.num_heads, self.head_dim)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # each [B, H, T, head_dim]
        maps = torch.matmul(q * self.head_dim**-0.5, k.transpose(-2, -1)).softmax(dim=-1)  # [B, H, T, T]
        maps = self.dropout(maps).permute(0, 2, 3, 1)  # [B, T, T, H]: heads last, to be mixed and normalised
        maps = self.head_norm(torch.matmul(maps, self.head_mix)).permute(0, 3, 1, 2)
        y = torch.matmul(maps, v).transpose(1, 2).reshape(batch, tokens, -1)
        return x + self.dropout(self.out(y))


class FeedForward(nn.Module):
    """One unit: x + mlp(norm(x)), [B, T, D] in and out."""

    def __init__(self, config: DeepViTConfig) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.hidden_size)
        self.up = NormalLinear(config.hidden_size, config.mlp_size, std=INIT_STD)
        self.down = NormalLinear(config.mlp_size, config.hidden_size, std=INIT_STD)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        y = self.dropout(F.gelu(self.up(self.norm(x))))
        return x + self.dropout(self.down(y))


class DeepViT(nn.Module):
    """Pixels [B, 3, image_size, image_size] to logits [B, classes], read off the class token."""

    def __init__(self, config: DeepViTConfig, num_classes: int) -> None:
        super().__init__()
        self.image_size, self.patch_size = config.image_size, config.patch_size
        num_patches = (config.image_size // config.patch_size) ** 2
        self.patch_embedding = NormalLinear(CHANNELS * config.patch_size**2, config.hidden_size, std=INIT_STD)
        self.class_token = nn.Parameter(torch.empty(1, 1, config.hidden_size))
        self.position_embedding = nn.Parameter(torch.empty(1, num_patches + 1, config.hidden_size))
        self.dropout = nn.Dropout(config.dropout)
        self.layers = nn.ModuleList()
        for _ in range(config.num_layers):
            self.layers.extend((ReAttention(config), FeedForward(config)))
        self.final_norm = nn.LayerNorm(config.hidden_size)
        self.head = NormalLinear(config.hidden_size, num_classes, std=INIT_STD)
        normal_(self.class_token, INIT_STD)
        normal_(self.position_embedding, INIT_STD)

    def forward(self, pixels: Tensor) -> Tensor:
        patches = self.patch_embedding(self._patches(pixels))
        class_token = self.class_token.expand(patches.shape[0], -1, -1)
        x = self.dropout(torch.cat((class_token, patches), dim=1) + self.position_embedding)  # [B, T, D]
        for layer in self.layers:
            x = layer(x)
        return self.head(self.final_norm(x[:, 0]))

    def _patches(self, pixels: Tensor) -> Tensor:
        """[B, 3, image, image] to [B, P, 3 * patch^2], row by row."""
        batch, channels, height, width = pixels.shape
        if (channels, height, width) != (CHANNELS, self.image_size, self.image_size):
            raise ValueError(
                f"images of {channels} x {height} x {width}; the model wants {CHANNELS} x {self.image_size} squared"
            )
        side = self.image_size // self.patch_size
        grid = pixels.reshape(batch, channels, side, self.patch_size, side, self.patch_size)
        return grid.permute(0, 2, 4, 3, 5, 1).reshape(batch, side * side, -1)


def build(config: DeepViTConfig, info: DataInfo) -> DeepViT:
    """Raises ValueError if the sizes contradict each other or the data."""
    if config.image_size % config.patch_size:
        raise ValueError(f"model.patch_size ({config.patch_size}) does not divide image_size ({config.image_size})")
    if info.image_size is not None and info.image_size != config.image_size:
        raise ValueError(f"the data's images have {info.image_size} pixels a side, the model wants {config.image_size}")
    return DeepViT(config, at_least_as_data("model.num_classes", config.num_classes, info.num_classes))


def unit_classes() -> tuple[type[nn.Module], ...]:
    return (ReAttention, FeedForward)


def forward_flops(config: DeepViTConfig, info: DataInfo) -> float:
    """num_layers (2 T (4 D inner + 2 D M) + 4 T^2 inner + 2 T^2 H^2); patches and classifier are left out."""
    tokens = (config.image_size // config.patch_size) ** 2 + 1
    inner = config.num_heads * config.head_dim
    products = 4 * config.hidden_size * inner + 2 * config.hidden_size * config.mlp_size
    attention = 4 * tokens**2 * inner + 2 * tokens**2 * config.num_heads**2  # maps and their mixing over heads
    return float(config.num_layers * (2 * tokens * products + attention))
