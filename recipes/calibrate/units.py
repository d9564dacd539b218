"""The model's own units, forward and backward, timed alone on the device; and the compute efficiency that makes a
simulation of the same kernels take as long.

The units' inputs are those of a real forward, caught on tensors without memory; values mean nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from fsdp_core.simulate import tape as t
from fsdp_core.simulate.recording import Recorder
from recipes.build import unit_modules
from recipes.calibrate.stopwatch import Stopwatch
from recipes.data.records import DataInfo
from recipes.models.dhen.exchange import PaperWorld, stand_in
from recipes.plan.samples import sample_batch
from recipes.registry import MODELS
from recipes.schema import RecipeConfig
from recipes.schema.derived import micro_batch
from recipes.tasks import task_for

MOST_KINDS = 3  # of units that are timed, the most frequent first
LEAST_EFFICIENCY = 1e-4

KernelTime = Callable[[t.Kernel, float], float]  # (kernel, compute efficiency) -> seconds


@dataclass(frozen=True)
class UnitKind:
    """Units of one class and size. count: how many the model has. module: one of them, on the meta device.
    inputs: (args, kwargs) of its forward, likewise. kernels: of its forward and backward."""

    name: str
    count: int
    module: nn.Module
    inputs: tuple[Any, Any]
    kernels: tuple[t.Kernel, ...]


def kinds_of(config: RecipeConfig, info: DataInfo, world_size: int) -> list[UnitKind]:
    """The most frequent kinds of units, in the dtype that computes. Empty for a model that names none."""
    entry = MODELS[config.model.kind]
    recorder = Recorder()
    nobody = PaperWorld(0, 1, lambda received, sent: None)
    with recorder, stand_in(nobody):
        with torch.device("meta"):
            model = entry.load("build")(config.model, info).train()
        units = unit_modules(entry, model)
        numbers = Counter(_key(unit) for unit in units)
        first = {_key(unit): unit for unit in reversed(units)}
        caught = _caught(list(first.values()), model, config, info, world_size)
        dtype = getattr(torch, config.precision.param_dtype)
        return [
            _recorded(recorder, key[0], number, first[key], caught[first[key]], dtype)
            for key, number in numbers.most_common(MOST_KINDS)
            if first[key] in caught
        ]


def unit_s(kind: UnitKind, watch: Stopwatch) -> float:
    """Seconds of one forward and backward on the device. Gives the module memory. Collective."""
    device = watch.ranks.device
    module = kind.module.to_empty(device=device)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(std=0.02)
        for buffer in module.buffers():
            buffer.zero_()
    args, kwargs = tree_map(lambda value: _real(value, device), kind.inputs)

    def work() -> None:
        _forward_backward(module, args, kwargs)
        for parameter in module.parameters():
            parameter.grad = None

    return watch.seconds(work)


def efficiency_of(kinds: Sequence[UnitKind], measured_s: Sequence[float], kernel_s: KernelTime) -> float:
    """The compute efficiency (at most 1) at which the simulated kernels of all kinds take as long as measured."""
    wanted = sum(kind.count * seconds for kind, seconds in zip(kinds, measured_s, strict=True))

    def simulated(efficiency: float) -> float:
        return sum(kind.count * kernel_s(kernel, efficiency) for kind in kinds for kernel in kind.kernels)

    low, high = LEAST_EFFICIENCY, 1.0
    if simulated(high) >= wanted:
        return high
    for _ in range(60):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if simulated(middle) > wanted else (low, middle)
    return high


def input_bytes(kind: UnitKind) -> int:
    """Of the largest tensor that comes in."""
    return max((leaf.nbytes for leaf in tree_leaves(kind.inputs) if isinstance(leaf, Tensor)), default=0)


def _key(unit: nn.Module) -> tuple[str, int]:
    return type(unit).__name__, sum(parameter.numel() for parameter in unit.parameters())


def _caught(
    units: Sequence[nn.Module], model: nn.Module, config: RecipeConfig, info: DataInfo, world_size: int
) -> dict[nn.Module, tuple[Any, Any]]:
    """Inputs of each unit's first forward in the model's."""
    caught: dict[nn.Module, tuple[Any, Any]] = {}
    hooks = [
        unit.register_forward_pre_hook(
            lambda module, args, kwargs: caught.setdefault(module, (args, kwargs)) and None, with_kwargs=True
        )
        for unit in units
    ]
    batch = sample_batch(info, micro_batch(config.train, world_size))
    task_for(MODELS[config.model.kind].task, info).logits(model, {name: x.to("meta") for name, x in batch.items()})
    for hook in hooks:
        hook.remove()
    return caught


def _recorded(
    recorder: Recorder, name: str, count: int, module: nn.Module, inputs: tuple[Any, Any], dtype: torch.dtype
) -> UnitKind:
    module = module.to(dtype)
    args, kwargs = tree_map(lambda value: _leaf(value, dtype), inputs)
    recorder.begin_tape()
    _forward_backward(module, args, kwargs)
    tape = recorder.end_tape()
    kernels = tuple(entry for entry in tape.entries if isinstance(entry, t.Kernel))
    for parameter in module.parameters():
        parameter.grad = None
    return UnitKind(name, count, module, (args, kwargs), kernels)


def _forward_backward(module: nn.Module, args: Any, kwargs: Any) -> None:
    outputs = [leaf for leaf in tree_leaves(module(*args, **kwargs)) if isinstance(leaf, Tensor) and leaf.requires_grad]
    torch.autograd.backward(outputs, [torch.ones_like(output) for output in outputs])
    for leaf in tree_leaves((args, kwargs)):
        if isinstance(leaf, Tensor):
            leaf.grad = None


def _leaf(value: Any, dtype: torch.dtype) -> Any:
    """Detached from the model's graph; floating-point tensors in the dtype that computes, as the engine casts them."""
    if not isinstance(value, Tensor):
        return value
    needs_grad = value.requires_grad
    leaf = value.detach()
    if leaf.is_floating_point():
        leaf = leaf.to(dtype)
    return leaf.requires_grad_(needs_grad)


def _real(value: Any, device: torch.device) -> Any:
    if not isinstance(value, Tensor):
        return value
    if not value.is_floating_point():
        return torch.ones(value.shape, dtype=value.dtype, device=device)
    made = (
        torch.randn(value.shape, device=device).to(value.dtype)
        if value.requires_grad
        else torch.zeros(value.shape, dtype=value.dtype, device=device)
    )
    return made.requires_grad_(value.requires_grad)
