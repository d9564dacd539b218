"""Behaviours of optimizers and hooks: whole-parameter norms, groups, user hooks, replaced parameters, weight norm."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import fsdp_core
from fsdp_core.errors import StateError, WrapError
from tests.fsdp_core.behaviours.variants import Tower, every_variant, message_of, two_variants
from tests.support.parity import Pair, batches_for, is_idle, mean_square, whole
from tests.support.ranks import Pools, Rank

# B33 ----------------------------------------------------------------------------------------------------------------


class NormalisedDescent(torch.optim.Optimizer):
    """update = -0.1 g / ||g||, per parameter."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.add_(parameter.grad / parameter.grad.norm(), alpha=-0.1)


def _normalised(rank: Rank, options: dict[str, Any]) -> None:
    model = Tower()
    pair = Pair(model, units=[model.inner], optimizer=NormalisedDescent, **options)
    for step in range(3):
        pair.step(rank.rank, batches_for(rank.world_size, 3, 4, seed=step), mean_square)


@every_variant
def test_b33_whole_parameter_norms_are_right(ranks: Pools, options: dict[str, Any]) -> None:
    ranks(2).run(_normalised, options)


def _shape_dependent(rank: Rank) -> str:
    model = fsdp_core.fully_shard(Tower())
    mean_square(model, torch.ones(2, 4)).backward()
    grad = model.inner[0].weight.grad
    messages = [message_of(lambda f=f: f(grad), StateError) for f in (lambda g: g.mean(dim=1), lambda g: g @ g.t())]
    return "\n".join(messages)


def test_b33_operations_on_whole_shapes_are_refused_by_name(ranks: Pools) -> None:
    for message in ranks(2).run(_shape_dependent):
        assert message.count("parameter: inner.0.weight") == 2 and "aten::mean" in message


# B34 ----------------------------------------------------------------------------------------------------------------


def _groups(parameters: Any) -> list[dict[str, Any]]:
    named = list(parameters)
    decayed = [p for n, p in named if n.endswith("weight")]
    return [{"params": decayed, "weight_decay": 0.5}, {"params": [p for n, p in named if n.endswith("bias")]}]


def _decay_by_name(rank: Rank, options: dict[str, Any], fused: bool) -> None:
    model = Tower()
    pair = Pair(model, units=[model.inner], **options)
    settings = {"lr": 0.05, "weight_decay": 0.0, "fused": fused}
    pair.plain_optimizer = torch.optim.AdamW(_groups(pair.plain.named_parameters()), **settings)
    pair.optimizer = torch.optim.AdamW(_groups(pair.sharded.named_parameters()), **settings)
    for step in range(3):
        pair.step(rank.rank, batches_for(rank.world_size, 3, 4, seed=step), mean_square)


@pytest.mark.parametrize("fused", [False, True], ids=["foreach", "fused"])
@every_variant
def test_b34_decay_by_name_inside_one_unit(ranks: Pools, options: dict[str, Any], fused: bool) -> None:
    ranks(2).run(_decay_by_name, options, fused)


# B35 ----------------------------------------------------------------------------------------------------------------


def _user_hooks(rank: Rank, options: dict[str, Any]) -> None:
    model = Tower()
    seen_shapes: list[tuple[int, ...]] = []
    model.inner[0].register_forward_pre_hook(lambda module, args: seen_shapes.append(tuple(module.weight.shape)))
    sums: list[float] = []
    model.inner.register_forward_pre_hook(lambda module, args: sums.append(float(module[0].weight.detach().sum())))
    before = model.last.weight
    early: list[Tensor] = []
    before.register_hook(lambda grad: early.append(grad))
    pair = Pair(model, units=[model.inner, model.last], **options)
    fired: dict[str, list[tuple[str, Tensor]]] = {}
    for name, parameter in pair.sharded.named_parameters():
        fired[name] = []
        parameter.register_hook(lambda grad, name=name: fired[name].append(("grad", whole(grad))))
        parameter.register_post_accumulate_grad_hook(
            lambda p, name=name: fired[name].append(("accumulated", whole(p.grad)))
        )
    doubled = pair.sharded.last.bias.register_hook(lambda grad: grad * 2)
    batches = batches_for(rank.world_size, 3, 4)
    expected = {name: grad.clone() for name, grad in pair.plain_gradients(batches, mean_square).items()}
    for micro in range(2):
        for calls in fired.values():
            calls.clear()
        mean_square(pair.sharded, batches[rank.rank]).backward()
        for name, calls in fired.items():
            assert [kind for kind, _ in calls] == ["grad", "accumulated"], name
            torch.testing.assert_close(calls[0][1], expected[name])
            factor = 2 if name == "last.bias" else 1
            torch.testing.assert_close(calls[1][1], expected[name] * (micro + 1) * factor)
    doubled.remove()
    assert len(early) >= 2 and seen_shapes[0] == (7, 6)
    assert sums[0] == pytest.approx(float(pair.plain.inner[0].weight.sum()), rel=1e-5)
    assert is_idle(pair.sharded)


