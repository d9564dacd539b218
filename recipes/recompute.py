"""Activation checkpointing and torch.compile of units, without renaming a parameter.

A checkpointed unit forgets what its forward computed and runs it again inside backward. The second run must go
through the module's ``__call__``, where the engine's hooks gather the unit's parameters again; wrapping only
``forward`` would find them freed. A wrapper module would rename every parameter, so the module's class is replaced
by a subclass of it whose ``__call__`` checkpoints.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def checkpoint_units(modules: Iterable[nn.Module]) -> None:
    """Recompute each module's activations in backward; random numbers (dropout) are the same both times."""
    for module in modules:
        module.__class__ = _checkpointed(type(module))


_VERSIONS_PER_MODULE = 4  # of one function that a block calls: training and evaluation, for several of its parts
_SUBCLASSES: dict[type[nn.Module], type[nn.Module]] = {}  # one for each class, so that equal units stay equal


def _checkpointed(cls: type[nn.Module]) -> type[nn.Module]:
    if cls not in _SUBCLASSES:
        _SUBCLASSES[cls] = _subclass(cls)
    return _SUBCLASSES[cls]


def _subclass(cls: type[nn.Module]) -> type[nn.Module]:
    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        plain = functools.partial(cls.__call__, self)
        if not torch.is_grad_enabled():
            return plain(*args, **kwargs)
        return checkpoint(
            plain,
            *args,
            use_reentrant=False,
            preserve_rng_state=True,
            context_fn=lambda: (nullcontext(), statistics_held(self)),
            **kwargs,
        )

    # The name stays, so that whatever prints or looks up class names sees the model's own.
    return type(cls.__name__, (cls,), {"__call__": call, "__module__": cls.__module__, "__doc__": cls.__doc__})


@contextmanager
def statistics_held(unit: nn.Module) -> Iterator[None]:
    """The second forward must not count its batch again in the running statistics of batch norms."""
    norms = [module for module in unit.modules() if isinstance(module, _BATCH_NORMS)]
    before = [(norm.momentum, norm.num_batches_tracked) for norm in norms]
    for norm in norms:
        norm.momentum, norm.num_batches_tracked = 0.0, None  # weight 0 for this batch, and no count
    try:
        yield
    finally:
        for norm, (momentum, num_batches_tracked) in zip(norms, before, strict=True):
            norm.momentum, norm.num_batches_tracked = momentum, num_batches_tracked


def compile_units(modules: Iterable[nn.Module]) -> None:
    """Compile each module's forward; the engine's hooks around it stay outside the compiled region.

    Blocks share their code, and torch counts the versions of one piece of code; there may be one for each block.
    The compiler looks whether a gathered weight has a gradient; torch warns whoever looks at one that is no leaf.
    """
    warnings.filterwarnings("ignore", r"The \.grad attribute of a Tensor that is not a leaf", UserWarning)
    modules = list(modules)
    limit = torch._dynamo.config.recompile_limit
    torch._dynamo.config.recompile_limit = max(limit, _VERSIONS_PER_MODULE * len(modules))
    for module in modules:
        module.forward = torch.compile(module.forward)
