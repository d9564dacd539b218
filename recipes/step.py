"""One training step, for every recipe. Read it downward.

Shapes: b = train.micro_batch samples of this rank; a step is ``num_micro_batches`` of them on each of W ranks.
Gradients: every micro-batch adds d(sum of losses)/(targets of the whole step), the engine *sums* over ranks
(divide factor 1), so what the optimizer sees is the gradient of the mean over all targets of the global
batch, however it was cut into ranks and micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import fsdp_core
from recipes.data.records import Batch
from recipes.metrics.clock import StepClock
from recipes.metrics.ledger import StepOutcome
from recipes.ranks import Ranks
from recipes.tasks import Task


@dataclass(frozen=True)
class Trainee:
    """Everything a step works on; made once by ``recipes.build``.

    optimizer: over the engine's flat shards; its learning rate follows the schedule.
    extra_optimizers: for parameters outside the engine (DHEN's tables), at their own constant rates.
    scaler: passes everything through unless precision.grad_scaler is on.
    clip_norm: largest global norm of the engine's gradients; inf only measures it.
    accumulate_with_communication: reduce in every micro-batch, not only in the last.
    """

    model: nn.Module
    task: Task
    optimizer: torch.optim.Optimizer
    extra_optimizers: tuple[torch.optim.Optimizer, ...]
    scaler: fsdp_core.ShardedGradScaler
    ranks: Ranks
    clip_norm: float
    accumulate_with_communication: bool

    @property
    def optimizers(self) -> tuple[torch.optim.Optimizer, ...]:
        return (self.optimizer, *self.extra_optimizers)


Veto = Callable[[Tensor, Tensor, Tensor], bool]  # (loss_sum, num_targets, grad_norm) -> leave the update out


def train_step(
    trainee: Trainee,
    micro_batches: Sequence[Batch],
    lr: float,
    clock: StepClock,
    wishes: Sequence[float] = (),
    veto: Veto | None = None,
) -> StepOutcome:
    """micro_batches: this rank's part of the global batch, on the host, each tensor [b, ...].

    wishes: this rank's, summed over ranks beside the count of targets (``recipes.boundary``).
    veto: asked before the optimizer, must answer alike on all ranks; None: no update is ever left out.
    """
    model, task, scaler, ranks = trainee.model, trainee.task, trainee.scaler, trainee.ranks
    device = ranks.device
    own_targets = sum(task.count_targets(batch) for batch in micro_batches)
    pending_sums = ranks.start_sum(filled((own_targets, *wishes), device))
    loss_sum = torch.zeros((), device=device)
    num_targets: Tensor | None = None
    clock.mark("data")

    for position, batch in enumerate(on_device(micro_batches, device)):
        with communication(trainee, is_last=position == len(micro_batches) - 1):
            micro_loss = task.loss_sum(task.logits(model, batch), batch["labels"])  # 0-dim, fp32, a sum
            num_targets = pending_sums.wait()[0]  # of all ranks and micro-batches
            clock.mark("forward")
            scaler.scale(micro_loss / num_targets.float().clamp(min=1)).backward()  # a step may count no target
            clock.mark("backward")
        loss_sum += micro_loss.detach()
    assert num_targets is not None

    loss_scale = scaler.scale(torch.ones((), device=device)) if scaler.is_enabled() else None
    for optimizer in trainee.optimizers:
        scaler.unscale_(optimizer)  # and agree over all ranks on whether a gradient overflowed
    ranks.flight.event("norm")
    grad_norm = fsdp_core.clip_grad_norm_(model, trainee.clip_norm)
    ranks.flight.event("optimizer")
    for group in trainee.optimizer.param_groups:
        group["lr"] = lr
    skipped = None if veto is None else veto(loss_sum, num_targets, grad_norm)
    for optimizer in trainee.optimizers:
        if not skipped:
            scaler.step(optimizer)  # on shards; left out everywhere after an overflow
        optimizer.zero_grad()
    scaler.update()
    clock.mark("optimizer")
    return StepOutcome(loss_sum, num_targets, grad_norm, loss_scale, pending_sums.wait()[1:], skipped)


def filled(values: Sequence[float], device: torch.device) -> Tensor:
    """float64 [n]. On a GPU filled there, not copied: a copy from the host would make it wait for the device."""
    if device.type == "cpu":
        return torch.tensor(values, dtype=torch.float64)
    tensor = torch.empty(len(values), dtype=torch.float64, device=device)
    for position, value in enumerate(values):
        tensor[position].fill_(value)
    return tensor


def communication(trainee: Trainee, is_last: bool) -> AbstractContextManager:
    """Gradients travel in the last micro-batch only, or in every one; until then they add up on each rank."""
    if is_last or trainee.accumulate_with_communication:
        return nullcontext()
    return fsdp_core.no_sync(trainee.model)


def on_device(batches: Sequence[Batch], device: torch.device) -> Iterator[Batch]:
    """One batch at a time; on CUDA the loader has pinned the memory, so the host does not wait for the copy."""
    for batch in batches:
        yield {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}
