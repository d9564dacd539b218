"""Four sharded ranks and one unsharded process, written here in plain torch, go through the same losses."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fsdp_core.init import seeded_init
from recipes.data.reading import fetch
from recipes.data.records import DataInfo, PrepareRequest
from recipes.data.stream import SampleStream
from recipes.optimizers.groups import is_decayed
from recipes.registry import MODELS
from recipes.schedulers import schedule
from recipes.schema import RecipeConfig
from recipes.seeds import derived_seed
from recipes.tasks import task_for
from tests.recipes.loop.recipes_in_tests import many_losses, prepare, recipe
from tests.support.ranks import Pools

TOLERANCE = 1e-5  # relative, of every step


def unsharded_losses(config: RecipeConfig) -> list[float]:
    """One process, the whole global batch at once, torch's own optimizer with groups by name."""
    entry = MODELS[config.model.kind]
    splits = prepare(config.data, PrepareRequest(entry.task, config.run.seed, None, None, True, int, None, print))
    model = built_eagerly(config, splits.info)
    extra = entry.load("extra_optimizers")(model, config.model) if entry.offers("extra_optimizers") else []
    ignored = {p for m in entry.load("ignored_modules")(model) for p in m.parameters()} if extra else set()
    dense = {name: p for name, p in model.named_parameters() if p not in ignored}
    decayed = [p for name, p in dense.items() if is_decayed(name, config.optimizer.no_decay)]
    others = [p for name, p in dense.items() if not is_decayed(name, config.optimizer.no_decay)]
    groups = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, betas=tuple(config.optimizer.betas), weight_decay=config.optimizer.weight_decay)
    lr = schedule(config.scheduler, config.optimizer.lr, config.train.steps)
    task = task_for(entry.task, splits.info)
    stream = SampleStream(len(splits.train), config.run.seed, config.train.global_batch)
    losses = []
    for step in range(config.train.steps):
        (samples,) = stream.take(0, 1, config.train.global_batch)
        batch = fetch(splits.train, samples)
        loss = task.loss_sum(task.logits(model, batch), batch["labels"]) / task.count_targets(batch)
        loss.backward()
        nn.utils.clip_grad_norm_(list(dense.values()), config.train.clip_norm)
        for group in adamw.param_groups:
            group["lr"] = lr(step)
        for optimizer in (adamw, *extra):
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def built_eagerly(config: RecipeConfig, info: DataInfo) -> nn.Module:
    with seeded_init(derived_seed(config.run.seed, "weights")):
        return MODELS[config.model.kind].load("build")(config.model, info)


@pytest.mark.parametrize("kind", ["gpt", "t5", "dhen"])
def test_every_factor_and_both_reshard_settings_give_the_unsharded_curve(ranks: Pools, kind: str):
    settings = [(factor, raf) for factor in (1, 2, 4) for raf in (True, False)]
    configs = [recipe(kind, sharding__factor=factor, sharding__reshard_after_forward=raf) for factor, raf in settings]
    expected = unsharded_losses(recipe(kind))
    assert expected[-1] < expected[0], "nothing was learnt: the comparison would be empty"
    per_rank = ranks(4).run(many_losses, configs, timeout_s=240.0)
    assert all(losses == per_rank[0] for losses in per_rank), "ranks must report the same global loss"
    for (factor, raf), losses in zip(settings, per_rank[0], strict=True):
        difference = max(abs(ours - theirs) / theirs for ours, theirs in zip(losses, expected, strict=True))
        assert difference <= TOLERANCE, f"F={factor} RAF={raf}: off by {difference:.2e}"
