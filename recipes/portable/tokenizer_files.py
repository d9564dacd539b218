"""The run's tokenizer beside an exported model, as files that transformers loads."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from recipes.data.records import DataInfo
from recipes.data.tokenizer import ByteTokenizer, FolderTokenizer, LearnedTokenizer, TextTokenizer
from recipes.data.vocab import NUM_BYTE_IDS

_SPECIALS = ("<pad>", "</s>", "<unk>")  # ids 0, 1, 2 of bytes


def write_tokenizer(folder: Path, info: DataInfo) -> list[str]:
    """Notes for people: what the files do not say."""
    tokenizer = info.extras["tokenizer"]
    assert isinstance(tokenizer, TextTokenizer)
    if isinstance(tokenizer, ByteTokenizer):
        assert info.vocab_size is not None
        about = byte_tokenizer_config(info.vocab_size - NUM_BYTE_IDS)
        (folder / "tokenizer_config.json").write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
        return []
    if not isinstance(tokenizer, FolderTokenizer | LearnedTokenizer):
        return [f"no tokenizer files: {tokenizer.name} has none"]
    for file in tokenizer.files():
        shutil.copyfile(file, folder / file.name)
    num_own = tokenizer.vocab_size
    if info.vocab_size is not None and info.vocab_size > num_own:
        return [f"ids from {num_own} on (sentinels, padding) are this run's own: the tokenizer's files lack them"]
    return []


def byte_tokenizer_config(num_sentinels: int) -> dict[str, object]:
    """``tokenizer_config.json`` of transformers' ByT5 tokenizer, whose ids of bytes are ours.

    Its sentinels count upwards from the first id above the bytes, ours downwards from the last: the file names each.
    """
    pad, eos, unk = _SPECIALS
    tokens = dict(enumerate(_SPECIALS))
    first = NUM_BYTE_IDS
    tokens |= {first + place: f"<extra_id_{num_sentinels - 1 - place}>" for place in range(num_sentinels)}
    return {
        "tokenizer_class": "ByT5Tokenizer",
        "pad_token": pad,
        "eos_token": eos,
        "unk_token": unk,
        "extra_ids": 0,
        "added_tokens_decoder": {str(number): _added(token) for number, token in tokens.items()},
    }


def _added(token: str) -> dict[str, object]:
    return {
        "content": token,
        "lstrip": False,
        "normalized": False,
        "rstrip": False,
        "single_word": False,
        "special": True,
    }
