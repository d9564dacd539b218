"""Weight decay by name on flat shards is exact: the same as torch's own with parameter groups."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fsdp_core
from fsdp_core.errors import NumericsError
from fsdp_core.handle.flat_parameter import FlatParameter, FlatSegment
from fsdp_core.layout.flat_layout import ParameterShape, build_layout, contiguous_stride
from recipes.optimizers import groups
from recipes.registry import OPTIMIZERS, Entry
from recipes.schema.training import AdafactorConfig, AdamWConfig, LAMBConfig, OptimizerConfig, SGDConfig

NAMES = ("a.weight", "a.bias", "ln_1.weight", "b.weight", "c.weight", "c.bias")
SHAPES = ((3, 5), (5,), (7,), (4,), (2, 3), (3,))
NO_DECAY = ["bias", "ln_"]


def flat_shards(values: list[torch.Tensor], num_shards: int) -> list[FlatParameter]:
    """The shards that all ranks of one sharding group hold of ``values``, padding zero."""
    shapes = [ParameterShape(n, s, contiguous_stride(s)) for n, s in zip(NAMES, SHAPES, strict=True)]
    layout = build_layout(shapes, num_shards)
    whole = torch.cat([*(value.flatten() for value in values), torch.zeros(layout.padding_numel)])
    shards = []
    for index, part in enumerate(whole.chunk(num_shards)):
        flat = FlatParameter(part.clone())
        flat.segments = tuple(FlatSegment(s, layout.local_span(s, index)) for s in layout.segments)
        flat.unit_name = "block"
        shards.append(flat)
    return shards


def make_values(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def stepped_by_torch(config: OptimizerConfig, kind: type, steps: int, **options: object) -> torch.Tensor:
    parameters = [nn.Parameter(value) for value in make_values(0)]
    decayed = [groups.is_decayed(name, NO_DECAY) for name in NAMES]
    optimizer = kind(
        [
            {"params": [p for p, d in zip(parameters, decayed, strict=True) if d], "weight_decay": config.weight_decay},
            {"params": [p for p, d in zip(parameters, decayed, strict=True) if not d], "weight_decay": 0.0},
        ],
        lr=config.lr,
        **options,
    )
    for step in range(steps):
        for parameter, grad in zip(parameters, make_values(step + 1), strict=True):
            parameter.grad = grad
        optimizer.step()
    return torch.cat([parameter.detach().flatten() for parameter in parameters])


def stepped_on_shards(
    monkeypatch: pytest.MonkeyPatch, config: OptimizerConfig, num_shards: int, steps: int
) -> torch.Tensor:
    """Each shard is a rank of its own, with its own optimizer."""
    shards = flat_shards(make_values(0), num_shards)
    optimizers = []
    for shard in shards:
        monkeypatch.setattr(groups.fsdp_core, "flat_parameters", lambda model, shard=shard: [shard])
        optimizers.append(groups.build_optimizer(config, nn.Module()))
    for step in range(steps):
        for shard, grad, optimizer in zip(
            shards, flat_shards(make_values(step + 1), num_shards), optimizers, strict=True
        ):
            shard.grad = grad.detach()
            optimizer.step()
    return torch.cat([shard.detach() for shard in shards])[: sum(torch.Size(shape).numel() for shape in SHAPES)]


@pytest.mark.parametrize("num_shards", [1, 2, 3, 4, 64])
@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_decay_by_name_on_shards_equals_parameter_groups(monkeypatch: pytest.MonkeyPatch, kind: str, num_shards: int):
    if kind == "adamw":
        config = AdamWConfig(lr=0.1, weight_decay=0.3, no_decay=NO_DECAY)
        expected = stepped_by_torch(config, torch.optim.AdamW, 5, betas=(0.9, 0.95))
    else:
        config = SGDConfig(lr=0.1, weight_decay=0.3, no_decay=NO_DECAY, momentum=0.9, nesterov=True)
        expected = stepped_by_torch(config, torch.optim.SGD, 5, momentum=0.9, nesterov=True)
    torch.testing.assert_close(stepped_on_shards(monkeypatch, config, num_shards, 5), expected, rtol=1e-6, atol=1e-7)


def test_without_decay_no_hook_runs(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(groups.fsdp_core, "flat_parameters", lambda model: flat_shards(make_values(0), 1))
    optimizer = groups.build_optimizer(AdamWConfig(lr=0.1, weight_decay=0.0), nn.Module())
    assert not optimizer._optimizer_step_pre_hooks


def test_neighbouring_decayed_parameters_are_one_span():
    (flat,) = flat_shards(make_values(0), 1)
    spans = groups.decayed_spans([flat], NO_DECAY)
    assert [(span.start, span.stop) for span in spans] == [(0, 15), (27, 37)]


def test_a_unit_without_gradient_is_not_decayed(monkeypatch: pytest.MonkeyPatch):
    flats = flat_shards(make_values(0), 2)
    monkeypatch.setattr(groups.fsdp_core, "flat_parameters", lambda model: flats)
    optimizer = groups.build_optimizer(AdamWConfig(lr=0.1, weight_decay=0.3, no_decay=[]), nn.Module())
    before = flats[1].detach().clone()
    flats[0].grad = torch.ones_like(flats[0])
    optimizer.step()
    assert torch.equal(flats[1].detach(), before)
    assert not torch.equal(flats[0].detach(), flat_shards(make_values(0), 2)[0].detach())


@pytest.mark.parametrize("found_inf", [0.0, 1.0])
def test_a_step_skipped_by_the_scaler_does_not_decay_either(monkeypatch: pytest.MonkeyPatch, found_inf: float):
    (flat,) = flats = flat_shards(make_values(0), 1)
    monkeypatch.setattr(groups.fsdp_core, "flat_parameters", lambda model: flats)
    optimizer = groups.build_optimizer(AdamWConfig(lr=0.1, weight_decay=0.3), nn.Module())
    before = flat.detach().clone()
    flat.grad = torch.ones_like(flat)
    optimizer.found_inf, optimizer.grad_scale = torch.tensor(found_inf), torch.tensor(1.0)  # as GradScaler.step does
    optimizer.step()
    assert torch.equal(flat.detach(), before) == bool(found_inf)


def test_a_plugin_that_asks_for_an_unknown_kind_of_decay_is_told():
    (flat,) = flat_shards(make_values(0), 1)
    optimizer = torch.optim.SGD([flat], lr=0.1)
    with pytest.raises(ValueError, match="must give 'decoupled' or 'l2', got 'both'"):
        groups.attach_decay(optimizer, groups.decayed_spans([flat], []), 0.1, "both")


def sharded_model() -> nn.Module:
    torch.manual_seed(0)
    return fsdp_core.fully_shard(nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 3)))


@pytest.mark.parametrize("config", [LAMBConfig(lr=0.01, weight_decay=0.1), AdafactorConfig(lr=0.01, weight_decay=0.1)])
def test_whole_parameter_optimizers_leave_undecayed_parameters_alone(config: OptimizerConfig) -> None:
    """With gradients of zero only weight decay moves parameters: exactly those that decay."""
    model = sharded_model()
    before = {name: tensor.clone() for name, tensor in fsdp_core.state_dict(model).items()}
    optimizer = groups.build_optimizer(config, model)
    (model(torch.ones(2, 6)).sum() * 0.0).backward()
    optimizer.step()
    moved = {name for name, tensor in fsdp_core.state_dict(model).items() if not torch.equal(tensor, before[name])}
    assert moved == {"0.weight", "1.weight", "2.weight"}  # "1" is a norm, but not by name


def test_an_optimizer_that_is_not_known_to_be_exact_on_shards_is_refused_by_name() -> None:
    class Norms(torch.optim.SGD):
        pass

    OPTIMIZERS.add(Entry("norms", SGDConfig, "", None, {"build": lambda config, made: Norms(made, lr=config.lr)}))
    try:
        with pytest.raises(NumericsError, match="Norms"):
            groups.build_optimizer(SGDConfig(kind="norms", lr=0.1), sharded_model())
        Norms.is_elementwise = True  # type: ignore[attr-defined]
        groups.build_optimizer(SGDConfig(kind="norms", lr=0.1), sharded_model())
    finally:
        OPTIMIZERS.discard("norms")
