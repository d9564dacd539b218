"""The fused kernels that CUDA has and a device without memory has not: without them shapes would lie about memory.

| call | CUDA keeps | without the stand-in |
|---|---|---|
| dropout | a mask of one byte per element | a mask in the tensor's own dtype, and a scaled copy |
| fused optimizers | nothing | they refuse a device they do not know |
| scaled_dot_product_attention | output and one float per row | the [S, S] scores, several times |
"""

from __future__ import annotations

from contextlib import ExitStack
from importlib import import_module
from types import TracebackType
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

_HALF = (torch.float16, torch.bfloat16)
_FUSED: list[Any] = [import_module(f"torch.optim.{name}") for name in ("adam", "sgd", "adagrad")]


class CudaKernels:
    """While entered, calls of these functions go to the operations that CUDA would choose; their meta kernels know
    shapes and saved tensors. The functions themselves are replaced: a torch-function mode is off during backward,
    where activation checkpointing runs forwards again."""

    def __init__(self) -> None:
        self._patches = ExitStack()

    def __enter__(self) -> CudaKernels:
        self._patches.enter_context(patch.object(F, "dropout", _dropout))
        self._patches.enter_context(patch.object(F, "scaled_dot_product_attention", _attention))
        for module in _FUSED:
            self._patches.enter_context(patch.object(module, "_device_dtype_check_for_fused", _fused_everywhere))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._patches.close()


def _fused_everywhere(parameter: Tensor, cuda_unsupported: bool = False) -> None:
    """In place of torch's question whether the device has fused optimizers: the one that is simulated has."""


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    if not training or p == 0.0 or not input.is_meta:
        return input
    dropped = torch.native_dropout(input, p, True)[0]
    return input.copy_(dropped) if inplace else dropped


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Flash attention where CUDA would take it (16-bit, no mask), else the memory-efficient kernel."""
    aten = torch.ops.aten
    if enable_gqa:
        groups = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(groups, -3), value.repeat_interleave(groups, -3)
    if query.dtype in _HALF and attn_mask is None:
        return aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, scale=scale)[0]
    bias = None
    if attn_mask is not None:
        bias = torch.zeros_like(attn_mask, dtype=query.dtype) if attn_mask.dtype == torch.bool else attn_mask
        bias = bias.expand(*query.shape[:-1], key.shape[-2])
    needs_grad = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (query, key, value))
    return aten._scaled_dot_product_efficient_attention(
        query, key, value, bias, needs_grad, dropout_p, is_causal, scale=scale
    )[0]