@every_variant
def test_b35_user_hooks_fire_once_with_the_reduced_shard(ranks: Pools, options: dict[str, Any]) -> None:
    ranks(2).run(_user_hooks, options)


def _optimizer_in_backward(rank: Rank, options: dict[str, Any]) -> None:
    pair = Pair(Tower(), **options)

    def step(parameter: Tensor) -> None:
        parameter.add_(parameter.grad, alpha=-0.5)
        parameter.grad = None

    for parameter in pair.sharded.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    for index in range(3):
        batches = batches_for(rank.world_size, 3, 4, seed=index)
        pair.plain_gradients(batches, mean_square)
        mean_square(pair.sharded, batches[rank.rank]).backward()
        pair.plain_optimizer.step()
        pair.plain.zero_grad()
        pair.check_parameters()


@every_variant
def test_b35_optimizer_inside_a_hook(ranks: Pools, options: dict[str, Any]) -> None:
    ranks(2).run(_optimizer_in_backward, options)


# B36 ----------------------------------------------------------------------------------------------------------------


def _replaced(rank: Rank) -> dict[str, str]:
    messages = {}
    model = fsdp_core.fully_shard(Tower(), units=[nn.Sequential], wire="collectives")
    model.inner[0].weight = nn.Parameter(torch.zeros(7, 6))
    messages["replaced"] = message_of(lambda: model(torch.ones(2, 4)), StateError)
    model = fsdp_core.fully_shard(Tower(), wire="collectives")
    messages["cast"] = message_of(lambda: model.bfloat16(), StateError)
    messages["data"] = message_of(lambda: setattr(model.last.weight, "data", torch.zeros(2, 2)), StateError)
    model.last.weight.data = torch.full((3, 6), 2.0)
    model.last.bias.data.fill_(1.0)
    state = fsdp_core.state_dict(model)
    assert (state["last.weight"] == 2).all() and (state["last.bias"] == 1).all()
    model.float().to("cpu")
    model.requires_grad_(False)
    assert not model.last.weight.requires_grad
    model = fsdp_core.fully_shard(Tower(), wire="collectives")
    model.last = nn.Linear(6, 3)
    messages["module"] = message_of(lambda: model(torch.ones(2, 4)), StateError)
    model = Tower()
    fsdp_core.fully_shard(model, ignored_modules=[model.inner], wire="collectives")
    model.last.register_module("frozen", nn.Linear(2, 2).requires_grad_(False))
    model(torch.ones(2, 4))
    return messages


def test_b36_replacing_assigning_and_casting(ranks: Pools) -> None:
    for messages in ranks(2).run(_replaced):
        assert "inner.0.weight" in messages["replaced"] and "replaced" in messages["replaced"]
        assert "first.weight" in messages["cast"] and "bfloat16" in messages["cast"]
        assert "last.weight" in messages["data"] and "(3, 6)" in messages["data"]
        assert "last.weight" in messages["module"] and "no unit" in messages["module"]


