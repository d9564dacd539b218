"""Optimizers on shards beside the same optimizer on a whole model: how far apart are the parameters afterwards?"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import fsdp_core
from fsdp_core.optimizers import LAMB, Adafactor, Muon, WholeParameterOptimizer
from paper_runs.answer import Answer, Table
from paper_runs.decoder import Block, Sizes, build
from paper_runs.ranks import Pool

STATEMENT = (
    "Section 7.2.1: sharding 'cannot ensure mathematical equivalence' for optimizers that need whole parameters, and "
    "exactness costs performance. Which optimizers are concerned, and by how much, was not said."
)
Make = Callable[[Iterable[Any]], torch.optim.Optimizer]


class PlainLAMB(torch.optim.Optimizer):
    """arXiv 1904.00962, parameter by parameter, for parameters that are not sharded."""

    def __init__(self, params: Any, lr: float, weight_decay: float = 0.01) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._update(p, p.grad, self.state[p], group["lr"], group["weight_decay"])

    @staticmethod
    def _update(p: Tensor, grad: Tensor, state: dict[str, Any], lr: float, weight_decay: float) -> None:
        t = state["t"] = state.get("t", 0) + 1
        if t == 1:
            state["mean"], state["square"] = torch.zeros_like(p), torch.zeros_like(p)
        state["mean"].lerp_(grad, 0.1)
        state["square"].mul_(0.999).addcmul_(grad, grad, value=0.001)
        denominator = (state["square"] / (1 - 0.999**t)).sqrt_().add_(1e-6)
        update = (state["mean"] / (1 - 0.9**t)).div_(denominator).add_(p, alpha=weight_decay)
        weight_norm, update_norm = float(p.norm()), float(update.norm())
        trust = weight_norm / update_norm if weight_norm and update_norm else 1.0
        p.add_(update, alpha=-lr * trust)


@dataclass(frozen=True)
class Case:
    """The optimizer of the sharded model, and the one of the whole model."""

    sharded: Make
    plain: Make


def _same(make: Make) -> Case:
    return Case(make, make)


CASES: dict[str, Case] = {
    "SGD, momentum": _same(lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.01)),
    "Adam": _same(lambda p: torch.optim.Adam(p, lr=1e-3)),
    "AdamW": _same(lambda p: torch.optim.AdamW(p, lr=1e-3, weight_decay=0.1)),
    "AdamW, fused": _same(lambda p: torch.optim.AdamW(p, lr=1e-3, weight_decay=0.1, fused=True)),
    "NAdam": _same(lambda p: torch.optim.NAdam(p, lr=1e-3)),
    "RAdam": _same(lambda p: torch.optim.RAdam(p, lr=1e-3)),
    "Adamax": _same(lambda p: torch.optim.Adamax(p, lr=1e-3)),
    "Adagrad": _same(lambda p: torch.optim.Adagrad(p, lr=1e-2)),
    "Adadelta": _same(lambda p: torch.optim.Adadelta(p, lr=1.0)),
    "RMSprop": _same(lambda p: torch.optim.RMSprop(p, lr=1e-3)),
    "ASGD": _same(lambda p: torch.optim.ASGD(p, lr=0.05)),
    "Rprop": _same(lambda p: torch.optim.Rprop(p, lr=1e-4)),
    "LAMB": Case(lambda p: LAMB(p, lr=1e-2, weight_decay=0.01), lambda p: PlainLAMB(p, lr=1e-2)),
    "Adafactor": Case(lambda p: Adafactor(p, lr=1e-2), lambda p: torch.optim.Adafactor(p, lr=1e-2)),
    "Muon (bfloat16 inside)": Case(lambda p: Muon(p, lr=1e-2), lambda p: torch.optim.Muon(p, lr=1e-2)),
    "torch's Adafactor, whole parameters": Case(
        lambda p: WholeParameterOptimizer(p, lambda groups: torch.optim.Adafactor(groups, lr=1e-2)),
        lambda p: torch.optim.Adafactor(p, lr=1e-2),
    ),
    "LAMB on pieces": _same(lambda p: PlainLAMB(p, lr=1e-2)),
    "torch's Adafactor on pieces": _same(lambda p: torch.optim.Adafactor(p, lr=1e-2)),
}
ON_PIECES = ("LAMB on pieces", "torch's Adafactor on pieces")


class Matrices(nn.Module):
    """For Muon, which takes matrices only: the decoder's blocks without norms. [B, S + 1] tokens to a loss."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.decoder = build(sizes)
        for module in self.decoder.modules():
            for name, child in module.named_children():
                if isinstance(child, nn.RMSNorm):
                    setattr(module, name, nn.RMSNorm(sizes.width, elementwise_affine=False))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.decoder(tokens)


