"""The drift guard: every key is safe, changes numbers or is incompatible."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest

from launcher.drift import INCOMPATIBLE, KINDS, NUMBERS, SAFE, Difference, differences, kind_of
from launcher.schema import Config
from recipes.registry import DATA, MODELS, OPTIMIZERS
from recipes.schema.data import StdlibTextConfig
from recipes.schema.model import GPTConfig
from recipes.schema.training import AdamWConfig


def tree(**changes: Any) -> dict[str, Any]:
    config = Config()
    config.model = GPTConfig(num_layers=2, num_heads=2, hidden_size=16, max_seq_len=8)
    config.data, config.optimizer = StdlibTextConfig(), AdamWConfig(lr=1e-3)
    config.train.steps, config.train.global_batch = 100, 8
    plain = dataclasses.asdict(config)
    for path, value in changes.items():
        *folders, name = path.split("__")
        owner = plain
        for folder in folders:
            owner = owner[folder]
        assert name in owner
        owner[name] = value
    return plain


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ({"run__name": "b"}, SAFE),
        ({"cluster__nproc_per_node": 4}, SAFE),
        ({"sharding__factor": 2}, SAFE),
        ({"sharding__reshard_after_forward": False}, SAFE),
        ({"sharding__units": "size"}, SAFE),
        ({"train__micro_batch": 2}, SAFE),
        ({"logger__wandb": {"project": "p"}}, SAFE),
        ({"train__early_stop__patience": 3}, SAFE),
        ({"optimizer__lr": 0.1}, NUMBERS),
        ({"optimizer__betas": [0.9, 0.99]}, NUMBERS),
        ({"run__seed": 1}, NUMBERS),
        ({"train__global_batch": 16}, NUMBERS),
        ({"precision__param_dtype": "bfloat16"}, NUMBERS),
        ({"data__seq_len": 16}, NUMBERS),
        ({"model__dropout": 0.1}, NUMBERS),
        ({"model__num_layers": 3}, INCOMPATIBLE),
        ({"model__kind": "t5"}, INCOMPATIBLE),
        ({"optimizer__kind": "sgd"}, INCOMPATIBLE),
        ({"data__tokenizer__kind": "train"}, INCOMPATIBLE),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else value,
)
def test_one_change_is_told_with_both_values_and_its_kind(change: dict[str, Any], kind: str) -> None:
    was, now = tree(), tree(**change)
    (found,) = differences(was, now, steps_done=10)
    ((path, value),) = change.items()
    assert (found.key, found.now, found.kind) == (path.replace("__", "."), value, kind)
    assert str(found).startswith(f"{found.key} ")
    assert differences(now, copy.deepcopy(now), steps_done=10) == []


def test_more_steps_are_safe_only_where_the_steps_done_had_the_same_rates() -> None:
    def kind(steps_done: int = 100, **scheduler: Any) -> str:
        changes = {f"scheduler__{name}": value for name, value in scheduler.items()}
        was, now = tree(**changes), tree(train__steps=200, **changes)
        (found,) = differences(was, now, steps_done)
        return found.kind

    assert kind(kind="constant") == SAFE
    assert kind(kind="cosine") == NUMBERS
    assert kind(kind="constant", warmup_steps=None) == NUMBERS  # a twentieth of another number of steps
    assert kind(kind="cosine", warmup_steps=50, steps_done=50) == SAFE  # still warming up


def test_every_key_of_the_schema_has_a_kind() -> None:
    groups = {field.name for field in dataclasses.fields(Config)}
    assert groups <= KINDS.keys(), "a new group needs a line"
    for key in KINDS:
        group, _, rest = key.partition(".")
        owners = [dataclasses.fields(Config)] if not rest else _schemas(group)
        name = rest.partition(".")[0] or group
        assert any(field.name == name for owner in owners for field in owner), f"{key} is no key any more"


def _schemas(group: str) -> list[Any]:
    registry = {"model": MODELS, "data": DATA, "optimizer": OPTIMIZERS}.get(group)
    if registry is not None:
        return [dataclasses.fields(registry[name].config) for name in registry.names()]
    return [dataclasses.fields(getattr(Config(), group))]


def test_keys_of_another_kind_are_not_told_beside_it() -> None:
    found = differences(tree(), tree(optimizer__kind="sgd", optimizer__lr=0.1, run__seed=2), 1)
    assert [one.key for one in found] == ["run.seed", "optimizer.kind"]


def test_keys_of_one_side_alone_and_of_plugins() -> None:
    was, now = tree(), tree()
    del was["train"]["clip_norm"]
    assert differences(was, now, 1) == []
    assert kind_of("someones.own.key") == NUMBERS
    assert Difference("train.trace", False, True, SAFE).is_told
    assert not Difference("cluster.nproc_per_node", 2, 4, SAFE).is_told
    assert str(Difference("sharding.factor", None, True, SAFE)) == "sharding.factor null -> true"
