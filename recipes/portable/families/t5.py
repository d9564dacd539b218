"""Our T5 is transformers' own ``T5ForConditionalGeneration``: the same names and shapes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from recipes.portable.families.family import Family, Place, Shapes, SpecialIds, known, size_differences
from recipes.schema.model import T5Config

_EMBEDDINGS = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
_SHARED, _HEAD = "shared.weight", "lm_head.weight"
_UNUSED = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"  # in the first published folders
_SIZES = {
    name: name
    for name in (
        "d_model",
        "d_kv",
        "d_ff",
        "num_heads",
        "num_layers",
        "num_decoder_layers",
        "vocab_size",
        "feed_forward_proj",
    )
}


class T5(Family):
    """See the module's docstring."""

    def __init__(self, model: T5Config) -> None:
        self._model = model

    def place(self, name: str) -> Place | None:
        if name in _EMBEDDINGS or (name == _HEAD and self._model.tie_word_embeddings):
            return None
        return Place(name)

    def config(self, shapes: Shapes, special: SpecialIds) -> dict[str, Any]:
        model = self._model
        sizes = {name: getattr(model, name) for name in _SIZES}
        pad = 0 if special.pad is None else special.pad
        return {
            "architectures": ["T5ForConditionalGeneration"],
            "model_type": "t5",
            "is_encoder_decoder": True,
            **sizes,
            "vocab_size": shapes[_SHARED][0],
            "dropout_rate": model.dropout,
            "tie_word_embeddings": model.tie_word_embeddings,
            "pad_token_id": pad,
            "decoder_start_token_id": pad,
            "eos_token_id": 1 if special.eos is None else special.eos,
        }

    def generation(self, special: SpecialIds) -> dict[str, Any]:
        pad = 0 if special.pad is None else special.pad
        return known(decoder_start_token_id=pad, eos_token_id=special.eos, pad_token_id=pad)

    def differences(self, config: Mapping[str, Any]) -> list[tuple[str, object, object]]:
        kind = config.get("model_type", "t5")
        if kind not in ("t5", "mt5"):
            return [("model.kind", f"model_type {kind}", "t5")]
        found = size_differences(config, self._model, _SIZES)
        is_tied = config.get("tie_word_embeddings", True) is not False
        if config and is_tied != self._model.tie_word_embeddings:
            found.append(("model.tie_word_embeddings", is_tied, self._model.tie_word_embeddings))
        return found

    def is_ignorable(self, name: str) -> bool:
        return name in (*_EMBEDDINGS, _UNUSED) or (name == _HEAD and self._model.tie_word_embeddings)
