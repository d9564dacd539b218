"""Every model can be recorded without memory and built later, with the bits of building it eagerly."""

from __future__ import annotations

import pytest
import torch

from fsdp_core.init import deferred_init, is_deferred, materialize, seeded_init
from recipes.registry import MODELS
from tests.recipes.models.tiny import ALL, DHEN, GPT, T5, Tiny

VARIANTS = {
    **{tiny.kind: tiny for tiny in ALL},
    "gpt_tied": GPT.with_config(tie_head=True),
    "t5_untied": T5.with_config(tie_word_embeddings=False),
    "dhen_fp16": DHEN.with_config(table_dtype="float16"),
}


@pytest.mark.parametrize("tiny", VARIANTS.values(), ids=VARIANTS)
def test_deferred_equals_eager(tiny: Tiny) -> None:
    build = MODELS[tiny.kind].load("build")
    with seeded_init(3):
        eager = build(tiny.config, tiny.info)
    with seeded_init(3):
        recorded = deferred_init(build, tiny.config, tiny.info)
    assert is_deferred(recorded)
    materialize(recorded, "cpu")
    expected, actual = dict(eager.state_dict()), dict(recorded.state_dict())
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(actual[name], value), name
    for (name, value), (_, other) in zip(eager.named_buffers(), recorded.named_buffers(), strict=True):
        assert torch.equal(value, other), name
    tiny.loss(recorded, tiny.batch(2)).backward()


def test_tied_parameters_stay_one() -> None:
    for tiny, first, second in [
        (VARIANTS["gpt_tied"], "head", "token_embedding"),
        (T5, "lm_head", "shared"),
    ]:
        recorded = deferred_init(MODELS[tiny.kind].load("build"), tiny.config, tiny.info)
        materialize(recorded, "cpu")
        assert getattr(recorded, first).weight is getattr(recorded, second).weight


def test_rows_follow_the_seed_of_the_build() -> None:
    build = MODELS["dhen"].load("build")
    rows = []
    for seed in (3, 4):
        with seeded_init(seed):
            rows.append(build(DHEN.config, DHEN.info).tables.weight)
    assert not torch.equal(*rows)
