"""GPT alone: causality, initialisation, refusals."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from fsdp_core.simulate.recording import Recorder
from fsdp_core.simulate.tape import Alloc
from recipes.data.records import DataInfo
from recipes.models import gpt
from tests.recipes.models.tiny import GPT


def test_no_token_sees_a_later_one() -> None:
    model, ids = GPT.build().eval(), GPT.batch(1)["input_ids"]
    changed = ids.clone()
    changed[0, 9] = (changed[0, 9] + 1) % 50
    before, after = model(ids), model(changed)
    assert torch.equal(before[:, :9], after[:, :9])
    assert not torch.equal(before[:, 9:], after[:, 9:])


def test_explicit_kernels_are_the_same_function() -> None:
    batch, outcomes = GPT.batch(3), []
    for kernels in ("fused", "explicit"):
        model = GPT.with_config(kernels=kernels).build()
        loss = GPT.loss(model, batch)
        loss.backward()
        outcomes.append((loss, dict(model.named_parameters()), model.state_dict().keys()))
    (fused, parameters, names), (explicit, others, other_names) = outcomes
    assert names == other_names  # a checkpoint of one is one of the other
    torch.testing.assert_close(explicit, fused)
    for name, parameter in parameters.items():
        torch.testing.assert_close(others[name].grad, parameter.grad, msg=name)


def test_explicit_attention_drops_probabilities_in_training_only() -> None:
    model, ids = GPT.with_config(kernels="explicit", dropout=0.5).build(), GPT.batch(1)["input_ids"]
    assert torch.equal(model.eval()(ids), model(ids))
    attention, x = model.train().blocks[0].attention, torch.randn(1, 16, 32)
    assert not torch.equal(attention(x), attention(x))


@pytest.mark.parametrize(("kernels", "kept"), [("explicit", 2 + 1 + 2), ("fused", 0)])
def test_a_plan_sees_what_each_kind_of_attention_keeps_for_backward(kernels: str, kept: int) -> None:
    """Bytes for each score: probabilities, dropout's mask, what it left over. In bfloat16, on the meta device."""
    batch, heads, seq_len = 2, 4, 64
    config = replace(GPT.config, kernels=kernels, dropout=0.1, max_seq_len=seq_len)
    with Recorder() as recorder, torch.device("meta"):
        model = gpt.CausalAttention(config, 0.02).to(torch.bfloat16)
        recorder.begin_tape()
        y = model(torch.zeros(batch, seq_len, 32, dtype=torch.bfloat16))
        live = sum(held.nbytes for held in recorder._live.values()) - sum(held.nbytes for held in recorder.tape.held)
        tape = recorder.end_tape()
    scores = batch * heads * seq_len**2
    small = 10 * batch * seq_len * 32 * 2  # some [B, S, D]
    assert y.shape == (batch, seq_len, 32)
    assert kept * scores <= live <= kept * scores + small
    largest = max(entry.nbytes for entry in tape.entries if isinstance(entry, Alloc))
    assert (largest == 2 * scores) == (kernels == "explicit")


def test_position_matters() -> None:
    logits = GPT.build().eval()(torch.full((1, 2), 3))
    assert not torch.equal(logits[0, 0], logits[0, 1])


def test_initial_spread() -> None:
    model = GPT.with_config(hidden_size=128, num_layers=3).build()
    residual = 0.02 / math.sqrt(2 * 3)
    block = model.blocks[1]
    for weight, std in [
        (model.token_embedding.weight, 0.02),
        (model.head.weight, 0.02),
        (block.attention.qkv.weight, 0.02),
        (block.feed_forward.up.weight, 0.02),
        (block.attention.out.weight, residual),
        (block.feed_forward.down.weight, residual),
    ]:
        assert weight.std().item() == pytest.approx(std, rel=0.05)
    assert block.attention.qkv.bias.count_nonzero() == 0


def test_first_loss_is_that_of_a_uniform_guess() -> None:
    assert GPT.loss(GPT.build(), GPT.batch(8)).item() == pytest.approx(math.log(50), rel=0.02)


def test_tied_head_is_one_parameter() -> None:
    model, untied = GPT.with_config(tie_head=True).build(), GPT.build()
    assert model.head.weight is model.token_embedding.weight
    assert sum(p.numel() for p in untied.parameters()) - sum(p.numel() for p in model.parameters()) == 50 * 32


def test_dropout_acts_in_training_only() -> None:
    model, ids = GPT.with_config(dropout=0.5).build(), GPT.batch(1)["input_ids"]
    assert not torch.equal(model.train()(ids), model(ids))
    assert torch.equal(model.eval()(ids), model(ids))


def test_refusals() -> None:
    with pytest.raises(ValueError, match="25 tokens; the model has 24 positions"):
        GPT.build()(torch.zeros(1, 25, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"hidden_size \(32\) is no multiple of model.num_heads \(5\)"):
        GPT.with_config(num_heads=5).build()
    with pytest.raises(ValueError, match=r"data.seq_len is 30; the model has 24 positions"):
        gpt.build(GPT.config, DataInfo("causal_lm", vocab_size=50, seq_len=30))
    with pytest.raises(ValueError, match=r"model.vocab_size is null and the data does not say it"):
        gpt.build(GPT.config, DataInfo("causal_lm"))
    with pytest.raises(ValueError, match=r"model.vocab_size is 40, but the data needs 50"):
        GPT.with_config(vocab_size=40).build()
