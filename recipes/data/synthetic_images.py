"""``synthetic_images``: NOT real data. Every class is a pattern of a few waves; a sample is its pattern in noise.

Sample i follows from i alone. The pattern is shifted by a random amount per sample (around the edges), so that a model
must find the pattern rather than single pixels.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from recipes.data.images import resolved_image_size
from recipes.data.randomness import as_uniform, key_of, random_table
from recipes.data.records import Batch, DataInfo, Dataset, PrepareRequest, Splits
from recipes.schema.data import SyntheticImagesConfig

_NUM_WAVES = 4
_MAX_FREQUENCY = 4  # waves across the image
_NOISE = 0.7  # standard deviation, beside a pattern of standard deviation 1


def prepare(config: SyntheticImagesConfig, request: PrepareRequest) -> Splits:
    image_size = resolved_image_size(config.kind, config.image_size, request)
    num_eval = max(1, round(config.num_samples * config.eval_fraction)) if config.eval_fraction > 0 else 0
    train = PlantedImages(config.num_classes, image_size, first=0, last=config.num_samples)
    held_out = PlantedImages(
        config.num_classes, image_size, first=config.num_samples, last=config.num_samples + num_eval
    )
    info = DataInfo(
        task="images",
        num_classes=config.num_classes,
        image_size=image_size,
        num_train=len(train),
        num_eval=len(held_out),
        description=f"SYNTHETIC images with planted patterns, {config.num_classes} classes, "
        f"{image_size} x {image_size}",
        extras={"fingerprint": f"synthetic-{config.num_samples}-{config.num_classes}-{image_size}", "synthetic": True},
    )
    return Splits(train, held_out, info)


class PlantedImages(Dataset):
    """Samples [first, last) of the endless planted sequence; H pixels on a side."""

    def __init__(self, num_classes: int, image_size: int, first: int, last: int) -> None:
        self._first, self._last = first, last
        self._image_size = image_size
        self._patterns = _patterns(num_classes, image_size)

    def __len__(self) -> int:
        return self._last - self._first

    def batch(self, indices: Sequence[int], epoch: int) -> Batch:
        numbers = np.asarray(indices, dtype=np.uint64) + np.uint64(self._first)
        draws = as_uniform(random_table(key_of("image draws"), numbers, 3))  # class, shift down, shift right
        labels = (draws[:, 0] * len(self._patterns)).astype(np.int64)
        shifts = (draws[:, 1:] * self._image_size).astype(np.int64)
        size = self._image_size
        noise = as_uniform(random_table(key_of("noise"), numbers, 3 * size * size)).reshape(-1, 3, size, size)
        pixels = ((noise - 0.5) * (12**0.5 * _NOISE)).astype(np.float32)
        for image, label, shift in zip(pixels, labels.tolist(), shifts.tolist(), strict=True):
            image += np.roll(self._patterns[label], shift, axis=(1, 2))
        return {"pixels": torch.from_numpy(pixels), "labels": torch.from_numpy(labels)}


def _patterns(num_classes: int, image_size: int) -> NDArray[np.float32]:
    """[classes, 3, H, H], each of mean 0 and standard deviation 1: waves of drawn direction, colour and phase."""
    classes = np.arange(num_classes, dtype=np.uint64)
    drawn = as_uniform(random_table(key_of("patterns"), classes, _NUM_WAVES * 6)).reshape(-1, _NUM_WAVES, 6)
    frequency = np.floor(drawn[..., :2] * (2 * _MAX_FREQUENCY + 1)) - _MAX_FREQUENCY  # whole: the edges meet
    place = np.arange(image_size) / image_size
    angle = (
        frequency[..., 0, None, None] * place[:, None]
        + frequency[..., 1, None, None] * place[None, :]
        + drawn[..., 2, None, None]
    )
    waves = np.cos(2 * np.pi * angle)  # [classes, waves, H, H]
    colour = drawn[..., 3:6] * 2 - 1  # [classes, waves, 3]
    pattern = np.einsum("kwhx,kwc->kchx", waves, colour)
    pattern -= pattern.mean(axis=(1, 2, 3), keepdims=True)
    pattern /= pattern.std(axis=(1, 2, 3), keepdims=True) + 1e-6
    return pattern.astype(np.float32)
