"""Random module trees: a description that travels to the ranks, and the modules it stands for.

Every module maps [batch, width] to [batch, width], so that any tree fits together. What varies is what an engine
could stumble over: shapes (0-dim, empty, transposed, odd sizes), dtypes, ties, freezing, sharing, recomputation,
parameters without use, parameters used on some ranks only, outputs that are no tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

LEAVES = ("mlp", "gain", "norm", "transposed", "odd", "unused", "partial", "tied", "lookup", "gru", "boxed")
PARENTS = ("sequence", "residual", "twice", "sum", "checkpoint", "frozen")


@dataclass(frozen=True)
class Node:
    """kind: of LEAVES or PARENTS. size: a width, or which tied weight. option: means what the kind makes of it."""

    kind: str
    size: int = 1
    option: bool = False
    is_unit: bool = False
    children: tuple[Node, ...] = ()


@dataclass(frozen=True)
class Tree:
    """The whole model: a projection in, the nodes in sequence, a projection out. dtype: of most parameters."""

    width: int
    nodes: tuple[Node, ...]
    dtype: torch.dtype = torch.float64

    def kinds(self) -> set[str]:
        found, left = set(), list(self.nodes)
        while left:
            node = left.pop()
            found.add(node.kind)
            left.extend(node.children)
        return found


class Whose:
    """Which rank's batch is being computed: plain references compute every rank's."""

    rank = 0


class Mlp(nn.Module):
    def __init__(self, width: int, hidden: int, bias: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden, bias=bias), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


class Gain(nn.Module):
    """Parameters of shapes [width], [] and [0, 3]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.rand(width) + 0.5), nn.Parameter(torch.tensor(0.1))
        self.empty = nn.Parameter(torch.empty(0, 3))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale + self.shift + self.empty.sum()


class Transposed(nn.Module):
    """A weight whose memory order is not its index order; the forward depends on its stride."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(hidden, width).div(width).t())

    def forward(self, x: Tensor) -> Tensor:
        assert self.weight.stride() == (1, self.weight.shape[0]) or 1 in self.weight.shape
        return x + torch.tanh(x @ self.weight) @ self.weight.t()


class Odd(nn.Module):
    """A parameter of another dtype than its neighbours, and an integer one."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(width, 1, dtype=torch.float32) + 0.5)
        self.order = nn.Parameter(torch.arange(width).flip(0), requires_grad=False)
        self.keeps_dtype = True

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.scale.to(x.dtype).squeeze(1))[:, self.order]


class Unused(nn.Module):
    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.never, self.offset = nn.Parameter(torch.randn(size)), nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.offset


class Partial(nn.Module):
    """Ranks of odd and even numbers use different parameters."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.even, self.odd = nn.Linear(width, width), nn.Parameter(torch.rand(width))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.even(x)) if Whose.rank % 2 == 0 else x * self.odd


class Tied(nn.Module):
    """Shares its weight with every other one of the same number in the tree."""

    def __init__(self, weight: nn.Parameter, transposes: bool) -> None:
        super().__init__()
        self.weight, self.bias = weight, nn.Parameter(torch.zeros(weight.shape[0]))
        self.transposes = transposes

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(F.linear(x, self.weight.t() if self.transposes else self.weight, self.bias))


class Lookup(nn.Module):
    def __init__(self, width: int, rows: int) -> None:
        super().__init__()
        self.table = nn.Embedding(rows, width, padding_idx=0)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table(torch.arange(x.shape[0], device=x.device) % self.table.num_embeddings)


class Recurrent(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.cell = nn.GRU(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.cell(x.unsqueeze(0))[0].squeeze(0)


class Box(nn.Module):
    """Returns no tensor, but a dict of some, a number and None."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)

    def forward(self, x: Tensor) -> dict[str, Any]:
        y = self.inner(x)
        return {"y": y, "more": (y.abs(), None), "count": 3}


class Boxed(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.box = Box(width)

    def forward(self, x: Tensor) -> Tensor:
        found = self.box(x=x)
        return found["y"] + found["more"][0] * found["count"]


class Sequence(nn.Module):
    def __init__(self, children: list[nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(children)

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = part(x)
        return x


class Residual(Sequence):
    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


class Twice(Sequence):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(torch.tanh(super().forward(x)))


class Sum(Sequence):
    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([part(x) for part in self.parts]).sum(0)


class Checkpointed(Sequence):
    def __init__(self, children: list[nn.Module], use_reentrant: bool) -> None:
        super().__init__(children)
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=self.use_reentrant)


class Model(nn.Module):
    """[batch, 3] to [batch, 2]."""

    def __init__(self, tree: Tree) -> None:
        super().__init__()
        self.chosen: list[nn.Module] = []
        self.weights = [nn.Parameter(torch.randn(tree.width, tree.width)) for _ in range(2)]
        self.first = nn.Linear(3, tree.width)
        self.parts = nn.ModuleList(self._build(node, tree.width) for node in tree.nodes)
        self.last = nn.Linear(tree.width, 2)
        for module in self.modules():
            if not isinstance(module, Odd):
                for parameter in module._parameters.values():
                    if parameter is not None:
                        parameter.data = parameter.data.to(tree.dtype)

    def _build(self, node: Node, width: int) -> nn.Module:
        children = [self._build(child, width) for child in node.children]
        makers: dict[str, Callable[[], nn.Module]] = {
            "mlp": lambda: Mlp(width, node.size, node.option),
            "gain": lambda: Gain(width),
            "norm": lambda: nn.LayerNorm(width, elementwise_affine=node.option),
            "transposed": lambda: Transposed(width, node.size),
            "odd": lambda: Odd(width),
            "unused": lambda: Unused(width, node.size),
            "partial": lambda: Partial(width),
            "tied": lambda: Tied(self.weights[node.size % 2], node.option),
            "lookup": lambda: Lookup(width, node.size),
            "gru": lambda: Recurrent(width),
            "boxed": lambda: Boxed(width),
            "sequence": lambda: Sequence(children),
            "residual": lambda: Residual(children),
            "twice": lambda: Twice(children),
            "sum": lambda: Sum(children),
            "checkpoint": lambda: Checkpointed(children, node.option),
            "frozen": lambda: Sequence(children).requires_grad_(False),
        }
        module = makers[node.kind]()
        if node.is_unit:
            self.chosen.append(module.box if isinstance(module, Boxed) else module)
        return module

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for part in self.parts:
            x = torch.tanh(part(x))
        return self.last(x)


def build(tree: Tree) -> Model:
    """The same weights every time."""
    torch.manual_seed(1)
    return Model(tree)
