"""What checkpoint tests save and load: small sharded models under every optimizer, and what ranks do with them."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsdp_core
from fsdp_core.optimizers import LAMB, Adafactor, GroupRule, Muon, WholeParameterOptimizer, no_decay, parameter_groups
from recipes.checkpoint.checkpointer import Checkpointer, TrainState
from recipes.checkpoint.disk import Disk
from recipes.models.dhen import RowwiseAdagrad
from recipes.models.dhen.tables import EmbeddingTables
from recipes.ranks import Ranks
from recipes.schema.training import CheckpointConfig
from recipes.step import Trainee
from tests.fsdp_core.optimizers.test_on_shards import Block, Matrices, Net
from tests.fsdp_core.optimizers.test_state import Momentum
from tests.support.parity import mean_square
from tests.support.ranks import Rank

CONFIG = {"model": {"kind": "test"}, "list": [1, None, 2.5]}


class Mixed(nn.Module):
    """Tables beside dense units, a tied weight, buffers, bfloat16, an empty and a 0-dim parameter, an extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = EmbeddingTables((10, 3, 17, 1), 3, torch.float32, seed=4)
        self.first = nn.Linear(12, 6)
        self.second = nn.Linear(6, 6, bias=False)
        self.tied = nn.Linear(6, 6)
        self.tied.weight = self.second.weight
        self.low = nn.Parameter(torch.randn(5, 6).bfloat16())
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.norm = nn.BatchNorm1d(6)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        ids = (x[:, :1].abs() * 1000).long() % torch.tensor([[10, 3, 17, 1]])
        y = self.norm(self.tied(self.second(torch.tanh(self.first(self.tables(ids).flatten(1))))))
        return (y @ self.low.float().t()) * self.scale + self.empty.sum()

    def get_extra_state(self) -> dict[str, Any]:
        return {"calls": self.calls}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.calls = state["calls"]


def groups(model: nn.Module) -> list[dict[str, Any]]:
    rules = [no_decay(), GroupRule(lambda fqn, shape: ".up." in fqn, {"lr": 0.02})]
    return parameter_groups(fsdp_core.flat_parameters(model), rules, {"weight_decay": 0.1})


def flat(model: nn.Module) -> list[Any]:
    return list(fsdp_core.flat_parameters(model))


@dataclass(frozen=True)
class Kind:
    """model: built the same on every rank. make: its optimizer. units: of the first and the second way to cut it."""

    model: Callable[[], nn.Module]
    make: Callable[[nn.Module], torch.optim.Optimizer]
    units: tuple[Any, Any] = ([Block, nn.Linear], None)


KINDS: dict[str, Kind] = {
    "adamw": Kind(Net, lambda m: torch.optim.AdamW(flat(m), lr=0.01, fused=True)),
    "adamw_named": Kind(Net, lambda m: torch.optim.AdamW(m.parameters(), lr=0.01, foreach=True)),
    "nadam_groups": Kind(Net, lambda m: torch.optim.NAdam(groups(m), lr=0.01, foreach=True)),
    "sgd": Kind(Net, lambda m: torch.optim.SGD(flat(m), lr=0.01)),
    "lamb": Kind(Net, lambda m: LAMB(groups(m), lr=0.01)),
    "adafactor": Kind(Net, lambda m: Adafactor(flat(m), lr=0.01)),
    "muon": Kind(Matrices, lambda m: Muon(flat(m), lr=0.01)),
    "whole": Kind(Net, lambda m: WholeParameterOptimizer(flat(m), Momentum)),
    "mixed": Kind(Mixed, lambda m: torch.optim.AdamW(flat(m), lr=0.01, fused=True), ([nn.Linear], 40)),
}


def ranks_of(rank: Rank | None) -> Ranks:
    return Ranks(0, 1, torch.device("cpu")) if rank is None else Ranks(rank.rank, rank.world_size, torch.device("cpu"))


def trainee(rank: Rank | None, kind: str, factor: int, way: int = 0, raf: bool = True) -> Trainee:
    """way: 0 or 1, which units."""
    torch.manual_seed(4)
    one, model = KINDS[kind], KINDS[kind].model()
    tables = [module for module in model.modules() if isinstance(module, EmbeddingTables)]
    fsdp_core.fully_shard(
        model, units=one.units[way], sharding_factor=factor, reshard_after_forward=raf, ignored_modules=tables
    )
    extra = tuple(RowwiseAdagrad([table.weight], lr=0.1) for table in tables)
    scaler = fsdp_core.ShardedGradScaler(model, "cpu", enabled=False)
    return Trainee(model, None, one.make(model), extra, scaler, ranks_of(rank), math.inf, False)  # type: ignore[arg-type]


def train(rank: Rank | None, work: Trainee, first: int, steps: int) -> None:
    """The same global batch whatever the number of ranks (of 12: what 1, 2, 3 and 4 divide)."""
    ranks = work.ranks
    width = next(p.shape[1] for name, p in work.model.named_parameters() if name in ("first.weight", "a.weight"))
    for step in range(first, first + steps):
        batch = torch.randn(12, width, generator=torch.Generator().manual_seed(step))
        mean_square(work.model, batch.tensor_split(ranks.world_size)[ranks.rank]).backward()
        for optimizer in work.optimizers:
            optimizer.step()
            optimizer.zero_grad()


