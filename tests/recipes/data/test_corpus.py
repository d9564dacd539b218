"""Splitting documents: disjoint, complete, about as much as asked, the same for everybody."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from recipes.data.corpus import Pieces, as_bytes, limited_lengths, split_documents
from recipes.data.errors import DataError

LENGTHS = st.lists(st.integers(0, 500), min_size=1, max_size=60)


def bytes_of(pieces: Pieces) -> set[tuple[int, int]]:
    rows = zip(pieces.numbers.tolist(), pieces.firsts.tolist(), pieces.lasts.tolist(), strict=True)
    return {(number, place) for number, first, last in rows for place in range(first, last)}


@given(lengths=LENGTHS, eval_fraction=st.floats(0, 0.9))
def test_every_byte_is_in_exactly_one_split(lengths: list[int], eval_fraction: float) -> None:
    assume(sum(lengths) > 0)
    splits = split_documents(np.array(lengths), eval_fraction, "here")
    train, held_out = bytes_of(splits.train), bytes_of(splits.eval)
    assert not train & held_out
    assert train | held_out == {(number, place) for number, length in enumerate(lengths) for place in range(length)}
    goal = round(sum(lengths) * eval_fraction)
    assert goal * 0.9 - 1 <= len(held_out) <= goal


def test_one_long_document_is_cut_at_its_end() -> None:
    splits = split_documents(np.array([1000]), 0.1, "here")
    assert bytes_of(splits.eval) == {(0, place) for place in range(900, 1000)}


def test_whole_documents_are_held_out_where_there_are_many() -> None:
    splits = split_documents(np.full(1000, 100), 0.05, "here")
    assert len(splits.eval) == 50
    assert not set(splits.eval.numbers.tolist()) & set(splits.train.numbers.tolist())
    assert np.diff(splits.eval.numbers).max() > 5  # from all over, not one stretch


def test_nothing_is_held_out_on_request() -> None:
    assert len(split_documents(np.array([10, 20]), 0.0, "here").eval) == 0


def test_a_corpus_without_text_is_refused() -> None:
    with pytest.raises(DataError, match="/c holds no text: all of its 3 documents are empty"):
        split_documents(np.zeros(3, dtype=np.int64), 0.1, "/c")


@given(lengths=LENGTHS, max_bytes=st.integers(1, 2000))
def test_reading_stops_at_the_limit(lengths: list[int], max_bytes: int) -> None:
    kept = limited_lengths(np.array(lengths), max_bytes)
    assert kept.sum() == min(sum(lengths), max_bytes)
    assert (kept[:-1] == lengths[: len(kept) - 1]).all()


def test_a_lone_surrogate_does_not_stop_a_run() -> None:
    assert as_bytes("a\ud800b") == b"a?b"
