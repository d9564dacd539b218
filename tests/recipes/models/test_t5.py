"""T5 alone: it is the library's model, called for logits; what holding keys and values does and does not change."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import Tensor, nn
from transformers import T5ForConditionalGeneration

from tests.recipes.models.tiny import T5


def library_twin(model: T5ForConditionalGeneration) -> T5ForConditionalGeneration:
    twin = T5ForConditionalGeneration(model.config)
    twin.load_state_dict(model.state_dict())
    return twin


def test_logits_are_the_librarys_and_no_loss_is_computed() -> None:
    model, batch = T5.build(), T5.batch(3)
    batch["labels"][:, -2:] = -100  # not counted, and not a token the decoder may read
    ours = model(input_ids=batch["input_ids"], labels=batch["labels"])
    theirs = library_twin(model)(input_ids=batch["input_ids"], labels=batch["labels"])
    torch.testing.assert_close(ours.logits, theirs.logits)
    torch.testing.assert_close(T5.loss(model, batch), theirs.loss)
    assert ours.loss is None


def test_state_dict_loads_into_the_library_by_name() -> None:
    model = T5.build()
    assert model.state_dict().keys() == library_twin(model).state_dict().keys()


@pytest.mark.parametrize("tied", [True, False])
def test_tying(tied: bool) -> None:
    model = T5.with_config(tie_word_embeddings=tied).build()
    assert (model.lm_head.weight is model.shared.weight) == tied
    assert model.encoder.embed_tokens.weight is model.shared.weight


class Watched:
    """Weak references to what the decoder's k and v projections of one forward gave, and who was alive at its end."""

    def __init__(self, model: nn.Module) -> None:
        self.seen: list[weakref.ref[Tensor]] = []
        self.alive_at_the_end = -1
        for name, module in model.decoder.named_modules():
            if name.endswith((".k", ".v")):
                module.register_forward_hook(lambda _module, _args, out: self.seen.append(weakref.ref(out)))
        model.lm_head.register_forward_pre_hook(lambda *_: self.count())

    def count(self) -> None:
        gc.collect()
        self.alive_at_the_end = sum(reference() is not None for reference in self.seen)


def test_use_cache_holds_keys_and_values_until_forward_returns() -> None:
    batch = T5.batch(2)
    for use_cache, held in [(False, 0), (True, 3 * 4)]:  # 3 decoder blocks, k and v of two attentions
        model = T5.with_config(use_cache=use_cache).build()
        watched = Watched(model)
        with torch.no_grad():  # autograd keeps some of them for its own reasons
            model(input_ids=batch["input_ids"], labels=batch["labels"])
        assert len(watched.seen) == 12
        assert watched.alive_at_the_end == held
        watched.count()
        assert watched.alive_at_the_end == 0


def test_use_cache_changes_no_number() -> None:
    batch, gradients = T5.batch(2), []
    for use_cache in (False, True):
        model = T5.with_config(use_cache=use_cache).build()
        T5.loss(model, batch).backward()
        gradients.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_an_error_in_forward_holds_nothing() -> None:
    model = T5.with_config(use_cache=True).build()
    with pytest.raises(IndexError):
        model(input_ids=torch.full((1, 4), 1), labels=torch.full((1, 4), 50))
    assert model.keys_and_values._held == []


@pytest.mark.parametrize("use_cache", [False, True])
def test_explicit_kernels_are_the_same_function(use_cache: bool) -> None:
    batch, outcomes = T5.batch(3), []
    for kernels in ("fused", "explicit"):
        model = T5.with_config(kernels=kernels, use_cache=use_cache).build()
        loss = T5.loss(model, batch)
        loss.backward()
        outcomes.append((loss, dict(model.named_parameters()), model.state_dict().keys()))
    (fused, parameters, names), (explicit, others, other_names) = outcomes
    assert names == other_names  # a checkpoint of one is one of the other
    torch.testing.assert_close(explicit, fused)
    for name, parameter in parameters.items():
        torch.testing.assert_close(others[name].grad, parameter.grad, msg=name)


def test_an_explicit_mask_hides_what_the_fused_one_hides() -> None:
    batch = T5.batch(2)
    shown = torch.ones_like(batch["input_ids"])
    shown[0, 3:] = 0
    logits = [
        T5.with_config(kernels=kernels).build().eval()(**batch, attention_mask=shown).logits
        for kernels in ("fused", "explicit")
    ]
    torch.testing.assert_close(*logits)
    unmasked = T5.with_config(kernels="explicit").build().eval()(**batch).logits
    assert not torch.allclose(unmasked[0], logits[1][0])
    torch.testing.assert_close(unmasked[1], logits[1][1])


def test_explicit_attention_drops_probabilities_in_training_only() -> None:
    model, batch = T5.with_config(kernels="explicit", dropout=0.5).build(), T5.batch(1)
    assert torch.equal(model.eval()(**batch).logits, model(**batch).logits)
    attention, x = model.train().encoder.block[0].layer[0].SelfAttention, torch.randn(1, 8, model.config.d_model)
    assert not torch.equal(attention(x)[0], attention(x)[0])
