"""Parameter counts as arithmetic: what a config will build, told without torch. Tests compare with real meta builds.

Counts are by unit, because that is what the engine shards: a unit's parameters lie in one flat parameter, padded to a
multiple of F. Sizes that only the data knows (a tokenizer's vocabulary, rows of tables) may be unknown here.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

from recipes.data.files import expanded
from recipes.data.vocab import resolved_seq_len, text_vocab_size
from recipes.registry import MODELS
from recipes.schema.data import (
    CriteoConfig,
    DataConfig,
    ImageFolderConfig,
    SyntheticClicksConfig,
    SyntheticImagesConfig,
    TextDataConfig,
)
from recipes.schema.model import DeepViTConfig, DHENConfig, GPTConfig, ModelConfig, RegNetConfig, T5Config

CRITEO_DENSE, CRITEO_TABLES = 13, 26
CHANNELS = 3  # of an image
T5_POSITION_BUCKETS = 32
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


class UnknownSize(ValueError):
    """The count needs something that is known only when the data is read or the model is built."""


@dataclass(frozen=True)
class ExpectedFacts:
    """What the config alone says about the data; None where reading the data decides."""

    vocab_size: int | None = None
    seq_len: int | None = None
    num_dense: int | None = None
    table_rows: tuple[int, ...] | None = None
    num_classes: int | None = None
    image_size: int | None = None


@dataclass(frozen=True)
class UnitSize:
    """``count`` units of ``numel`` parameters each."""

    name: str
    count: int
    numel: int


@dataclass(frozen=True)
class ModelSize:
    """units: with ``units=blocks``, in forward order, the root last. tables_numel: kept out of the units (DHEN)."""

    units: tuple[UnitSize, ...]
    tables_numel: int = 0
    tables_bytes: int = 0

    @property
    def numel(self) -> int:
        """Parameters that the engine manages."""
        return sum(unit.count * unit.numel for unit in self.units)

    def shard_numel(self, factor: int) -> int:
        """Elements of one rank's shards: every unit is padded by at most F - 1."""
        return sum(unit.count * -(-unit.numel // factor) for unit in self.units)


def expected_facts(model: ModelConfig, data: DataConfig) -> ExpectedFacts:
    """What the data of this config will say about itself, as far as it is known beforehand."""
    if isinstance(data, TextDataConfig):
        longest = longest_sequence(model)
        vocab_size = text_vocab_size(data, MODELS[model.kind].task, longest)
        return ExpectedFacts(vocab_size=vocab_size, seq_len=resolved_seq_len(data.seq_len, longest))
    if isinstance(data, SyntheticClicksConfig):
        return ExpectedFacts(num_dense=data.num_dense, table_rows=(data.rows_per_table,) * data.num_tables)
    if isinstance(data, CriteoConfig):
        return ExpectedFacts(num_dense=CRITEO_DENSE, table_rows=(data.rows_per_table,) * CRITEO_TABLES)
    if isinstance(data, SyntheticImagesConfig):
        return ExpectedFacts(num_classes=data.num_classes, image_size=data.image_size or image_size(model))
    if isinstance(data, ImageFolderConfig):
        return ExpectedFacts(num_classes=_num_folders(data.path), image_size=data.image_size or image_size(model))
    return ExpectedFacts()


def longest_sequence(model: ModelConfig) -> int | None:
    """The model's longest sequence in tokens, where it has one."""
    return getattr(model, "max_seq_len", None)


def image_size(model: ModelConfig) -> int | None:
    """Pixels on a side that the model wants, where it says so."""
    return getattr(model, "image_size", None)


def model_size(model: ModelConfig, facts: ExpectedFacts) -> ModelSize:
    """Parameters by unit.

    Raises:
        UnknownSize: a plugin's model, or a size that only the data knows.
    """
    count = COUNTS.get(type(model))
    if count is None:
        raise UnknownSize(f"model kind {model.kind} is a plugin's: counted when it is built")
    return count(model, facts)


def num_params(model: ModelConfig, facts: ExpectedFacts) -> int:
    """All parameters, embedding tables that stay outside the engine included. Raises UnknownSize as above."""
    size = model_size(model, facts)
    return size.numel + size.tables_numel


def _gpt(model: GPTConfig, facts: ExpectedFacts) -> ModelSize:
    """Block 12 D^2 + 13 D; root: token and position embeddings, last norm, head without bias."""
    width = model.hidden_size
    vocab_size = _known("vocab_size", model.vocab_size, facts.vocab_size)
    embeddings = (1 if model.tie_head else 2) * vocab_size * width + model.max_seq_len * width
    return ModelSize(
        (
            UnitSize("block", model.num_layers, 12 * width**2 + 13 * width),
            UnitSize("root", 1, embeddings + 2 * width),
        )
    )


def _t5(model: T5Config, facts: ExpectedFacts) -> ModelSize:
    """The first block of each stack also holds the stack's relative position biases."""
    width, inner = model.d_model, model.num_heads * model.d_kv
    vocab_size = _known("vocab_size", model.vocab_size, facts.vocab_size)
    feed_forward = (3 if model.feed_forward_proj == "gated-gelu" else 2) * width * model.d_ff
    encoder = 4 * width * inner + feed_forward + 2 * width
    decoder = 8 * width * inner + feed_forward + 3 * width
    bias = T5_POSITION_BUCKETS * model.num_heads
    embeddings = (1 if model.tie_word_embeddings else 2) * vocab_size * width
    return ModelSize(
        (
            UnitSize("first encoder block", 1, encoder + bias),
            UnitSize("encoder block", model.num_layers - 1, encoder),
            UnitSize("first decoder block", 1, decoder + bias),
            UnitSize("decoder block", model.num_decoder_layers - 1, decoder),
            UnitSize("root", 1, embeddings + 2 * width),
        )
    )


def _dhen(model: DHENConfig, facts: ExpectedFacts) -> ModelSize:
    """m tokens of width d; each layer's modules share out the m tokens; tables stay outside the units."""
    m, d = model.num_tokens, model.embedding_dim
    rows = _table_rows(model, facts)
    num_dense = _known("num_dense", model.num_dense, facts.num_dense)
    layer = 2 * d
    for position, kind in enumerate(model.modules):
        each, extra = divmod(m, len(model.modules))
        tokens = each + (position < extra)
        if kind == "advanced_dlrm":
            layer += _mlp([m * (m - 1) // 2, model.dlrm_hidden, tokens * d])
        else:
            layer += 2 * m * d * model.dcn_rank + m * d + m * tokens
    features = len(rows) + (1 if num_dense else 0)
    root = features * m + _mlp([m * d, *model.top_mlp, 1])
    if num_dense:
        root += _mlp([num_dense, *model.bottom_mlp, d])
    tables = sum(rows) * d
    return ModelSize(
        (UnitSize("layer", model.num_layers, layer), UnitSize("root", 1, root)),
        tables,
        tables * DTYPE_BYTES[model.table_dtype],
    )


def _table_rows(model: DHENConfig, facts: ExpectedFacts) -> tuple[int, ...]:
    if model.table_rows is not None:
        return tuple(model.table_rows)
    if model.num_tables is not None and model.rows_per_table is not None:
        return (model.rows_per_table,) * model.num_tables
    if facts.table_rows is None:
        raise UnknownSize("rows of the embedding tables are known when the data has been read")
    return facts.table_rows


def _regnet(model: RegNetConfig, facts: ExpectedFacts) -> ModelSize:
    """Each convolution is followed by a BatchNorm of 2 per channel; y adds squeeze-and-excitation with biases."""
    classes = _known("num_classes", model.num_classes, facts.num_classes)
    units = []
    channels_in = model.embedding_size
    for stage, (depth, channels) in enumerate(zip(model.depths, model.hidden_sizes, strict=True), start=1):
        first = _regnet_layer(model, channels_in, channels) + channels_in * channels + 2 * channels
        units.append(UnitSize(f"first layer of stage {stage}", 1, first))
        units.append(UnitSize(f"layer of stage {stage}", depth - 1, _regnet_layer(model, channels, channels)))
        channels_in = channels
    stem = CHANNELS * 9 * model.embedding_size + 2 * model.embedding_size
    units.append(UnitSize("root", 1, stem + channels_in * classes + classes))
    return ModelSize(tuple(units))


def _regnet_layer(model: RegNetConfig, channels_in: int, channels: int) -> int:
    groups = max(1, channels // model.groups_width)
    numel = channels_in * channels + channels * (channels // groups) * 9 + channels * channels + 3 * 2 * channels
    if model.layer_type == "y":
        squeezed = round(channels_in / 4)
        numel += channels * squeezed + squeezed + squeezed * channels + channels
    return numel


def _deepvit(model: DeepViTConfig, facts: ExpectedFacts) -> ModelSize:
    width, heads, inner = model.hidden_size, model.num_heads, model.num_heads * model.head_dim
    classes = _known("num_classes", model.num_classes, facts.num_classes)
    attention = 2 * width + 3 * width * inner + heads**2 + 2 * heads + inner * width + width
    feed_forward = 2 * width + 2 * width * model.mlp_size + model.mlp_size + width
    patches = (model.image_size // model.patch_size) ** 2
    embedding = CHANNELS * model.patch_size**2 * width + width + width + (patches + 1) * width
    root = embedding + 2 * width + width * classes + classes
    return ModelSize(
        (
            UnitSize("attention", model.num_layers, attention),
            UnitSize("feed-forward", model.num_layers, feed_forward),
            UnitSize("root", 1, root),
        )
    )


COUNTS: dict[type, Callable[..., ModelSize]] = {
    GPTConfig: _gpt,
    T5Config: _t5,
    DHENConfig: _dhen,
    RegNetConfig: _regnet,
    DeepViTConfig: _deepvit,
}


def _known(name: str, from_model: int | None, from_data: int | None) -> int:
    if from_model is not None:
        return from_model
    if from_data is None:
        raise UnknownSize(f"model.{name} is null and known only when the data has been read")
    return from_data


def _mlp(widths: list[int]) -> int:
    return sum((a + 1) * b for a, b in itertools.pairwise(widths))


def _num_folders(path: str) -> int | None:
    folder = expanded(path)
    if not folder.is_dir():
        return None
    return sum(entry.is_dir() and not entry.name.startswith(".") for entry in folder.iterdir())
