"""Which optimizers give the unsharded result on flat shards, by name. ``docs/optimizers.md`` shows the table.

An optimizer whose update of an element reads that element alone may run on any 1-D piece. One that reads norms, rows,
blocks or other parameters may not: on a flat shard it would see pieces of one parameter, or several parameters as
one, and train on without a word. So only what is known to be element-wise passes.
"""

from __future__ import annotations

import torch

from fsdp_core.errors import NumericsError
from fsdp_core.numerics.optimizers.base import ShardedOptimizer

ELEMENT_WISE: frozenset[type[torch.optim.Optimizer]] = frozenset(
    {
        torch.optim.SGD,
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.Adamax,
        torch.optim.Adagrad,
        torch.optim.Adadelta,
        torch.optim.RMSprop,
        torch.optim.ASGD,
        torch.optim.Rprop,
    }
)
"""Of torch, in every implementation (loop, foreach, fused)."""

_NORMS = "uses the norm of each parameter"
_ROWS = "uses rows and columns of each parameter"
_MATRIX = "uses each parameter as a matrix"
_BLOCKS = "quantises its state in blocks, which a shard cuts elsewhere"
_MIXES = "mixes parameters: one number for all of them"

SHAPE_DEPENDENT: dict[str, tuple[str, str]] = {
    "Adafactor": (_ROWS, "fsdp_core.optimizers.Adafactor"),
    "AdafactorBigVision": (_ROWS, "fsdp_core.optimizers.Adafactor"),
    "Muon": (_MATRIX, "fsdp_core.optimizers.Muon"),
    "MuonWithAuxAdam": (_MATRIX, "fsdp_core.optimizers.Muon for matrices and torch.optim.AdamW for the rest"),
    "LAMB": (_NORMS, "fsdp_core.optimizers.LAMB"),
    "Lamb": (_NORMS, "fsdp_core.optimizers.LAMB"),
    "FusedLAMB": (_NORMS, "fsdp_core.optimizers.LAMB"),
    **dict.fromkeys(("LARS", "Lars", "LARC", "NovoGrad", "FusedNovoGrad", "AdamP", "SGDP"), (_NORMS, "")),
    **dict.fromkeys(("Shampoo", "SOAP", "PSGD", "Kron", "GaLoreAdamW", "CAME", "Adam_mini", "SM3"), (_MATRIX, "")),
    **dict.fromkeys(("AdamW8bit", "Adam8bit", "Lion8bit", "PagedAdamW8bit", "AdamW4bit", "AdamWFp8"), (_BLOCKS, "-")),
    **dict.fromkeys(("Prodigy", "DAdaptAdam", "DAdaptSGD", "DAdaptAdaGrad", "DAdaptLion"), (_MIXES, "-")),
}
"""Class name to (why, what to use instead; "" is whole-parameter mode, "-" is nothing)."""

_NEVER: dict[type[torch.optim.Optimizer], str] = {
    torch.optim.LBFGS: "takes all parameters as one vector and needs inner products over all of them",
    torch.optim.SparseAdam: "needs sparse gradients, and reduced gradients are dense",
}

_WHOLE = "WholeParameterOptimizer(params, lambda groups: {name}(groups, ...))"


def check_optimizer(
    optimizer: torch.optim.Optimizer | type[torch.optim.Optimizer], *, is_elementwise: bool = False
) -> None:
    """Refuse an optimizer that would not be exact on ``flat_parameters(model)``.

    Args:
        optimizer: an instance or a class.
        is_elementwise: the caller's word that a class this package does not know reads, for each element's update,
            that element alone. A class may say so itself with an attribute ``is_elementwise = True``.

    Raises:
        NumericsError: it is known to depend on shapes, or is not known at all. Names the class and the way out.
    """
    kind = optimizer if isinstance(optimizer, type) else type(optimizer)
    if issubclass(kind, ShardedOptimizer):
        return
    for never, reason in _NEVER.items():
        if issubclass(kind, never):
            raise _refusal(kind, reason, "an optimizer that works parameter by parameter")
    for ancestor in kind.__mro__:
        if ancestor.__name__ in SHAPE_DEPENDENT and ancestor is not torch.optim.Optimizer:
            reason, instead = SHAPE_DEPENDENT[ancestor.__name__]
            remedy = {"": _WHOLE.format(name=kind.__name__), "-": "an element-wise optimizer such as AdamW"}
            raise _refusal(kind, reason, remedy.get(instead, instead))
    if kind in ELEMENT_WISE or is_elementwise or getattr(kind, "is_elementwise", False) is True:
        return
    raise _refusal(
        kind,
        "is not known here, and may depend on norms or shapes",
        "check_optimizer(..., is_elementwise=True) or a class attribute is_elementwise = True if each element's "
        f"update reads that element alone; otherwise {_WHOLE.format(name=kind.__name__)}, or build it on "
        "model.parameters()",
    )


def refuse_mixing(optimizer: torch.optim.Optimizer) -> None:
    """Refuse, for whole-parameter mode, optimizers that read more than one parameter at a time."""
    kind = type(optimizer)
    for never, reason in _NEVER.items():
        if isinstance(optimizer, never):
            raise _refusal(kind, reason, "an optimizer that works parameter by parameter")
    reason = SHAPE_DEPENDENT.get(kind.__name__, ("", ""))[0]
    if reason == _MIXES:
        raise _refusal(kind, reason, "an optimizer that works parameter by parameter")


def _refusal(kind: type, reason: str, remedy: str) -> NumericsError:
    return NumericsError(
        f"{kind.__module__}.{kind.__name__} {reason}: on flat shards its result would not be the unsharded one",
        expected="an optimizer that is exact on flat shards (docs/optimizers.md)",
        got=kind.__name__,
        remedy=f"use {remedy}",
    )
