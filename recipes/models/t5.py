"""T5 (arXiv 1910.10683): ``T5ForConditionalGeneration`` of transformers, called for its logits alone.

B samples, S source tokens, T target tokens, d ``d_model``, inner ``num_heads * d_kv``, ff ``d_ff``, V vocabulary.

Parameters (tied): encoder block 4 d inner + 2 d ff + 2 d, decoder block 8 d inner + 2 d ff + 3 d, root V d + 2 d;
the first block of each stack holds 32 H relative position biases more. A gated feed-forward has 3 d ff; an untied
head V d more.
``t5_11b`` (t5-11b v1.0) has 11,307,321,344.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import T5Config as HFConfig
from transformers import T5ForConditionalGeneration
from transformers.modeling_outputs import Seq2SeqLMOutput
from transformers.models.t5.modeling_t5 import T5Attention, T5Block

from recipes.data.records import DataInfo
from recipes.models.sizes_from_data import at_least_as_data
from recipes.schema.model import T5Config

DEFAULT_LEN = 512  # tokens, where the data says nothing; T5's own


class KeysAndValues:
    """What ``use_cache`` costs in training: every decoder block's keys and values, held until forward returns.

    The library's cache object would do it too, but it appends: a block that activation checkpointing runs again would
    attend to everything twice. Here an output hook on the ``k`` and ``v`` projections only holds on to the tensors,
    and only between ``open`` and ``close``; the numbers are the same with and without.
    """

    def __init__(self) -> None:
        self._is_open = False
        self._held: list[Tensor] = []

    def watch(self, attention: T5Attention) -> None:
        for projection in (attention.k, attention.v):
            projection.register_forward_hook(self._hold)

    def _hold(self, module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        if self._is_open:
            self._held.append(output)

    def open(self) -> None:
        self._is_open = True

    def close(self) -> None:
        self._is_open = False
        self._held.clear()


class ExplicitAttention(T5Attention):
    """One operation after the other, as the library did until it had fused kernels: scores, probabilities (in float32
    and in the compute dtype) and what dropout left of them are tensors [B, H, S, S]. The first block of a stack adds
    the mask to its position bias, which makes one [B, H, S, S] of it that all blocks of the stack share until their
    backward. The function is the library's, but for the order of sums and the random numbers of dropout."""

    def forward(
        self,
        hidden_states: Tensor,
        mask: Tensor | None = None,
        key_value_states: Tensor | None = None,
        position_bias: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor, None]:
        """hidden_states [B, S, d]; key_value_states [B, K, d] of the encoder, None in self-attention; mask: added to
        scores, [B, 1, 1 or S, K]; position_bias [B, H, S, K]: the first block's."""
        source = hidden_states if key_value_states is None else key_value_states
        query, key, value = self._heads(self.q(hidden_states)), self._heads(self.k(source)), self._heads(self.v(source))
        scores = torch.matmul(query, key.transpose(2, 3))
        if position_bias is None:
            position_bias = self._bias(scores, mask)
        scores += position_bias
        probabilities = F.softmax(scores.float(), dim=-1).type_as(scores)
        probabilities = F.dropout(probabilities, p=self.dropout, training=self.training)
        mixed = torch.matmul(probabilities, value).transpose(1, 2).contiguous()
        return self.o(mixed.view(*hidden_states.shape[:-1], -1)), position_bias, None

    def _heads(self, x: Tensor) -> Tensor:
        """[B, S, inner] to [B, H, S, d_kv]."""
        return x.view(*x.shape[:2], self.n_heads, self.key_value_proj_dim).transpose(1, 2)

    def _bias(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        """[B, H, S, K]."""
        batch, num_heads, query_len, key_len = scores.shape
        if self.has_relative_attention_bias:
            bias = self.compute_bias(query_len, key_len, device=scores.device)
        else:
            bias = scores.new_zeros(1, num_heads, query_len, key_len)
        return bias + (scores.new_zeros(batch, 1, 1, key_len) if mask is None else mask)


class T5(T5ForConditionalGeneration):
    """``input_ids`` [B, S] and ``labels`` [B, T] (-100: not counted) to an object with ``logits`` [B, T, V].

    The decoder reads the labels shifted right. Unlike the base class it computes no loss: the task does, once.
    """

    def __init__(self, config: HFConfig, keep_keys_and_values: bool = False) -> None:
        super().__init__(config)
        self.keys_and_values = KeysAndValues() if keep_keys_and_values else None
        if self.keys_and_values is not None:
            for module in self.decoder.modules():
                if isinstance(module, T5Attention):
                    self.keys_and_values.watch(module)

    def forward(self, input_ids: Tensor | None = None, labels: Tensor | None = None, **kwargs: Any) -> Seq2SeqLMOutput:
        if labels is not None:
            kwargs["decoder_input_ids"] = self._shift_right(labels)
        if self.keys_and_values is None:
            return super().forward(input_ids=input_ids, **kwargs)
        self.keys_and_values.open()
        try:
            return super().forward(input_ids=input_ids, **kwargs)
        finally:
            self.keys_and_values.close()


class UntiedT5(T5):
    """With a head of its own, as T5 v1.1 has. The library ties the head whatever its config says (since version 5)."""

    _tied_weights_keys = {  # noqa: RUF012  # declared so by the base class
        "encoder.embed_tokens.weight": "shared.weight",
        "decoder.embed_tokens.weight": "shared.weight",
    }


def build(config: T5Config, info: DataInfo) -> T5:
    """Raises ValueError if the vocabulary is too small for the data."""
    pad_id = 0 if info.pad_id is None else info.pad_id
    options: dict[str, Any] = {  # by dict: the library declares only some of what it takes
        "vocab_size": at_least_as_data("model.vocab_size", config.vocab_size, info.vocab_size),
        "d_model": config.d_model,
        "d_kv": config.d_kv,
        "d_ff": config.d_ff,
        "num_heads": config.num_heads,
        "num_layers": config.num_layers,
        "num_decoder_layers": config.num_decoder_layers,
        "dropout_rate": config.dropout,
        "feed_forward_proj": config.feed_forward_proj,
        "tie_word_embeddings": config.tie_word_embeddings,  # to the library: scale what the head reads by 1/sqrt(d)
        "use_cache": False,  # see KeysAndValues
        "pad_token_id": pad_id,
        "decoder_start_token_id": pad_id,
        "eos_token_id": 1 if info.eos_id is None else info.eos_id,
    }
    cls = T5 if config.tie_word_embeddings else UntiedT5
    is_explicit = config.kernels == "explicit"
    if is_explicit:
        options["attn_implementation"] = "eager"
    model = cls(HFConfig(**options), keep_keys_and_values=config.use_cache)
    if is_explicit:
        for module in model.modules():
            if isinstance(module, T5Attention):
                module.__class__ = ExplicitAttention
    return model


def unit_classes() -> tuple[type[nn.Module], ...]:
    return (T5Block,)


def forward_flops(config: T5Config, info: DataInfo) -> float:
    """Matrix products of encoder, decoder and head. With S = T and an ungated feed-forward:

    L_e (2 S (4 d inner + 2 d ff) + 4 S^2 inner) + L_d (2 S (8 d inner + 2 d ff) + 8 S^2 inner) + 2 S d V.
    """
    vocab_size = at_least_as_data("model.vocab_size", config.vocab_size, info.vocab_size)
    return unit_forward_flops(config, info) + 2.0 * _lengths(info)[1] * config.d_model * vocab_size


def unit_forward_flops(config: T5Config, info: DataInfo) -> float:
    """The blocks' part of it: what activation checkpointing runs again."""
    source, target = _lengths(info)
    d, inner = config.d_model, config.num_heads * config.d_kv
    feed_forward = (3 if config.feed_forward_proj.startswith("gated") else 2) * d * config.d_ff
    encoder = 2 * source * (4 * d * inner + feed_forward) + 4 * source**2 * inner
    self_attention = 2 * target * 4 * d * inner + 4 * target**2 * inner
    cross_attention = 2 * (target + source) * 2 * d * inner + 4 * target * source * inner  # k, v read the encoder
    decoder = self_attention + cross_attention + 2 * target * feed_forward
    return float(config.num_layers * encoder + config.num_decoder_layers * decoder)


def _lengths(info: DataInfo) -> tuple[int, int]:
    """(S, T)."""
    return info.seq_len or DEFAULT_LEN, info.target_len or info.seq_len or DEFAULT_LEN
