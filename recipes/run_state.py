"""The parts of a run that are equal on all ranks and go into a checkpoint beside model and optimizers, by name."""

from __future__ import annotations

from typing import Any, Protocol

from torch import nn

import fsdp_core


class Part(Protocol):
    """Its state is plain JSON, equal on all ranks."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state: Any) -> None: ...


class LimiterPart:
    """What the adaptive rate limit has learnt."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def state_dict(self) -> list[dict[str, int]]:
        return fsdp_core.limiter_state(self._model)

    def load_state_dict(self, state: list[dict[str, int]]) -> None:
        fsdp_core.load_limiter_state(self._model, state)


class ScalerPart:
    """The loss scale and its growth; nothing where the scaler is off, now or then."""

    def __init__(self, scaler: fsdp_core.ShardedGradScaler) -> None:
        self._scaler = scaler

    def state_dict(self) -> dict[str, float] | None:
        return self._scaler.state_dict() if self._scaler.is_enabled() else None

    def load_state_dict(self, state: dict[str, float]) -> None:
        if self._scaler.is_enabled():
            self._scaler.load_state_dict(state)