def checkpointer(
    root: Path,
    work: Trainee,
    attempt: int = 0,
    disk: Disk | None = None,
    say: Callable[[str], None] = lambda line: None,
    **options: Any,
) -> Checkpointer:
    config = CheckpointConfig(**options)
    return Checkpointer(root, work, work.ranks, config, attempt, CONFIG, disk=disk, say=say)


def run_state(rank: Rank | None, step: int) -> TrainState:
    number = 0 if rank is None else rank.rank
    per_rank = {"generator": torch.arange(number, number + 5, dtype=torch.uint8), "name": f"rank {number}"}
    return TrainState(step, {"seen": 12 * step, "losses": [1.5, None]}, per_rank)


def everything(work: Trainee) -> dict[str, Any]:
    """Whole tensors under original names, the same on every rank; tables by name from every rank's rows."""
    own = [parameter for module in _tables(work.model) for parameter in module.parameters()]
    whole = {name: value for name, value in fsdp_core.state_dict(work.model).items() if not _is_table(name)}
    whole = copy.deepcopy(whole)
    result: dict[str, Any] = {"model": whole, "tables": {}}
    result["optimizer"] = fsdp_core.optim_state_dict(work.model, work.optimizer)
    for module, parameter in zip(_tables(work.model), own, strict=True):
        (adagrad,) = work.extra_optimizers
        per_row = module.shards_like(adagrad.accumulator(parameter))  # type: ignore[attr-defined]
        for shard, sums in zip(module.shards(), per_row, strict=True):
            rows = [(shard.start, shard.values.clone(), sums.values.clone())]
            if work.ranks.world_size > 1:
                gathered: list[Any] = [None] * work.ranks.world_size
                dist.all_gather_object(gathered, rows[0])
                rows = sorted(gathered, key=lambda one: one[0])
            result["tables"][shard.name] = [torch.cat([row[i] for row in rows]) for i in (1, 2)]
    return result


def _tables(model: nn.Module) -> list[EmbeddingTables]:
    return [module for module in model.modules() if isinstance(module, EmbeddingTables)]


def _is_table(name: str) -> bool:
    return name == "tables.weight"


def differences(got: Any, expected: Any, where: str = "") -> list[str]:
    """Where two trees are not equal to the bit."""
    if isinstance(expected, dict):
        if set(got) != set(expected):
            return [f"{where}: keys {sorted(set(got) ^ set(expected))}"]
        return [line for key in expected for line in differences(got[key], expected[key], f"{where}.{key}")]
    if isinstance(expected, Tensor):
        same = got.shape == expected.shape and got.dtype == expected.dtype and torch.equal(got, expected)
        return [] if same else [f"{where}: {got} is not {expected}"]
    if isinstance(expected, (list, tuple)):
        if len(got) != len(expected):
            return [f"{where}: {len(got)} is not {len(expected)}"]
        pairs = enumerate(zip(got, expected, strict=True))
        return [line for i, (one, other) in pairs for line in differences(one, other, f"{where}[{i}]")]
    return [] if got == expected else [f"{where}: {got!r} is not {expected!r}"]


# -- what ranks run ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cut:
    """How a run is cut: F, which units, RAF or NRAF."""

    factor: int
    way: int = 0
    raf: bool = True


def save_some(rank: Rank | None, kinds: list[str], cut: Cut, folder: Path, asynchronous: bool = True) -> None:
    """Two steps and a save of each kind; rank 0 leaves beside it what the state was."""
    for kind in kinds:
        work = trainee(rank, kind, cut.factor, cut.way, cut.raf)
        train(rank, work, 0, 2)
        save_with_truth(rank, work, folder / kind, 2, asynchronous)


def save_with_truth(rank: Rank | None, work: Trainee, root: Path, step: int, asynchronous: bool) -> None:
    saver = checkpointer(root, work, asynchronous=asynchronous)
    saver.save(run_state(rank, step))
    truth = everything(work)
    train(rank, work, 50, 1)  # goes on while the checkpoint is written
    saver.wait()
    if work.ranks.is_main:
        (root / "truth.pickle").write_bytes(pickle.dumps(truth))


def load_some(rank: Rank | None, kinds: list[str], cut: Cut, folder: Path, then_save: Path | None) -> list[str]:
    """Load each kind into a run cut otherwise that has trained on; differences to what was saved. Saves it again."""
    found = []
    for kind in kinds:
        work = trainee(rank, kind, cut.factor, cut.way, cut.raf)
        train(rank, work, 7, 1)  # a state that must not survive the loading
        root = folder / kind
        (path,) = (path for path in root.iterdir() if path.name.startswith("step_"))
        state = checkpointer(root, work).load(path)
        truth = pickle.loads((root / "truth.pickle").read_bytes())
        found += differences(everything(work), truth, kind)
        found += differences(state.shared, {"seen": 24, "losses": [1.5, None]}, "shared")
        train(rank, work, 2, 1)  # it can go on
        if then_save is not None:
            checkpointer(root, work).load(path)
            save_with_truth(rank, work, then_save / kind, 2, True)
    return found
