"""A gradient scaler whose overflow decision is the same on all ranks (paper section 4.4)."""

from __future__ import annotations

import torch


class ShardedGradScaler(torch.amp.GradScaler):
    """Skeleton; the agreement across ranks follows within the first milestone."""
