"""How text becomes token ids: bytes, a local transformers tokenizer, or one learned from the corpus.

Every tokenizer here has an end-of-document id, gives no special tokens of its own, and reads text that spells a
special token (``</s>``) as text.
"""

from __future__ import annotations

import abc
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recipes.data import vocab
from recipes.data.errors import DataError
from recipes.data.files import Key, expanded, files_identity

Ids = NDArray[np.int64]
_TOKENIZER_FILES = (".json", ".txt", ".model", ".vocab", ".tiktoken", ".jinja")
_LEARNED_FILE, _ABOUT_FILE = "tokenizer.json", "tokenizer_config.json"
_SPECIALS = ("<pad>", "</s>", "<unk>")
_ENDLESS_WORD = re.compile(r"(\S{1000})(?=\S)")


class TextTokenizer(abc.ABC):
    """Bytes of UTF-8 in, ids out.

    vocab_size: ids in use or reserved, without sentinels that are laid on top.
    eos_id: end of document. pad_id: None if the tokenizer has none.
    own_sentinels: ids of T5's ``<extra_id_0>``, ``<extra_id_1>``, ... if the tokenizer brings them.
    """

    vocab_size: int
    eos_id: int
    pad_id: int | None = None
    own_sentinels: tuple[int, ...] = ()
    name: str

    @abc.abstractmethod
    def identity(self) -> Key:
        """JSON values that change when the ids may have changed."""

    @abc.abstractmethod
    def encode(self, pieces: list[bytes]) -> list[Ids]:
        """Ids of each piece, without special tokens."""

    @abc.abstractmethod
    def decode(self, ids: Ids) -> str:
        """Text for people: ids that stand for no text are left out."""


class ByteTokenizer(TextTokenizer):
    """One id per byte; see ``recipes.data.vocab``."""

    vocab_size = vocab.byte_vocab_size()
    eos_id = vocab.EOS_ID
    pad_id = vocab.PAD_ID
    name = "bytes"

    def identity(self) -> Key:
        return {"kind": "bytes"}

    def encode(self, pieces: list[bytes]) -> list[Ids]:
        return [np.frombuffer(piece, dtype=np.uint8).astype(np.int64) + vocab.FIRST_BYTE_ID for piece in pieces]

    def decode(self, ids: Ids) -> str:
        is_byte = (ids >= vocab.FIRST_BYTE_ID) & (ids < vocab.NUM_BYTE_IDS)
        return (ids[is_byte] - vocab.FIRST_BYTE_ID).astype(np.uint8).tobytes().decode("utf-8", errors="replace")


class FolderTokenizer(TextTokenizer):
    """A transformers tokenizer saved in a folder (``save_pretrained``). Nothing is downloaded."""

    def __init__(self, path: str) -> None:
        folder = expanded(path)
        if not folder.is_dir():
            raise DataError(
                f"data.tokenizer.path={path}: no such folder. Expected a folder written by a tokenizer's "
                "save_pretrained(); nothing is downloaded"
            )
        self._folder = folder
        self._tokenizer = _load_transformers_tokenizer(folder)
        self.name = f"tokenizer of {folder}"
        ids = self._tokenizer.get_vocab()
        top = max(ids.values()) + 1
        self.pad_id = self._tokenizer.pad_token_id
        ends = (self._tokenizer.eos_token_id, self._tokenizer.sep_token_id)
        found = next((end for end in ends if end is not None), None)
        self.eos_id = top if found is None else found  # one that has no end token gets an id of its own on top
        self.vocab_size = top + (found is None)
        self.own_sentinels = _numbered_sentinels(ids)

    def files(self) -> list[Path]:
        """Everything in the folder that may say how text becomes ids."""
        return sorted(path for path in self._folder.iterdir() if path.suffix in _TOKENIZER_FILES)

    def identity(self) -> Key:
        return {"kind": "local", "files": files_identity(self.files(), self._folder)}

    def encode(self, pieces: list[bytes]) -> list[Ids]:
        texts = [piece.decode("utf-8", errors="ignore") for piece in pieces]  # pieces may begin inside a character
        encoded = self._tokenizer(texts, add_special_tokens=False, split_special_tokens=True, verbose=False)
        return [np.array(ids, dtype=np.int64) for ids in encoded["input_ids"]]

    def decode(self, ids: Ids) -> str:
        known = ids[ids < len(self._tokenizer)]
        return str(self._tokenizer.decode(known.tolist(), skip_special_tokens=True))


