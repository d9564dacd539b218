"""Names as the model's author knows them: the wrapper front end adds a level to the module tree that names skip."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn


class TransparentWrapper(nn.Module):
    """A module whose one child, ``module``, takes its place in names."""

    module: nn.Module


def join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def unwrapped(module: nn.Module) -> nn.Module:
    """The module inside any number of wrappers."""
    while isinstance(module, TransparentWrapper):
        module = module.module
    return module


def walk(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """(name, module) for the whole tree in registration order; a module under two names comes once per name.

    A wrapper and the module inside it share a name; both are listed, the wrapper first.
    """
    yield prefix, module
    for name, child in module._modules.items():
        if child is not None:
            is_transparent = isinstance(module, TransparentWrapper) and name == "module"
            yield from walk(child, prefix if is_transparent else join(prefix, name))


def unit_title(fqn: str) -> str:
    """How messages name a unit."""
    return fqn or "<root>"
