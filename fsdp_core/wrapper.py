"""The wrapper front end: a module around the user's, over the same code as ``fully_shard``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from fsdp_core.runtime.names import TransparentWrapper, join, walk


class ShardedWrapper(TransparentWrapper):
    """Forwards calls and attribute look-ups to ``module``; parameter names are those of ``module``."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)

    def __getitem__(self, key: Any) -> Any:
        return self.module[key]  # type: ignore[index]

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        yield from self._named("_parameters", prefix, recurse, remove_duplicate)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        yield from self._named("_buffers", prefix, recurse, remove_duplicate)

    def _named(self, table: str, prefix: str, recurse: bool, remove_duplicate: bool) -> Iterator[tuple[str, Any]]:
        """As torch does, under names that skip this level and the wrappers below it."""
        seen: set[int] = set()
        modules: set[nn.Module] = set()
        for name, module in walk(self, prefix) if recurse else [(prefix, self.module)]:
            if remove_duplicate and module in modules:
                continue
            modules.add(module)
            for key, value in getattr(module, table).items():
                if value is not None and not (remove_duplicate and id(value) in seen):
                    seen.add(id(value))
                    yield join(name, key), value
