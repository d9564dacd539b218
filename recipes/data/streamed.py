"""Streaming: samples tokenised when they are needed, by position in the text.

All pieces of a split, each followed by one separator byte, form one long virtual text. Block i starts at byte
i * stride of it and takes as many tokens as a block needs, so any rank can make any block alone, the position in the
data stays one integer, and shuffling is the same permutation as for prepared data: there is no shuffle buffer whose
content a resume could lose. With the byte tokenizer the blocks are exactly those of prepared data. With others a
byte count does not say where the next unread token is; the stride is then what the densest sampled text needs, so
that neighbouring blocks overlap a little rather than leave text out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from recipes.data.corpus import Pieces, RandomAccessCorpus
from recipes.data.packing import TokenBlocks
from recipes.data.tokenizer import ByteTokenizer, Ids, TextTokenizer

_NUM_PROBES = 64  # places where bytes per token is measured
_DENSE_QUANTILE = 0.05  # of the probes: nearly all text gives more bytes per token than this
_FIRST_GUESS = 4.0  # bytes per token, for reading; too low costs another read, nothing else
_MARGIN_TOKENS = 4  # the last ones read may be parts of a word that was cut
_LOOK_BACK_BYTES = 64  # for the start of a word
_WHITESPACE = b" \n\t\r"


class VirtualText:
    """The pieces of a split, one separator byte after each, as one text of ``num_bytes`` bytes."""

    def __init__(self, corpus: RandomAccessCorpus, pieces: Pieces) -> None:
        self._corpus, self._pieces = corpus, pieces
        self._ends = (pieces.lasts - pieces.firsts + 1).cumsum()
        self.num_bytes = int(self._ends[-1]) if len(pieces) else 0

    def read(self, first: int, last: int) -> list[tuple[bytes, bool]]:
        """Bytes [first, last), in [0, num_bytes): per piece, its bytes and whether its separator follows in range."""
        found: list[tuple[bytes, bool]] = []
        number = int(np.searchsorted(self._ends, first, side="right"))
        while first < last:
            end = int(self._ends[number])  # of the piece with its separator
            shift = int(self._pieces.lasts[number]) - (end - 1)  # from here to the document's own byte numbers
            until = min(last, end - 1)
            raw = b""
            if first < until:
                raw = self._corpus.document_bytes(int(self._pieces.numbers[number]), first + shift, until + shift)
            found.append((raw, last >= end))
            first, number = end, number + 1
        return found

    def word_start(self, place: int) -> int:
        """Where the word at byte ``place`` begins; ``place`` itself if that is too far back."""
        before, is_ended = self.read(max(0, place - _LOOK_BACK_BYTES), place)[-1] if place else (b"", True)
        if is_ended:
            return place  # a document begins here
        space = max(before.rfind(white) for white in (bytes([code]) for code in _WHITESPACE))
        is_piece_start = len(before) < _LOOK_BACK_BYTES
        return place - (len(before) - space - 1) if space >= 0 or is_piece_start else place


class StreamedTokens(TokenBlocks):
    """Blocks of ``length`` ids, tokenised on demand. ``overlap``: ids that neighbours share, as for prepared data."""

    def __init__(
        self, corpus: RandomAccessCorpus, pieces: Pieces, tokenizer: TextTokenizer, *, length: int, overlap: int
    ) -> None:
        self._text = VirtualText(corpus, pieces)
        self._tokenizer = tokenizer
        self._length = length
        if isinstance(tokenizer, ByteTokenizer):
            self.bytes_per_token = 1.0
            self._is_exact = True
            self._stride = length - overlap
            self._num_blocks = max(0, (self._text.num_bytes - overlap) // self._stride)
            return
        self.bytes_per_token = _FIRST_GUESS
        self._is_exact = False
        self._num_blocks = 0
        if self._holds_one_block():
            probes = self._probe_bytes_per_token()
            self.bytes_per_token = float(np.mean(probes))
            self._stride = max(1, math.floor(float(np.quantile(probes, _DENSE_QUANTILE)) * (length - overlap)))
            self._num_blocks = max(1, self._text.num_bytes // self._stride)

    def __len__(self) -> int:
        return self._num_blocks

    def blocks(self, indices: Sequence[int]) -> Ids:
        make = self._exact_block if self._is_exact else self._block_from
        return np.stack([make(index * self._stride) for index in indices])

    def _exact_block(self, first: int) -> Ids:
        return self._encoded(first, first + self._length)

    def _block_from(self, first: int) -> Ids:
        """The ``length`` ids from the word at ``first`` on; the text begins again after its end."""
        first = self._text.word_start(first)
        num_bytes = math.ceil(1.2 * self.bytes_per_token * (self._length + _MARGIN_TOKENS))
        while True:
            ids = self._encoded(first, first + num_bytes)
            if len(ids) >= self._length + _MARGIN_TOKENS:
                return ids[: self._length]
            num_bytes *= 2

    def _encoded(self, first: int, last: int) -> Ids:
        end = np.array([self._tokenizer.eos_id])
        read = self._text.read(first, min(last, self._text.num_bytes))
        while last > self._text.num_bytes:  # around the end
            last -= self._text.num_bytes
            read += self._text.read(0, min(last, self._text.num_bytes))
        encoded = self._tokenizer.encode([raw for raw, _ in read])
        rows = [
            row for ids, (_, is_ended) in zip(encoded, read, strict=True) for row in ([ids, end] if is_ended else [ids])
        ]
        return np.concatenate(rows)

    def _holds_one_block(self) -> bool:
        """Whether the text gives ``length`` ids at all; looks at no more of it than that needs."""
        num_bytes = self._length
        while num_bytes < self._text.num_bytes:
            if len(self._encoded(0, num_bytes)) >= self._length:
                return True
            num_bytes *= 2
        return self._text.num_bytes > 0 and len(self._encoded(0, self._text.num_bytes)) >= self._length

    def _probe_bytes_per_token(self) -> list[float]:
        """At evenly spaced places, over about the length of a block."""
        num_bytes = min(self._text.num_bytes, math.ceil(_FIRST_GUESS * self._length))
        starts = np.linspace(0, self._text.num_bytes - num_bytes, _NUM_PROBES).astype(np.int64)
        return [num_bytes / max(1, len(self._encoded(start, start + num_bytes))) for start in starts.tolist()]
