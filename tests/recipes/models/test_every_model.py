"""What every model must do, whatever it is: shapes, dtypes, the meta device, learning, the same bits again."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from recipes.registry import MODELS
from recipes.tasks import task_for
from tests.recipes.models.tiny import ALL, T5, Tiny

each = pytest.mark.parametrize("tiny", ALL, ids=lambda tiny: tiny.kind)


def logits(tiny: Tiny, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return task_for(tiny.info.task, tiny.info).logits(model, batch)


def expected_shape(tiny: Tiny, num_samples: int) -> tuple[int, ...]:
    info = tiny.info
    return {
        "causal_lm": (num_samples, info.seq_len, info.vocab_size),
        "seq2seq_lm": (num_samples, info.target_len, info.vocab_size),
        "clicks": (num_samples,),
        "images": (num_samples, info.num_classes),
    }[info.task]


@each
def test_shape_of_logits_and_number_of_units(tiny: Tiny) -> None:
    model = tiny.build()
    assert logits(tiny, model, tiny.batch(3)).shape == expected_shape(tiny, 3)
    assert len(tiny.unit_modules(model)) == tiny.num_units


@each
def test_every_parameter_learns(tiny: Tiny) -> None:
    model = tiny.build()
    tiny.loss(model, tiny.batch(4)).backward()
    assert [name for name, p in model.named_parameters() if p.grad is None] == []


@each
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_forward_and_backward_in_one_low_dtype(tiny: Tiny, dtype: torch.dtype) -> None:
    """As the engine runs a unit: parameters and inputs in the compute dtype, nothing in between falls out of it."""
    model = tiny.build().to(dtype)
    batch = {name: x.to(dtype) if x.is_floating_point() else x for name, x in tiny.batch(4).items()}
    out = logits(tiny, model, batch)
    assert out.dtype is dtype
    tiny.loss(model, batch).backward()
    assert all(p.grad is None or p.grad.is_sparse or p.grad.isfinite().all() for p in model.parameters())


@each
def test_runs_on_the_meta_device(tiny: Tiny) -> None:
    with torch.device("meta"):
        model = MODELS[tiny.kind].load("build")(tiny.config, tiny.info)
    batch = {name: x.to("meta") for name, x in tiny.batch(2).items()}
    out = logits(tiny, model, batch)
    assert out.is_meta
    assert out.shape == expected_shape(tiny, 2)
    out.sum().backward()


@each
def test_same_seed_same_weights(tiny: Tiny) -> None:
    first, second = tiny.build().state_dict(), tiny.build().state_dict()
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


@each
def test_learns_a_batch_by_heart(tiny: Tiny) -> None:
    model = tiny.build()
    extra = MODELS[tiny.kind]
    own = extra.load("extra_optimizers")(model, tiny.config) if extra.offers("extra_optimizers") else []
    aside = {id(p) for optimizer in own for group in optimizer.param_groups for p in group["params"]}
    optimizers = [torch.optim.AdamW([p for p in model.parameters() if id(p) not in aside], lr=3e-3), *own]
    batch, losses = tiny.batch(8), []
    for _ in range(30):
        loss = tiny.loss(model, batch)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]


@each
def test_a_copy_is_independent(tiny: Tiny) -> None:
    model = tiny.build().eval()
    twin = copy.deepcopy(model)
    batch = tiny.batch(2)
    before = logits(tiny, model, batch)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.add_(1.0)
    assert torch.equal(logits(tiny, model, batch), before)


@pytest.mark.parametrize("tiny", [*ALL, T5.with_config(use_cache=True)], ids=lambda tiny: tiny.kind)
def test_units_can_be_recomputed(tiny: Tiny) -> None:
    """Activation checkpointing of each unit, with dropout drawn again alike: the same gradients."""
    from recipes.recompute import checkpoint_units

    tiny = tiny.with_config(dropout=0.1) if "dropout" in vars(tiny.config) else tiny
    gradients = []
    for recompute in (False, True):
        model = tiny.build().train()
        if recompute:
            checkpoint_units(tiny.unit_modules(model))
        torch.manual_seed(5)
        tiny.loss(model, tiny.batch(3)).backward()
        gradients.append({name: p.grad.to_dense() for name, p in model.named_parameters()})
    for name, plain in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], plain, rtol=1e-5, atol=1e-7, msg=lambda m, n=name: f"{n}: {m}")
