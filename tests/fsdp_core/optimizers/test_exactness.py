"""Which optimizers may run on flat shards."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fsdp_core.errors import NumericsError
from fsdp_core.numerics.optimizers import (
    LAMB,
    Adafactor,
    GroupRule,
    Muon,
    WholeParameterOptimizer,
    check_optimizer,
    no_decay,
    parameter_groups,
)
from fsdp_core.numerics.optimizers.exactness import ELEMENT_WISE, SHAPE_DEPENDENT
from tests.fsdp_core.optimizers.references import NormalisedGradient


def everything_in_torch() -> set[type[torch.optim.Optimizer]]:
    found = {value for value in vars(torch.optim).values() if isinstance(value, type)}
    return {kind for kind in found if issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer}


def test_every_optimizer_of_torch_is_decided() -> None:
    refused = set()
    for kind in everything_in_torch() - ELEMENT_WISE:
        with pytest.raises(NumericsError, match=kind.__name__):
            check_optimizer(kind)
        refused.add(kind.__name__)
    assert refused == {"Adafactor", "Muon", "LBFGS", "SparseAdam"}


@pytest.mark.parametrize("kind", sorted(ELEMENT_WISE, key=lambda kind: kind.__name__))
def test_element_wise_optimizers_do_not_see_how_parameters_are_cut(kind: Any) -> None:
    """The proof behind the list: two tensors or one, the same bits."""
    whole = nn.Parameter(torch.linspace(-1, 1, 12))
    parts = [nn.Parameter(part.detach().clone()) for part in whole.split([5, 7])]
    together, apart = kind([whole], lr=0.01), kind(parts, lr=0.01)
    generator = torch.Generator().manual_seed(1)
    for _ in range(5):
        whole.grad = torch.randn(12, generator=generator)
        for part, grad in zip(parts, whole.grad.split([5, 7]), strict=True):
            part.grad = grad.clone()
        together.step()
        apart.step()
    torch.testing.assert_close(torch.cat([p.detach() for p in parts]), whole.detach(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("kind", [LAMB, Adafactor, Muon, WholeParameterOptimizer, torch.optim.AdamW])
def test_accepted(kind: Any) -> None:
    check_optimizer(kind)


def named(name: str, *bases: type) -> type:
    return type(name, bases or (torch.optim.Optimizer,), {})


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        (torch.optim.Adafactor, "rows and columns.*fsdp_core.optimizers.Adafactor"),
        (torch.optim.Muon, "as a matrix.*fsdp_core.optimizers.Muon"),
        (torch.optim.LBFGS, "one vector"),
        (torch.optim.SparseAdam, "sparse gradients"),
        (named("Lamb"), "norm of each parameter.*fsdp_core.optimizers.LAMB"),
        (named("Shampoo"), "WholeParameterOptimizer.*Shampoo"),
        (named("MyShampoo", named("Shampoo")), "as a matrix"),
        (named("AdamW8bit"), "blocks"),
        (named("Prodigy"), "mixes parameters"),
        (NormalisedGradient, "not known here.*is_elementwise=True.*WholeParameterOptimizer"),
        (named("MyAdam", torch.optim.AdamW), "not known here"),
    ],
)
def test_refused_by_name(kind: Any, says: str) -> None:
    with pytest.raises(NumericsError, match=f"(?s){kind.__name__}.*{says}"):
        check_optimizer(kind)


def test_a_class_or_a_caller_can_vouch() -> None:
    vouched = type("Own", (torch.optim.Optimizer,), {"is_elementwise": True})
    check_optimizer(vouched)
    check_optimizer(NormalisedGradient, is_elementwise=True)
    with pytest.raises(NumericsError):
        check_optimizer(torch.optim.LBFGS, is_elementwise=True)


def test_whole_parameter_mode_refuses_what_mixes_parameters() -> None:
    with pytest.raises(NumericsError, match="LBFGS"):
        WholeParameterOptimizer([nn.Parameter(torch.ones(2))], lambda groups: torch.optim.LBFGS(groups))


def test_muon_names_what_is_no_matrix() -> None:
    with pytest.raises(NumericsError, match=r"(?s)matrices only.*shape \(3,\)"):
        Muon(nn.Linear(2, 3).parameters())


def test_adafactor_refuses_channels_last() -> None:
    conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    with pytest.raises(NumericsError, match="not row-major"):
        Adafactor(conv.parameters())


def test_complex_and_gappy_parameters_are_refused() -> None:
    with pytest.raises(NumericsError, match="real numbers"):
        LAMB([nn.Parameter(torch.zeros(2, dtype=torch.complex64))])
    with pytest.raises(NumericsError, match="does not fill its memory"):
        LAMB([nn.Parameter(torch.zeros(4, 4)[:, :2])])


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (LAMB, {"lr": -1.0}),
        (LAMB, {"betas": (0.9, 1.0)}),
        (Adafactor, {"d": 0.5}),
        (Adafactor, {"beta2_decay": 0.5}),
        (Muon, {"ns_steps": 100}),
        (Muon, {"adjust_lr_fn": "no"}),
    ],
)
def test_options_are_checked(kind: Any, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=kind.__name__):
        kind([nn.Parameter(torch.ones(2, 2))], **options)


def test_groups_by_name_of_a_plain_model() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3))
    rules = [GroupRule(lambda fqn, shape: fqn.startswith("1."), {"lr": 0.5}), no_decay()]
    groups = parameter_groups(model.named_parameters(), rules, {"weight_decay": 0.1})
    weight, bias = model[0].parameters()
    assert [(g.get("weight_decay"), g.get("lr"), len(g["params"])) for g in groups] == [
        (0.1, None, 1),
        (None, 0.5, 2),
        (0.0, None, 1),
    ]
    assert groups[0]["params"][0] is weight
    assert groups[2]["params"][0] is bias
    with pytest.raises(NumericsError, match="without a name"):
        parameter_groups(model.parameters(), rules)


def test_the_docs_table_names_every_decided_optimizer() -> None:
    page = (Path(__file__).parents[3] / "docs" / "optimizers.md").read_text()
    decided = [kind.__name__ for kind in everything_in_torch()]
    missing = [name for name in (*decided, "LAMB", "WholeParameterOptimizer") if f"{name}`" not in page]
    assert not missing
    named = set(re.findall(r"`([A-Z][A-Za-z0-9_]+)`", page.split("## What a step costs")[0]))
    known = {*decided, *SHAPE_DEPENDENT, "LAMB", "Lamb"}
    assert named <= known
