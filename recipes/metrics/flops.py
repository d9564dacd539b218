"""FLOPs of a step from the model's own count, and what part of the hardware's peak that is.

A backward costs two forwards (gradients of inputs and of weights). MFU counts the model's work only; HFU
adds the forward that activation checkpointing runs again inside backward. A multiply-add counts as 2.
"""

from __future__ import annotations

from dataclasses import dataclass

from recipes.data.records import DataInfo
from recipes.registry import Entry
from recipes.schema.engine import PrecisionConfig
from recipes.schema.model import ModelConfig
from recipes.schema.training import HardwareConfig


@dataclass(frozen=True)
class SampleFlops:
    """FLOPs of training one sample; ``model`` without, ``hardware`` with recomputation."""

    model: float
    hardware: float


def sample_flops(
    entry: Entry, config: ModelConfig, info: DataInfo, activation_checkpointing: bool
) -> SampleFlops | None:
    """From the model's ``forward_flops``; None for a plugin that does not offer it.

    What is recomputed is the units: ``unit_forward_flops(config, info)`` where the model offers it, else its
    whole forward (too much by the head, for a language model).
    """
    if not entry.offers("forward_flops"):
        return None
    forward = float(entry.load("forward_flops")(config, info))
    if not activation_checkpointing:
        return SampleFlops(3.0 * forward, 3.0 * forward)
    again = forward
    if entry.offers("unit_forward_flops"):
        again = float(entry.load("unit_forward_flops")(config, info))
    return SampleFlops(3.0 * forward, 3.0 * forward + again)


def peak_flops(hardware: HardwareConfig, precision: PrecisionConfig) -> float | None:
    """FLOP/s of one device in the dtype that computes; None where the profile does not know."""
    return {
        "float32": hardware.peak_flops_float32,
        "bfloat16": hardware.peak_flops_bfloat16,
        "float16": hardware.peak_flops_float16,
    }[precision.param_dtype]


def flop_rates(flops: SampleFlops | None, samples_per_s_per_rank: float, peak: float | None) -> dict[str, float | None]:
    """Per rank: TFLOPS (1e12 FLOP/s) without and with recomputation, and their part of the peak."""
    if flops is None:
        return {"tflops_per_rank": None, "hardware_tflops_per_rank": None, "mfu": None, "hfu": None}
    model, hardware = flops.model * samples_per_s_per_rank, flops.hardware * samples_per_s_per_rank
    return {
        "tflops_per_rank": model / 1e12,
        "hardware_tflops_per_rank": hardware / 1e12,
        "mfu": model / peak if peak else None,
        "hfu": hardware / peak if peak else None,
    }
