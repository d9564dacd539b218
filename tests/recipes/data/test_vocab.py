"""Token arithmetic that the checker asks for, without torch."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipes.data import vocab
from recipes.schema.data import StdlibTextConfig, TokenizerConfig


@pytest.mark.parametrize(
    ("input_len", "raw_len", "target_len"),
    [(512, 568, 114), (1024, 1137, 229), (256, 284, 58)],  # T5's published numbers for density 0.15, spans of 3
)
def test_lengths_are_those_of_t5(input_len: int, raw_len: int, target_len: int) -> None:
    lengths = vocab.span_lengths(input_len, 0.15, 3.0)
    assert (lengths.raw_len, lengths.input_len, lengths.target_len) == (raw_len, input_len, target_len)


@given(
    input_len=st.integers(4, 600),
    noise_density=st.floats(0.001, 0.95),
    mean_span_length=st.floats(1, 40),
)
def test_input_lengths_are_exact_and_spans_fit(input_len: int, noise_density: float, mean_span_length: float) -> None:
    lengths = vocab.span_lengths(input_len, noise_density, mean_span_length)
    assert lengths.input_len == input_len
    assert 1 <= lengths.num_spans <= min(lengths.num_noise_tokens, lengths.raw_len - lengths.num_noise_tokens)


def test_byte_vocabulary() -> None:
    assert vocab.byte_vocab_size() == 259
    assert vocab.byte_vocab_size(100) == 359
    assert vocab.sentinel_ids(359, 3) == (358, 357, 356)


@pytest.mark.parametrize(
    ("kind", "task", "expected"),
    [
        ("bytes", "causal_lm", 259),
        ("bytes", "seq2seq_lm", 359),
        ("train", "causal_lm", 8192),
        ("train", "seq2seq_lm", 8292),
        ("local", "causal_lm", None),
    ],
)
def test_vocab_size_before_reading_anything(kind: str, task: str, expected: int | None) -> None:
    config = StdlibTextConfig(tokenizer=TokenizerConfig(kind=kind))
    assert vocab.text_vocab_size(config, task, 512) == expected


def test_long_samples_get_more_sentinels() -> None:
    config = StdlibTextConfig(seq_len=4096)
    lengths = vocab.resolved_span_lengths(config, None)
    assert lengths.num_spans > 100
    assert vocab.text_vocab_size(config, "seq2seq_lm", None) == 259 + lengths.num_spans


@pytest.mark.parametrize("module", ["vocab", "errors", "files"])
def test_the_checker_can_ask_without_heavy_imports(module: str) -> None:
    code = (
        f"import sys, recipes.data.{module}; "
        "print([name for name in ('torch', 'numpy', 'pyarrow', 'datasets', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
