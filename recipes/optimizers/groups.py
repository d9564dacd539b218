"""From a sharded model to an optimizer: one parameter group of flat shards, and weight decay by name.

A flat shard holds elements of many parameters, and where one ends depends on F and on the rank. Were decayed
and undecayed elements put into separate optimizer parameters, the groups would differ from rank to rank. So the
optimizer gets whole flat shards with no decay of its own, and decay is one multi-tensor operation over the spans
of the parameters that decay, just before the update: exact, for every element-wise optimizer, at any F.
Optimizers that are not element-wise (LAMB, Adafactor) measure whole parameters over the sharding group; they get
groups cut at parameters, and decay by themselves.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import fsdp_core
from fsdp_core.handle.flat_parameter import FlatParameter
from fsdp_core.optimizers import GroupRule, check_optimizer, parameter_groups
from recipes.registry import OPTIMIZERS
from recipes.schema.training import OptimizerConfig


def build_optimizer(config: OptimizerConfig, model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of ``config.kind`` over ``fsdp_core.flat_parameters(model)``, with exact decay by name.

    Raises fsdp_core's NumericsError, by name, for an optimizer that would not be exact on shards.
    """
    entry = OPTIMIZERS[config.kind]
    flats = fsdp_core.flat_parameters(model)
    if entry.offers("decays_by_group"):  # decay is part of what the update measures (LAMB's trust ratio)
        groups = parameter_groups(flats, [undecayed(config.no_decay)], {"weight_decay": config.weight_decay})
        optimizer: torch.optim.Optimizer = entry.load("build")(config, groups)
        check_optimizer(optimizer)
        return optimizer
    optimizer = entry.load("build")(config, [{"params": flats, "weight_decay": 0.0}])
    check_optimizer(optimizer)
    if config.weight_decay > 0:
        kind = entry.load("weight_decay_kind")() if entry.offers("weight_decay_kind") else "decoupled"
        attach_decay(optimizer, decayed_spans(flats, config.no_decay), config.weight_decay, kind)
    return optimizer


def undecayed(no_decay: Sequence[str]) -> GroupRule:
    return GroupRule(lambda fqn, shape: not is_decayed(fqn, no_decay), {"weight_decay": 0.0})


def is_decayed(fqn: str, no_decay: Iterable[str]) -> bool:
    """False for a parameter whose name contains one of ``no_decay``."""
    return not any(part in fqn for part in no_decay)


@dataclass(frozen=True)
class Span:
    """Elements ``[start, stop)`` of this rank's flat shard ``flat`` [shard_numel]."""

    flat: FlatParameter
    start: int
    stop: int


def decayed_spans(flats: Sequence[FlatParameter], no_decay: Sequence[str]) -> list[Span]:
    """Where decayed parameters lie in this rank's shards; neighbours are joined. Differs from rank to rank."""
    spans: list[Span] = []
    for flat in flats:
        for part in flat.segments:
            start, stop = part.span.shard_start, part.span.shard_end
            if start == stop or not is_decayed(part.segment.fqn, no_decay):
                continue
            if spans and spans[-1].flat is flat and spans[-1].stop == start:
                spans[-1] = Span(flat, spans[-1].start, stop)
            else:
                spans.append(Span(flat, start, stop))
    return spans


def attach_decay(optimizer: torch.optim.Optimizer, spans: Sequence[Span], weight_decay: float, kind: str) -> None:
    """Decay before every step: ``decoupled`` p *= 1 - lr*wd (AdamW), or ``l2`` grad += wd*p (SGD)."""
    if not spans:
        return
    if kind not in ("decoupled", "l2"):
        raise ValueError(f"weight_decay_kind must give 'decoupled' or 'l2', got {kind!r}")
    views = [(span, span.flat.detach()[span.start : span.stop]) for span in spans]  # the shards' storage is for life
    decay = _decoupled if kind == "decoupled" else _l2

    @torch.no_grad()
    def before_step(stepping: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        used = [(span, values) for span, values in views if span.flat.grad is not None]  # torch skips the others too
        if used:
            decay(stepping, used, weight_decay)

    optimizer.register_step_pre_hook(before_step)


def _decoupled(optimizer: torch.optim.Optimizer, used: list[tuple[Span, Tensor]], weight_decay: float) -> None:
    rate = optimizer.param_groups[0]["lr"] * weight_decay
    # Set by torch's scaler around the step of a fused optimizer, which then skips by itself after an overflow.
    found_inf: Tensor | None = getattr(optimizer, "found_inf", None)
    torch._foreach_mul_([values for _, values in used], 1.0 - (rate if found_inf is None else rate * (1.0 - found_inf)))


def _l2(optimizer: torch.optim.Optimizer, used: list[tuple[Span, Tensor]], weight_decay: float) -> None:
    grads = [span.flat.grad[span.start : span.stop] for span, _ in used if span.flat.grad is not None]
    torch._foreach_add_(grads, [values for _, values in used], alpha=weight_decay)
