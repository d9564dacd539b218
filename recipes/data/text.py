"""From a corpus to samples: what all text sources share, and what a plugin calls with a corpus of its own."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from recipes.data.cache import prepared_folder
from recipes.data.corpus import Corpus, RandomAccessCorpus, TextSplits, split_documents
from recipes.data.errors import DataError
from recipes.data.files import Key
from recipes.data.packing import PackedTokens, TokenBlocks, read_facts, texts_of, write_tokens
from recipes.data.progress import Progress, readable
from recipes.data.records import DataInfo, Dataset, PrepareRequest, Splits
from recipes.data.streamed import StreamedTokens
from recipes.data.text_samples import CausalSamples, SpanCorruptedSamples
from recipes.data.tokenizer import (
    ByteTokenizer,
    FolderTokenizer,
    LearnedTokenizer,
    TextTokenizer,
    Vocabulary,
    learn_tokenizer,
    vocabulary_for,
)
from recipes.data.vocab import SpanLengths, num_sentinels, resolved_seq_len, resolved_span_lengths
from recipes.schema.data import TextDataConfig

_FORMAT = 1  # of the prepared folders; a change in what they hold or in how documents are read raises it
_LENGTHS_FILE = "lengths.npy"
_EVAL_SEED = 0  # of the masks of held-out samples: the same ones in every run


def prepare_text(config: TextDataConfig, request: PrepareRequest, corpus: Corpus, *, streaming: bool = False) -> Splits:
    """Hold a part of ``corpus`` out, tokenise both parts (once: they are kept in the cache), cut samples.

    ``streaming``: tokenise while training instead; ``corpus`` must then be a ``RandomAccessCorpus``.
    Raises DataError with a remedy where text, tokenizer and lengths do not fit together.
    """
    shape = _sample_shape(config, request.task, request.seq_len)
    survey = _Survey(config, request, corpus)
    tokenizer = _tokenizer_for(config, survey)
    if streaming:
        assert isinstance(corpus, RandomAccessCorpus)
        blocks = _streamed_blocks(survey, corpus, tokenizer, shape)
    else:
        blocks = _packed_blocks(survey, tokenizer, shape)
    _check_sizes(config, shape, blocks)
    return _as_splits(config, request, corpus, tokenizer, shape, blocks)


def text_info(config: TextDataConfig, task: str, model_seq_len: int | None) -> DataInfo | None:
    """What of a text source's facts needs no text to be read; None where the tokenizer is learned from it.

    Raises DataError where tokenizer and lengths do not fit together.
    """
    tokenizer = _ready_tokenizer(config)
    if tokenizer is None:
        return None
    shape = _sample_shape(config, task, model_seq_len)
    return _facts(shape, task, tokenizer, _vocabulary(config, task, model_seq_len, tokenizer, shape))


@dataclass(frozen=True)
class _SampleShape:
    """What one sample takes from the row of tokens. spans: None for causal samples."""

    seq_len: int
    block_len: int
    overlap: int
    spans: SpanLengths | None


@dataclass(frozen=True)
class _Blocks:
    """Both splits. amounts: of text, for messages."""

    train: TokenBlocks
    eval: TokenBlocks
    bytes_per_token: float
    fingerprint: str
    train_amount: str
    eval_amount: str


def _sample_shape(config: TextDataConfig, task: str, model_seq_len: int | None) -> _SampleShape:
    seq_len = resolved_seq_len(config.seq_len, model_seq_len)
    if model_seq_len is not None and seq_len > model_seq_len:
        raise DataError(f"data.seq_len={seq_len} is longer than the model's longest sequence, {model_seq_len}")
    if task == "causal_lm":
        return _SampleShape(seq_len, seq_len + 1, 1, None)
    if task == "seq2seq_lm":
        spans = resolved_span_lengths(config, model_seq_len)
        return _SampleShape(seq_len, spans.raw_len, 0, spans)
    raise DataError(
        f"data.kind={config.kind} gives text, but the model's task is {task}; choose data for that task "
        "(data=flights or data=synthetic_clicks for clicks, data=synthetic_images for images) or a text model"
    )


class _Survey:
    """Lengths of all documents, read once and cached, and the split that follows from them."""

    def __init__(self, config: TextDataConfig, request: PrepareRequest, corpus: Corpus) -> None:
        self.request, self.corpus = request, corpus
        self._eval_fraction = config.eval_fraction
        key: Key = {"format": _FORMAT, "corpus": corpus.identity(), "max_bytes": config.max_bytes}

        def build(folder: Path) -> None:
            request.report(f"reading {corpus.name}")
            np.save(folder / _LENGTHS_FILE, corpus.lengths(config.max_bytes))

        self._folder = prepared_folder(request, "lengths", key, build)
        self.key: Key = {**key, "eval_fraction": config.eval_fraction}  # of everything made from the split

    @cached_property
    def splits(self) -> TextSplits:
        return split_documents(self._lengths, self._eval_fraction, self.corpus.name)

    @property
    def fingerprint(self) -> str:
        return f"{len(self._lengths)}-{zlib.crc32(self._lengths.tobytes()):08x}"

    @cached_property
    def _lengths(self) -> np.ndarray:
        return np.load(self._folder / _LENGTHS_FILE)


def _ready_tokenizer(config: TextDataConfig) -> TextTokenizer | None:
    """None: it has to be learned."""
    wanted = config.tokenizer
    if wanted.kind == "bytes":
        return ByteTokenizer()
    if wanted.kind == "local":
        if not wanted.path:
            raise DataError("data.tokenizer.kind=local needs data.tokenizer.path, the folder of the tokenizer")
        return FolderTokenizer(wanted.path)
    return None


def _tokenizer_for(config: TextDataConfig, survey: _Survey) -> TextTokenizer:
    wanted, ready = config.tokenizer, _ready_tokenizer(config)
    if ready is not None:
        return ready

    def build(folder: Path) -> None:
        survey.request.report(f"learning {wanted.vocab_size:,} tokens from {survey.corpus.name}")
        pieces = survey.splits.train
        progress = Progress(survey.request.report, "learning tokens: read", pieces.num_bytes)

        def texts() -> Iterator[str]:  # the held-out part teaches nothing
            for _, raw in texts_of(survey.corpus, [pieces]):
                progress.add(len(raw))
                yield raw.decode("utf-8", errors="ignore")

        learn_tokenizer(folder, texts(), wanted.vocab_size)

    key = {**survey.key, "vocab_size": wanted.vocab_size}
    return LearnedTokenizer(prepared_folder(survey.request, "tokenizers", key, build), wanted.vocab_size)


def _packed_blocks(survey: _Survey, tokenizer: TextTokenizer, shape: _SampleShape) -> _Blocks:
    request, corpus = survey.request, survey.corpus
    folder = prepared_folder(
        request,
        "tokens",
        {**survey.key, "tokenizer": tokenizer.identity()},
        lambda folder: write_tokens(folder, corpus, survey.splits, tokenizer, request.report),
    )
    facts = read_facts(folder)
    train, held_out = (
        PackedTokens(path, facts.dtype, split.num_tokens, length=shape.block_len, overlap=shape.overlap)
        for path, split in ((folder / "train.bin", facts.train), (folder / "eval.bin", facts.eval))
    )
    amounts = [f"{readable(split.num_tokens)} tokens" for split in (facts.train, facts.eval)]
    return _Blocks(train, held_out, facts.bytes_per_token, facts.fingerprint, amounts[0], amounts[1])


def _streamed_blocks(
    survey: _Survey, corpus: RandomAccessCorpus, tokenizer: TextTokenizer, shape: _SampleShape
) -> _Blocks:
    train, held_out = (
        StreamedTokens(corpus, pieces, tokenizer, length=shape.block_len, overlap=shape.overlap)
        for pieces in (survey.splits.train, survey.splits.eval)
    )
    amounts = [readable(pieces.num_bytes, "B") for pieces in (survey.splits.train, survey.splits.eval)]
    return _Blocks(train, held_out, train.bytes_per_token, survey.fingerprint, amounts[0], amounts[1])


def _check_sizes(config: TextDataConfig, shape: _SampleShape, blocks: _Blocks) -> None:
    if len(blocks.train) == 0:
        raise DataError(
            f"too little text to train on: {blocks.train_amount} after holding out "
            f"{config.eval_fraction:.0%}, one sample needs {shape.block_len} tokens. "
            f"Give more text, or a data.seq_len below {shape.seq_len}"
        )
    if len(blocks.eval) == 0 and config.eval_fraction > 0:
        raise DataError(
            f"too little text to evaluate on: data.eval_fraction={config.eval_fraction} holds out "
            f"{blocks.eval_amount}, one sample needs {shape.block_len} tokens. Raise data.eval_fraction, "
            f"give more text, lower data.seq_len={shape.seq_len}, or hold nothing out with data.eval_fraction=0"
        )


def _as_splits(
    config: TextDataConfig,
    request: PrepareRequest,
    corpus: Corpus,
    tokenizer: TextTokenizer,
    shape: _SampleShape,
    blocks: _Blocks,
) -> Splits:
    spans = shape.spans
    vocabulary = _vocabulary(config, request.task, request.seq_len, tokenizer, shape)
    train: Dataset
    held_out: Dataset
    if spans is None:
        train, held_out = CausalSamples(blocks.train), CausalSamples(blocks.eval)
    else:
        train = SpanCorruptedSamples(blocks.train, spans, vocabulary, request.seed)
        held_out = SpanCorruptedSamples(blocks.eval, spans, vocabulary, _EVAL_SEED)
    facts = _facts(shape, request.task, tokenizer, vocabulary)
    info = replace(
        facts,
        bytes_per_token=blocks.bytes_per_token,
        num_train=len(train),
        num_eval=len(held_out),
        description=(
            f"{corpus.name}, {tokenizer.name}: {blocks.train_amount} to train on, {blocks.eval_amount} held out, "
            f"in samples of {shape.seq_len} tokens"
        ),
        extras={"fingerprint": blocks.fingerprint, **facts.extras},
    )
    return Splits(train, held_out, info)


def _vocabulary(
    config: TextDataConfig, task: str, model_seq_len: int | None, tokenizer: TextTokenizer, shape: _SampleShape
) -> Vocabulary:
    num_spans = shape.spans.num_spans if shape.spans else 0
    return vocabulary_for(tokenizer, num_spans, num_sentinels(config, task, model_seq_len))


def _facts(shape: _SampleShape, task: str, tokenizer: TextTokenizer, vocabulary: Vocabulary) -> DataInfo:
    """extras: ``tokenizer``, and ``sentinel_ids`` (tuple of int: of ``<extra_id_0>``, ``<extra_id_1>``, ...)."""
    return DataInfo(
        task=task,
        vocab_size=vocabulary.vocab_size,
        seq_len=shape.seq_len,
        target_len=shape.spans.target_len if shape.spans else None,
        pad_id=vocabulary.pad_id,
        eos_id=vocabulary.eos_id,
        extras={"tokenizer": tokenizer, "sentinel_ids": vocabulary.sentinel_ids},
    )