class OnPieces:
    """A plain optimizer on each rank's piece of every unit, as if that were a parameter: what happens where nobody
    refuses it."""

    def __init__(self, make: Make, model: nn.Module) -> None:
        self._flats = list(fsdp_core.flat_parameters(model))
        self._pieces = [nn.Parameter(flat.detach()) for flat in self._flats]  # the same memory
        self._optimizer = make(self._pieces)

    def step(self) -> None:
        for piece, flat in zip(self._pieces, self._flats, strict=True):
            piece.grad = flat.grad
        self._optimizer.step()

    def zero_grad(self) -> None:
        for flat in self._flats:
            flat.grad = None


def difference(rank: int, name: str, factor: int, sizes: Sizes, dtype: torch.dtype, steps: int) -> float:
    """The largest difference of a parameter after ``steps``, over the largest change of a parameter."""
    world, case = torch.distributed.get_world_size(), CASES[name]
    torch.manual_seed(0)
    model = (Matrices(sizes) if name.startswith("Muon") else build(sizes)).to(dtype)
    plain, begun = copy.deepcopy(model), {n: p.detach().clone() for n, p in model.named_parameters()}
    sharded = fsdp_core.fully_shard(model, units=[Block], sharding_factor=factor)
    if name in ON_PIECES:
        optimizer: Any = OnPieces(case.sharded, sharded)
    else:
        optimizer = case.sharded(fsdp_core.flat_parameters(sharded))
    reference = case.plain(plain.parameters())
    generator = torch.Generator().manual_seed(7)
    for _ in range(steps):
        shape = (world, sizes.batch, sizes.seq_len + 1)
        batches = torch.randint(sizes.vocab, shape, generator=generator)
        (sum(plain(batch) for batch in batches) / world).backward()
        sharded(batches[rank]).backward()
        for one in (reference, optimizer):
            one.step()
            one.zero_grad()
    state = fsdp_core.state_dict(sharded)
    parameters = {n: p.detach() for n, p in plain.named_parameters()}
    apart = max(float((state[n] - p).abs().max()) for n, p in parameters.items())
    return apart / max(float((p - begun[n]).abs().max()) for n, p in parameters.items())


def run(pool: Pool, small: bool) -> Answer:
    sizes = Sizes(layers=1 if small else 2, width=32, vocab=64, batch=2, seq_len=16)
    steps, factors = (3, (2,)) if small else (10, (2, 4))
    world = 2 if small else 4
    names = ("AdamW", "LAMB", "Adafactor", "Muon (bfloat16 inside)", *ON_PIECES) if small else tuple(CASES)
    ranks, found = pool(world), {}
    for name in names:
        for dtype in (torch.float64, torch.float32):
            for factor in factors:
                label = f"{str(dtype).removeprefix('torch.')}, F = {factor}"
                found.setdefault(name, {})[label] = max(ranks.run(difference, name, factor, sizes, dtype, steps))
    labels = list(next(iter(found.values())))
    rows = [(name, *(f"{one[label]:.1e}" for label in labels)) for name, one in found.items()]
    return Answer(
        STATEMENT,
        f"{world} ranks, {steps} steps, {sizes}, the mean gradient of {world} batches on both sides. Given is the "
        "largest difference of any element, over the largest change of any element. 'On pieces': the plain optimizer "
        "on each rank's piece of a unit, which the engine refuses.",
        [Table("Sharded beside whole", ("optimizer", *labels), rows)],
        {"difference": found},
    )
