"""Token files: the corpus tokenised once, both splits, each one long row of ids that is cut into samples.

A folder holds ``train.bin`` and ``eval.bin`` (little-endian uint16 or uint32, documents one after the other, each
ended by the end-of-document id) and ``meta.json``. Ranks map the files into memory and share the pages.
"""

from __future__ import annotations

import abc
import json
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from recipes.data.corpus import Corpus, Pieces, TextSplits, as_bytes
from recipes.data.errors import DataError
from recipes.data.progress import Progress
from recipes.data.tokenizer import Ids, TextTokenizer

META_FILE = "meta.json"
_BATCH_BYTES = 1 << 20  # text given to the tokenizer at once
_BATCH_PIECES = 1024


class TokenBlocks(abc.ABC):
    """A split as equally long rows of ids: block i is the raw material of sample i, on every rank, in every epoch."""

    @abc.abstractmethod
    def __len__(self) -> int:
        """Blocks."""

    @abc.abstractmethod
    def blocks(self, indices: Sequence[int]) -> Ids:
        """[len(indices), block length] int64."""


@dataclass(frozen=True)
class SplitFacts:
    """What was written: tokens (end-of-document ids included), bytes of text, documents, CRC-32 of the token file."""

    num_tokens: int = 0
    num_bytes: int = 0
    num_documents: int = 0
    checksum: int = 0


@dataclass(frozen=True)
class TokenFacts:
    """Content of ``meta.json``."""

    dtype: str
    train: SplitFacts
    eval: SplitFacts

    @property
    def fingerprint(self) -> str:
        """Equal for equal tokens in an equal split, wherever and whenever they were prepared."""
        return f"{self.train.num_tokens}-{self.train.checksum:08x}-{self.eval.checksum:08x}"

    @property
    def bytes_per_token(self) -> float:
        """An end-of-document id stands for one byte, as a separator would: exactly 1.0 for the byte tokenizer."""
        both = (self.train, self.eval)
        num_bytes = sum(split.num_bytes + split.num_documents for split in both)
        return num_bytes / sum(split.num_tokens for split in both)


class PackedTokens(TokenBlocks):
    """Blocks of ``length`` ids of a token file; neighbours share ``overlap`` ids. The file's rest is dropped."""

    def __init__(self, path: Path, dtype: str, num_tokens: int, *, length: int, overlap: int) -> None:
        """Raises DataError if the file is not as long as its meta data says."""
        itemsize = np.dtype(dtype).itemsize
        if not path.is_file() or path.stat().st_size != num_tokens * itemsize:
            raise DataError(
                f"{path} is damaged: expected {num_tokens * itemsize} bytes. Delete {path.parent}; "
                "the next run prepares it again"
            )
        # An empty file cannot be mapped.
        self._tokens: NDArray[np.unsignedinteger] = (
            np.memmap(path, dtype=dtype, mode="r") if num_tokens else np.zeros(0, dtype=dtype)
        )
        self._length, self._stride = length, length - overlap
        self._num_blocks = max(0, (num_tokens - overlap) // self._stride)

    def __len__(self) -> int:
        return self._num_blocks

    def blocks(self, indices: Sequence[int]) -> Ids:
        starts = np.asarray(indices, dtype=np.int64) * self._stride
        return self._tokens[starts[:, None] + np.arange(self._length)].astype(np.int64)


def read_facts(folder: Path) -> TokenFacts:
    content = json.loads((folder / META_FILE).read_text())
    return TokenFacts(content["dtype"], SplitFacts(**content["train"]), SplitFacts(**content["eval"]))


def write_tokens(
    folder: Path, corpus: Corpus, splits: TextSplits, tokenizer: TextTokenizer, report: Callable[[str], None]
) -> None:
    """Tokenise both splits into ``folder``."""
    dtype = "<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4"
    progress = Progress(report, f"tokenising {corpus.name}", splits.train.num_bytes + splits.eval.num_bytes)
    with (folder / "train.bin").open("wb") as train_file, (folder / "eval.bin").open("wb") as eval_file:
        writers = (_SplitWriter(train_file, tokenizer, dtype), _SplitWriter(eval_file, tokenizer, dtype))
        for writer_number, piece in texts_of(corpus, (splits.train, splits.eval)):
            writers[writer_number].add(piece)
            progress.add(len(piece))
        facts = TokenFacts(dtype, *(writer.finish() for writer in writers))
    (folder / META_FILE).write_text(json.dumps(asdict(facts)) + "\n")


def texts_of(corpus: Corpus, wanted: Sequence[Pieces]) -> Iterator[tuple[int, bytes]]:
    """Read the corpus once: (which of ``wanted``, bytes of the piece), in document order."""
    places = [0] * len(wanted)
    for number, document in enumerate(corpus.documents()):
        raw: bytes | None = None
        for which, pieces in enumerate(wanted):
            place = places[which]
            if place == len(pieces) or pieces.numbers[place] != number:
                continue
            raw = as_bytes(document.text) if raw is None else raw
            if len(raw) < pieces.lasts[place]:
                raise DataError(f"{document.where}: changed while it was being read; start again")
            yield which, raw[pieces.firsts[place] : pieces.lasts[place]]
            places[which] += 1
        if all(place == len(pieces) for place, pieces in zip(places, wanted, strict=True)):
            return
    raise DataError(f"{corpus.name}: documents disappeared while they were being read; start again")


class _SplitWriter:
    """Collects pieces, tokenises many at once, appends their ids to a file."""

    def __init__(self, file: BinaryIO, tokenizer: TextTokenizer, dtype: str) -> None:
        self._file, self._tokenizer, self._dtype = file, tokenizer, dtype
        self._waiting: list[bytes] = []
        self._waiting_bytes = 0
        self._num_tokens = self._num_bytes = self._num_documents = self._checksum = 0

    def add(self, piece: bytes) -> None:
        self._waiting.append(piece)
        self._waiting_bytes += len(piece)
        if self._waiting_bytes >= _BATCH_BYTES or len(self._waiting) >= _BATCH_PIECES:
            self._write()

    def finish(self) -> SplitFacts:
        self._write()
        return SplitFacts(self._num_tokens, self._num_bytes, self._num_documents, self._checksum)

    def _write(self) -> None:
        if not self._waiting:
            return
        end = np.array([self._tokenizer.eos_id])
        rows = [part for ids in self._tokenizer.encode(self._waiting) for part in (ids, end)]
        raw = np.concatenate(rows).astype(self._dtype).tobytes()
        self._file.write(raw)
        self._checksum = zlib.crc32(raw, self._checksum)
        self._num_tokens += len(raw) // np.dtype(self._dtype).itemsize
        self._num_bytes += self._waiting_bytes
        self._num_documents += len(self._waiting)
        self._waiting, self._waiting_bytes = [], 0
