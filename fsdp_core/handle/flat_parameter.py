"""The fast face that optimizers see: one flat parameter's shard as a plain 1-D parameter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from fsdp_core.comm.wire import Wire
from fsdp_core.errors import StateError
from fsdp_core.layout.flat_layout import LocalSpan, Segment


@dataclass(frozen=True)
class FlatSegment:
    """One original parameter inside a ``FlatParameter``."""

    segment: Segment  # name, shape and place in the whole flat parameter
    span: LocalSpan  # what this rank holds


class FlatParameter(nn.Parameter):
    """One unit's shard as a plain 1-D parameter: ``data`` is the shard's storage, ``grad`` the reduced gradient.

    ``segments`` says which elements belong to which original parameter (for weight-decay groups and the like).
    """

    segments: tuple[FlatSegment, ...]
    unit_name: str
    wire: Wire  # of the sharding group

    @property
    def base(self) -> FlatParameter:
        """The whole shard that this is, or (``FlatSlice``) is a run of elements of."""
        return self

    @property
    def shard_offset(self) -> int:
        """Where this begins in ``base``."""
        return 0

    def register_hook(self, hook: Callable[[Tensor], Any]) -> Any:
        raise StateError(
            "Hooks belong on the original parameters, not on a flat parameter.",
            unit=self.unit_name,
            remedy="register the hook on the parameters of model.named_parameters()",
        )

    register_post_accumulate_grad_hook = register_hook