class WritesItsWeights(nn.Module):
    """Clamps a weight in place during forward, before it is used."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.last = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.last.weight.clamp_(-0.1, 0.1)
        return self.last(torch.tanh(self.inner(x)))


def _in_place_writes(rank: Rank, options: dict[str, Any]) -> None:
    model = nn.Sequential(WritesItsWeights(), nn.Linear(2, 2))
    pair = Pair(model, units=[WritesItsWeights], **options)
    for step in range(3):
        pair.step(rank.rank, batches_for(rank.world_size, 3, 4, seed=step), mean_square)
    x = batches_for(1, 3, 4)[0]
    with torch.no_grad():
        torch.testing.assert_close(pair.sharded(x), pair.plain(x))
    pair.check_parameters()
    assert is_idle(pair.sharded)


@every_variant
def test_in_place_writes_of_modules_are_kept(ranks: Pools, options: dict[str, Any]) -> None:
    ranks(2).run(_in_place_writes, options)


def _stale_backward(rank: Rank, options: dict[str, Any]) -> str:
    model = fsdp_core.fully_shard(tower := Tower(), units=[tower.inner], **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    mean_square(model, torch.ones(2, 4)).backward()
    loss = mean_square(model, torch.ones(2, 4))
    optimizer.step()
    try:
        loss.backward()
    except RuntimeError as error:
        return str(error)
    return "no error"


@every_variant
def test_a_step_between_forward_and_backward(ranks: Pools, options: dict[str, Any]) -> None:
    """Plain torch raises here. Kept copies (NRAF) still give the right gradient; everything else raises too."""
    for message in ranks(2).run(_stale_backward, options):
        if options.get("reshard_after_forward") is False:
            assert message == "no error"
        else:
            assert "modified in place" in message and "unit: " in message


# B37 ----------------------------------------------------------------------------------------------------------------


class Padded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 4, padding_idx=2)
        self.last = nn.Linear(4, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.last(self.table(tokens))


def _padding_index(rank: Rank, options: dict[str, Any]) -> None:
    model = Padded()
    pair = Pair(model, units=[model.table], **options)
    tokens = [torch.tensor([[2, 1, 2], [3, 2, 6]]), torch.tensor([[0, 2, 4], [5, 5, 2]])]
    for _ in range(2):
        pair.step(rank.rank, tokens, mean_square)
    assert not fsdp_core.state_dict(model)["table.weight"][2].any()


@every_variant
def test_b37_padding_index(ranks: Pools, options: dict[str, Any]) -> None:
    ranks(2).run(_padding_index, options)


@pytest.mark.parametrize("setting", [{"sparse": True}, {"max_norm": 1.0}], ids=["sparse", "max_norm"])
def test_b37_sparse_and_max_norm_are_refused_at_wrap(setting: dict[str, Any]) -> None:
    model = nn.Sequential(nn.Embedding(5, 4, **setting), nn.Linear(4, 2))
    with pytest.raises(WrapError, match=r"parameter: 0\.weight"):
        fsdp_core.fully_shard(model)


# B38 ----------------------------------------------------------------------------------------------------------------


def _old_weight_norm(layer: nn.Linear) -> nn.Module:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return nn.utils.weight_norm(layer)


NORMS = {
    "old weight_norm": _old_weight_norm,
    "weight_norm": parametrizations.weight_norm,
    "spectral_norm": parametrizations.spectral_norm,
    "old spectral_norm": nn.utils.spectral_norm,
}


def _normed(rank: Rank, options: dict[str, Any], norm: str, own_unit: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), NORMS[norm](nn.Linear(4, 4)), nn.Tanh(), nn.Linear(4, 2))
    plain = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), NORMS[norm](nn.Linear(4, 4)), nn.Tanh(), nn.Linear(4, 2))
    plain.load_state_dict(model.state_dict())
    pair = Pair(nn.Linear(1, 1))
    pair.plain = plain
    pair.sharded = fsdp_core.fully_shard(model, units=[model[2]] if own_unit else None, **options)
    pair.plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.5)
    pair.optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(3):
        batches = batches_for(rank.world_size, 3, 4, seed=step)
        # the running vectors of spectral norm move with each forward: give both the same number of them
        states = copy.deepcopy(dict(plain.named_buffers()))
        pair.plain_gradients(batches[:1], mean_square)
        first = {n: b.clone() for n, b in plain.named_buffers()}
        for name, buffer in plain.named_buffers():
            buffer.copy_(states[name])
        plain.zero_grad()
        pair.plain_gradients_from(states, batches, mean_square)
        for name, buffer in plain.named_buffers():
            buffer.copy_(first[name])
        mean_square(model, batches[rank.rank]).backward()
        pair.check_gradients()
        pair.plain_optimizer.step()
        pair.optimizer.step()
        pair.check_parameters()
        pair.plain.zero_grad()
        model.zero_grad()
    assert is_idle(model)


@pytest.mark.parametrize("own_unit", [False, True], ids=["in the root", "own unit"])
@pytest.mark.parametrize("norm", NORMS)
@two_variants
def test_b38_weight_and_spectral_norm(ranks: Pools, options: dict[str, Any], norm: str, own_unit: bool) -> None:
    ranks(2).run(_normed, options, norm, own_unit)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(4, 5, batch_first=True, bidirectional=True)
        self.last = nn.Linear(10, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.rnn(x[:, None, :].expand(-1, 3, -1))[0])


def _recurrent(rank: Rank, options: dict[str, Any]) -> None:
    model = Recurrent()
    pair = Pair(model, units=[model.rnn], **options)
    for step in range(2):
        pair.step(rank.rank, batches_for(rank.world_size, 3, 4, seed=step), mean_square)
    assert is_idle(pair.sharded)


@every_variant
def test_recurrent_layers_with_their_flat_weights(ranks: Pools, options: dict[str, Any]) -> None:
    ranks(2).run(_recurrent, options)
