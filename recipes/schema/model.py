"""Models: one dataclass per kind. Sizes are the models' own; null means "taken from the data"."""

from __future__ import annotations

from dataclasses import dataclass

from recipes.schema.fields import MISSING, described


@dataclass
class ModelConfig:
    """What every model has."""

    kind: str = described(MISSING, "registry name of the model family (gpt, t5, dhen, regnet, deepvit, or a plugin's)")
    provenance: str = described("", "where the sizes come from: exact, likely, or our own proposal")
    init_from: str | None = described(
        None, "folder of a model in Hugging Face's layout (safetensors) to start from; null: random weights"
    )


@dataclass
class GPTConfig(ModelConfig):
    """Decoder-only transformer in the style of minGPT: pre-norm blocks, learned positions, untied head."""

    kind: str = described("gpt", "gpt")
    num_layers: int = described(MISSING, "transformer blocks", at_least=1)
    num_heads: int = described(MISSING, "attention heads; divides hidden_size", at_least=1)
    hidden_size: int = described(MISSING, "width of the residual stream", at_least=1)
    vocab_size: int | None = described(None, "tokens in the vocabulary; null: the tokenizer's", at_least=2)
    max_seq_len: int = described(MISSING, "learned positions, the longest sequence in tokens", at_least=1)
    dropout: float = described(0.0, "probability, on embeddings, attention and residuals", at_least=0, below=1)
    tie_head: bool = described(False, "share the head's matrix with the token embedding")
    kernels: str = described(
        "fused",
        "fused: attention and GELU are a kernel each; explicit: one operation after the other, as in minGPT, which "
        "keeps scores, probabilities and dropout mask of attention",
        choices=("fused", "explicit"),
    )


@dataclass
class T5Config(ModelConfig):
    """Encoder-decoder of transformers (T5ForConditionalGeneration)."""

    kind: str = described("t5", "t5")
    d_model: int = described(MISSING, "width of the residual stream", at_least=1)
    d_kv: int = described(MISSING, "width of one head", at_least=1)
    d_ff: int = described(MISSING, "width of the feed-forward", at_least=1)
    num_heads: int = described(MISSING, "attention heads", at_least=1)
    num_layers: int = described(MISSING, "encoder blocks", at_least=1)
    num_decoder_layers: int = described(MISSING, "decoder blocks", at_least=1)
    vocab_size: int | None = described(
        None, "tokens in the vocabulary; null: the tokenizer's plus sentinels", at_least=2
    )
    dropout: float = described(0.1, "probability", at_least=0, below=1)
    feed_forward_proj: str = described("relu", "activation", choices=("relu", "gated-gelu"))
    tie_word_embeddings: bool = described(True, "share the head's matrix with the embedding")
    kernels: str = described(
        "fused",
        "fused: attention is one kernel; explicit: one operation after the other, as the library once did, which takes "
        "more memory",
        choices=("fused", "explicit"),
    )
    use_cache: bool = described(
        False, "keep keys and values of decoder blocks during training, as the library's default does"
    )


@dataclass
class DHENConfig(ModelConfig):
    """Deep hierarchical ensemble network (arXiv 2203.11014): sharded embedding tables, dense interaction layers."""

    kind: str = described("dhen", "dhen")
    num_layers: int = described(MISSING, "stacked ensemble layers", at_least=1)
    embedding_dim: int = described(MISSING, "width of one feature token", at_least=1)
    num_tokens: int = described(MISSING, "feature tokens between layers", at_least=2)
    modules: list[str] = described(
        ["advanced_dlrm", "dcn_low_rank"],
        "interaction modules of each layer, in order; each of advanced_dlrm, dcn_low_rank",
    )
    dlrm_hidden: int = described(MISSING, "hidden width of advanced_dlrm's MLP", at_least=1)
    dcn_rank: int = described(MISSING, "rank of the low-rank cross matrix", at_least=1)
    bottom_mlp: list[int] = described(MISSING, "hidden widths for the dense features", at_least=1)
    top_mlp: list[int] = described(MISSING, "hidden widths of the head, before the final 1", at_least=1)
    num_dense: int | None = described(None, "dense features; null: the data's", at_least=0)
    table_rows: list[int] | None = described(None, "rows of each embedding table; null: the data's", at_least=1)
    num_tables: int | None = described(None, "with rows_per_table: this many equal tables", at_least=1)
    rows_per_table: int | None = described(None, "rows of each of num_tables tables", at_least=1)
    table_dtype: str = described("float32", "dtype of the tables", choices=("float32", "float16", "bfloat16"))
    table_lr: float = described(0.05, "learning rate of the tables' row-wise Adagrad", above=0)


@dataclass
class RegNetConfig(ModelConfig):
    """Convolutional network of transformers (RegNetForImageClassification)."""

    kind: str = described("regnet", "regnet")
    layer_type: str = described("y", "y has squeeze-and-excitation", choices=("x", "y"))
    depths: list[int] = described(MISSING, "layers of each stage", at_least=1)
    hidden_sizes: list[int] = described(MISSING, "channels of each stage; groups_width divides each", at_least=1)
    groups_width: int = described(MISSING, "channels of one convolution group", at_least=1)
    embedding_size: int = described(32, "channels of the stem", at_least=1)
    num_classes: int | None = described(None, "labels; null: the data's", at_least=2)
    image_size: int = described(224, "pixels on a side", at_least=1)


@dataclass
class DeepViTConfig(ModelConfig):
    """Vision transformer with re-attention (arXiv 2103.11886)."""

    kind: str = described("deepvit", "deepvit")
    image_size: int = described(MISSING, "pixels on a side; patch_size divides it", at_least=1)
    patch_size: int = described(MISSING, "pixels on a side of one patch", at_least=1)
    num_classes: int | None = described(None, "labels; null: the data's", at_least=2)
    hidden_size: int = described(MISSING, "width of the residual stream", at_least=1)
    num_layers: int = described(MISSING, "transformer layers, two residual units each", at_least=1)
    num_heads: int = described(MISSING, "attention heads", at_least=1)
    head_dim: int = described(64, "width of one head", at_least=1)
    mlp_size: int = described(MISSING, "width of the feed-forward", at_least=1)
    dropout: float = described(0.0, "probability", at_least=0, below=1)
