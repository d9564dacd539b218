"""Tokenizers: bytes without files, one from a folder, one that is learned."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipes.data.errors import DataError
from recipes.data.tokenizer import (
    ByteTokenizer,
    FolderTokenizer,
    LearnedTokenizer,
    TextTokenizer,
    learn_tokenizer,
    vocabulary_for,
)

TEXT = "the cat sat on the mat, the naïve cat; 数えた </s> the end\n"


@pytest.fixture(scope="module")
def learned_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("learned")
    learn_tokenizer(folder, [TEXT] * 20, vocab_size=300)
    return folder


@pytest.fixture(scope="module")
def sentinel_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A word tokenizer with T5's sentinels at descending ids, as a T5 tokenizer has them; no end and no padding."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<unk>": 0, "the": 1, "cat": 2} | {f"<extra_id_{number}>": 6 - number for number in range(4)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    folder = tmp_path_factory.mktemp("sentinels")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>").save_pretrained(folder)
    return folder


@given(st.text())
def test_bytes_come_back(text: str) -> None:
    raw = text.encode("utf-8", errors="replace")
    ids = ByteTokenizer().encode([raw])[0]
    assert ids.tolist() == [byte + 3 for byte in raw]
    assert ByteTokenizer().decode(ids) == raw.decode()


def test_special_ids_stand_for_no_text() -> None:
    assert ByteTokenizer().decode(np.array([0, 1, 2, 3 + ord("a"), 259, 358])) == "a"


def test_bytes_are_those_of_byt5() -> None:
    from transformers import ByT5Tokenizer

    theirs = ByT5Tokenizer()(TEXT.replace("</s>", ""), add_special_tokens=False)["input_ids"]
    assert ByteTokenizer().encode([TEXT.replace("</s>", "").encode()])[0].tolist() == theirs


@pytest.mark.parametrize("kind", [LearnedTokenizer, FolderTokenizer])
def test_a_learned_tokenizer_reads_its_text(learned_folder: Path, kind: type[TextTokenizer]) -> None:
    tokenizer = kind(learned_folder, 300) if kind is LearnedTokenizer else kind(str(learned_folder))  # type: ignore[call-arg]
    both = tokenizer.encode([TEXT.encode(), b"mat"])
    assert tokenizer.decode(both[0]) == TEXT
    assert tokenizer.decode(both[1]) == "mat"
    assert len(both[0]) < len(TEXT.encode())
    assert tokenizer.eos_id == 1 and tokenizer.pad_id == 0
    assert 1 not in both[0]  # the text's own </s> is text


def test_both_ways_of_loading_give_the_same_ids(learned_folder: Path) -> None:
    ours, theirs = LearnedTokenizer(learned_folder, 300), FolderTokenizer(str(learned_folder))
    assert ours.encode([TEXT.encode()])[0].tolist() == theirs.encode([TEXT.encode()])[0].tolist()
    assert theirs.vocab_size == 290  # the few words taught fewer than were asked for


def test_a_small_corpus_keeps_the_asked_vocabulary(tmp_path: Path) -> None:
    learn_tokenizer(tmp_path, ["aaaa"], vocab_size=5000)
    tokenizer = LearnedTokenizer(tmp_path, 5000)
    assert tokenizer.vocab_size == 5000  # what the checker promised the model
    assert tokenizer.decode(np.array([4000])) == ""


def test_learning_is_deterministic(tmp_path: Path) -> None:
    contents = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        learn_tokenizer(tmp_path / name, [TEXT, TEXT[::-1]] * 10, vocab_size=320)
        contents.append((tmp_path / name / "tokenizer.json").read_text())
    assert contents[0] == contents[1]


def test_a_piece_may_begin_inside_a_character(learned_folder: Path) -> None:
    tokenizer = LearnedTokenizer(learned_folder, 300)
    assert tokenizer.decode(tokenizer.encode(["ïve".encode()[1:]])[0]) == "ve"


def test_missing_special_ids_are_added_on_top(sentinel_folder: Path) -> None:
    tokenizer = FolderTokenizer(str(sentinel_folder))
    assert (tokenizer.eos_id, tokenizer.pad_id, tokenizer.vocab_size) == (7, None, 8)
    assert vocabulary_for(tokenizer, 0, 0).vocab_size == 8
    few, many = vocabulary_for(tokenizer, 4, 100), vocabulary_for(tokenizer, 5, 100)
    assert (few.vocab_size, few.pad_id, few.sentinel_ids) == (9, 8, (6, 5, 4, 3))  # its own are enough
    assert (many.vocab_size, many.pad_id, many.sentinel_ids[:2]) == (109, 8, (108, 107))


def test_sentinels_lie_above_the_bytes() -> None:
    vocabulary = vocabulary_for(ByteTokenizer(), 28, 100)
    assert (vocabulary.vocab_size, vocabulary.eos_id, vocabulary.pad_id) == (359, 1, 0)
    assert sorted(vocabulary.sentinel_ids) == list(range(259, 359)) and vocabulary.sentinel_ids[0] == 358


@pytest.mark.parametrize(
    ("content", "message"), [(None, "no such folder"), ({}, "cannot load a tokenizer"), ({"a.txt": "x"}, "cannot load")]
)
def test_a_folder_without_a_tokenizer(tmp_path: Path, content: dict[str, str] | None, message: str) -> None:
    folder = tmp_path / "tokenizer"
    if content is not None:
        folder.mkdir()
        for name, text in content.items():
            (folder / name).write_text(text)
    with pytest.raises(DataError, match=f"data.tokenizer.path=.*{message}"):
        FolderTokenizer(str(folder))


def test_a_word_without_end_can_be_learned(tmp_path: Path) -> None:
    """Its length counts once, not squared: as one word this takes hours."""
    learn_tokenizer(tmp_path, ["x" * 3_000_000, TEXT], vocab_size=300)
    tokenizer = LearnedTokenizer(tmp_path, 300)
    (ids,) = tokenizer.encode([b"xxxx" * 1000])
    assert len(ids) < 1000
    assert tokenizer.decode(ids) == "xxxx" * 1000