class LearnedTokenizer(TextTokenizer):
    """Byte-level pair encoding, learned from the training split and kept in the cache."""

    pad_id = 0
    eos_id = 1

    def __init__(self, folder: Path, vocab_size: int) -> None:
        from tokenizers import Tokenizer  # a heavy import that byte runs do not pay for

        self.folder = folder
        self.vocab_size = vocab_size  # as asked for: a small corpus may have taught fewer
        self._tokenizer = Tokenizer.from_file(str(folder / _LEARNED_FILE))
        self._tokenizer.encode_special_tokens = True
        self.name = f"{self._tokenizer.get_vocab_size()} learned tokens"

    def files(self) -> list[Path]:
        return [self.folder / _LEARNED_FILE, self.folder / _ABOUT_FILE]

    def identity(self) -> Key:
        return {"kind": "train", "folder": self.folder.name}

    def encode(self, pieces: list[bytes]) -> list[Ids]:
        texts = [piece.decode("utf-8", errors="ignore") for piece in pieces]
        encoded = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(found.ids, dtype=np.int64) for found in encoded]

    def decode(self, ids: Ids) -> str:
        known = ids[ids < self._tokenizer.get_vocab_size()]
        return str(self._tokenizer.decode(known.tolist(), skip_special_tokens=True))


def learn_tokenizer(folder: Path, texts: Iterable[str], vocab_size: int) -> None:
    """Learn byte-level pairs from ``texts`` and write the tokenizer into ``folder``, for us and for transformers."""
    import json

    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers  # heavy, see above

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(_SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_without_endless_words(texts), trainer)
    tokenizer.save(str(folder / _LEARNED_FILE))
    pad, eos, unk = _SPECIALS
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": pad, "eos_token": eos, "unk_token": unk}
    (folder / _ABOUT_FILE).write_text(json.dumps(about, indent=2) + "\n")


def _without_endless_words(texts: Iterable[str]) -> Iterator[str]:
    """The same text in more pieces: learning takes the square of a word's length, and minified code or base64 has
    words of megabytes."""
    for text in texts:
        yield from (piece for piece in _ENDLESS_WORD.split(text) if piece)


@dataclass(frozen=True)
class Vocabulary:
    """Ids of one run: the tokenizer's, and on top what the task needs beyond them."""

    vocab_size: int
    eos_id: int
    pad_id: int | None
    sentinel_ids: tuple[int, ...]


def vocabulary_for(tokenizer: TextTokenizer, num_spans: int, num_sentinels: int) -> Vocabulary:
    """Add what is missing on top: ``num_sentinels`` ids (none for a causal model), and with them a padding id.

    A tokenizer that brings a sentinel for each of the ``num_spans`` spans keeps its own.
    """
    if num_sentinels == 0:
        return Vocabulary(tokenizer.vocab_size, tokenizer.eos_id, tokenizer.pad_id, ())
    size, pad_id = tokenizer.vocab_size, tokenizer.pad_id
    if pad_id is None:
        size, pad_id = size + 1, size
    if len(tokenizer.own_sentinels) >= num_spans:
        return Vocabulary(size, tokenizer.eos_id, pad_id, tokenizer.own_sentinels)
    size += num_sentinels
    return Vocabulary(size, tokenizer.eos_id, pad_id, vocab.sentinel_ids(size, num_sentinels))


def _load_transformers_tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer  # takes seconds to import: only runs that name a folder pay

    try:
        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as error:
        raise DataError(
            f"data.tokenizer.path={folder}: transformers cannot load a tokenizer from it "
            f"({type(error).__name__}: {error}). Expected the files that save_pretrained() writes "
            "(tokenizer.json, tokenizer_config.json)"
        ) from error


def _numbered_sentinels(ids: dict[str, int]) -> tuple[int, ...]:
    """Ids of <extra_id_0>, <extra_id_1>, ... as far as they go without a gap."""
    found: list[int] = []
    while f"<extra_id_{len(found)}>" in ids:
        found.append(ids[f"<extra_id_{len(found)}>"])
    return tuple(found)
