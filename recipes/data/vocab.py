"""Token ids and lengths as arithmetic: what the config checker may ask without loading torch, numpy or a tokenizer.

Byte vocabulary (the ids of ByT5, arXiv 2105.13626): 0 pad, 1 end of document, 2 unknown, then the 256 bytes.
Sentinels of span corruption lie on top of whatever vocabulary is used, the first one at the highest id, as in T5.
"""

from __future__ import annotations

from dataclasses import dataclass

from recipes.schema.data import TextDataConfig

PAD_ID = 0
EOS_ID = 1
UNK_ID = 2
FIRST_BYTE_ID = 3
NUM_BYTE_IDS = FIRST_BYTE_ID + 256
DEFAULT_SEQ_LEN = 512
MIN_SENTINELS = 100  # T5's number: the vocabulary then is the same for all common lengths


def byte_vocab_size(num_sentinels: int = 0) -> int:
    """Ids of the byte tokenizer, sentinels included."""
    return NUM_BYTE_IDS + num_sentinels


def sentinel_ids(vocab_size: int, num_sentinels: int) -> tuple[int, ...]:
    """Ids of sentinel 0, 1, ...: counted down from the top of a vocabulary of ``vocab_size`` ids."""
    return tuple(range(vocab_size - 1, vocab_size - 1 - num_sentinels, -1))


@dataclass(frozen=True)
class SpanLengths:
    """Token counts of one span-corruption sample. All samples of a run share them, so batches need no padding.

    raw_len: text tokens that go in, masked and kept.
    num_noise_tokens: masked tokens; num_spans: the spans they form, one sentinel each.
    input_len: kept tokens, sentinels and the end token; target_len: sentinels, masked tokens and the end token.
    """

    raw_len: int
    num_noise_tokens: int
    num_spans: int

    @property
    def input_len(self) -> int:
        return self.raw_len - self.num_noise_tokens + self.num_spans + 1

    @property
    def target_len(self) -> int:
        return self.num_noise_tokens + self.num_spans + 1


def span_lengths(input_len: int, noise_density: float, mean_span_length: float) -> SpanLengths:
    """The most text that span corruption turns into exactly ``input_len`` (at least 4) input tokens.

    With T5's 512 tokens, density 0.15 and spans of 3 this is 568 raw tokens and a target of 114.
    """
    raw_len = max(2, input_len - 2)
    while _corrupted(raw_len + 1, noise_density, mean_span_length).input_len <= input_len:
        raw_len += 1
    found = _corrupted(raw_len, noise_density, mean_span_length)
    # Extreme densities step over a length: make it exact with kept tokens, the masked part stays as it was.
    return SpanLengths(raw_len + input_len - found.input_len, found.num_noise_tokens, found.num_spans)


def _corrupted(raw_len: int, noise_density: float, mean_span_length: float) -> SpanLengths:
    """Counts for ``raw_len`` tokens: at least one masked and one kept token, and a kept one before every span."""
    num_noise = min(max(round(raw_len * noise_density), 1), raw_len - 1)
    num_spans = min(max(round(num_noise / mean_span_length), 1), num_noise, raw_len - num_noise)
    return SpanLengths(raw_len, num_noise, num_spans)


def resolved_seq_len(data_seq_len: int | None, model_seq_len: int | None) -> int:
    """Tokens of one sample's input: the data's wish, else the model's longest, else 512."""
    return data_seq_len or model_seq_len or DEFAULT_SEQ_LEN


def resolved_span_lengths(config: TextDataConfig, model_seq_len: int | None) -> SpanLengths:
    """Span lengths of this data config under a model whose longest sequence is ``model_seq_len`` (None: any)."""
    corruption = config.span_corruption
    seq_len = resolved_seq_len(config.seq_len, model_seq_len)
    return span_lengths(seq_len, corruption.noise_density, corruption.mean_span_length)


def num_sentinels(config: TextDataConfig, task: str, model_seq_len: int | None) -> int:
    """Sentinels that lie on top of the vocabulary: none for causal models."""
    if task != "seq2seq_lm":
        return 0
    return max(MIN_SENTINELS, resolved_span_lengths(config, model_seq_len).num_spans)


def text_vocab_size(config: TextDataConfig, task: str, model_seq_len: int | None) -> int | None:
    """Vocabulary of a text source, as ``DataInfo.vocab_size`` will say; None where only the tokenizer's files know."""
    sentinels = num_sentinels(config, task, model_seq_len)
    if config.tokenizer.kind == "bytes":
        return byte_vocab_size(sentinels)
    if config.tokenizer.kind == "train":
        return config.tokenizer.vocab_size + sentinels
    return None
