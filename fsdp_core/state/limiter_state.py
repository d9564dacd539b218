"""What the adaptive rate limit has learnt, so that a run that goes on need not meet its retries again."""

from __future__ import annotations

from torch import nn

from fsdp_core.runtime.find import contexts_in


def limiter_state(model: nn.Module) -> list[dict[str, int]]:
    """One record per root with an adaptive limit, as plain numbers; the same on all ranks. Empty without one."""
    return [
        context.limit_agreement.adaptive.state_dict()
        for context in contexts_in(model)
        if context.limit_agreement is not None
    ]


def load_limiter_state(model: nn.Module, state: list[dict[str, int]]) -> None:
    """Continue from ``limiter_state``'s records, within the ceiling of this model's limit. A model with other roots,
    or without an adaptive limit, keeps what it has."""
    agreements = [context.limit_agreement for context in contexts_in(model) if context.limit_agreement is not None]
    if len(agreements) == len(state):
        for agreement, record in zip(agreements, state, strict=True):
            agreement.load(record)
