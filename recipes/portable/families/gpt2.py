"""Our GPT as transformers' ``GPT2LMHeadModel``: the same network under other names.

Norms before attention and feed-forward, biases, tanh-GELU, learned positions, queries, keys and values in one matrix:
all as there. Only the four matrices of a block are stored transposed, and the head may be untied.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from recipes.portable.families.family import Family, Place, Shapes, SpecialIds, known, size_differences
from recipes.schema.model import GPTConfig

_ROOT = {
    "token_embedding.weight": "wte.weight",
    "position_embedding.weight": "wpe.weight",
    "final_norm.weight": "ln_f.weight",
    "final_norm.bias": "ln_f.bias",
}
_BLOCK = {
    "attention_norm": "ln_1",
    "attention.qkv": "attn.c_attn",
    "attention.out": "attn.c_proj",
    "feed_forward_norm": "ln_2",
    "feed_forward.up": "mlp.c_fc",
    "feed_forward.down": "mlp.c_proj",
}
_IN_BLOCK = re.compile(r"blocks\.(\d+)\.(.+)\.(weight|bias)")
_MASK = re.compile(r"(transformer\.)?h\.\d+\.attn\.(bias|masked_bias)")
_PREFIX, _HEAD = "transformer.", "lm_head.weight"
_SIZES = {
    "n_embd": "hidden_size",
    "n_layer": "num_layers",
    "n_head": "num_heads",
    "n_positions": "max_seq_len",
    "vocab_size": "vocab_size",
}


class GPT2(Family):
    """See the module's docstring."""

    def __init__(self, model: GPTConfig) -> None:
        self._model = model

    def place(self, name: str) -> Place | None:
        if name == "head.weight":
            return None if self._model.tie_head else Place(_HEAD)
        if name in _ROOT:
            return Place(_PREFIX + _ROOT[name])
        match = _IN_BLOCK.fullmatch(name)
        assert match is not None and match[2] in _BLOCK, f"{name} is no tensor of a GPT"
        is_matrix = match[3] == "weight" and "norm" not in match[2]
        return Place(f"{_PREFIX}h.{match[1]}.{_BLOCK[match[2]]}.{match[3]}", is_transposed=is_matrix)

    def config(self, shapes: Shapes, special: SpecialIds) -> dict[str, Any]:
        model = self._model
        return {
            "architectures": ["GPT2LMHeadModel"],
            "model_type": "gpt2",
            "vocab_size": shapes["token_embedding.weight"][0],
            "n_positions": model.max_seq_len,
            "n_embd": model.hidden_size,
            "n_layer": model.num_layers,
            "n_head": model.num_heads,
            "activation_function": "gelu_new",
            "layer_norm_epsilon": 1e-5,
            **dict.fromkeys(("embd_pdrop", "attn_pdrop", "resid_pdrop"), model.dropout),
            "tie_word_embeddings": model.tie_head,
            "bos_token_id": special.eos,  # documents follow each other: the end of one is the beginning of the next
            "eos_token_id": special.eos,
            "pad_token_id": special.pad,
        }

    def generation(self, special: SpecialIds) -> dict[str, Any]:
        return known(bos_token_id=special.eos, eos_token_id=special.eos, pad_token_id=special.pad)

    def differences(self, config: Mapping[str, Any]) -> list[tuple[str, object, object]]:
        kind = config.get("model_type", "gpt2")
        if kind != "gpt2":
            return [("model.kind", f"model_type {kind}", "gpt (gpt2)")]
        found = size_differences(config, self._model, _SIZES)
        if config.get("activation_function", "gelu_new") not in ("gelu_new", "gelu_pytorch_tanh"):
            found.append(("activation", config["activation_function"], "gelu_new"))
        if config.get("n_inner") not in (None, 4 * self._model.hidden_size):
            found.append(("width of the feed-forward", config["n_inner"], 4 * self._model.hidden_size))
        if config and config.get("tie_word_embeddings", True) and not self._model.tie_head:
            found.append(("model.tie_head", True, False))
        return found

    def is_ignorable(self, name: str) -> bool:
        return _MASK.fullmatch(name) is not None or (name == _HEAD and self._model.tie_head)

    def found(self, place: Place, names: Collection[str]) -> Place:
        """The published GPT-2 folders leave the prefix out."""
        bare = place.name.removeprefix(_PREFIX)
        return Place(bare, place.is_transposed) if place.name not in names and bare in names else place
