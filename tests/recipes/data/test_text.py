"""Text sources from files to samples: packing, the held-out part, span corruption, the cache, messages."""

from __future__ import annotations

import dataclasses
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from recipes.data import stdlib_text, text_files
from recipes.data.errors import DataError
from recipes.data.packing import PackedTokens
from recipes.data.records import Dataset, Splits
from recipes.data.text_samples import noise_masks
from recipes.data.tokenizer import ByteTokenizer
from recipes.data.vocab import SpanLengths, span_lengths
from recipes.schema.data import SpanCorruptionConfig, StdlibTextConfig, TextFilesConfig, TokenizerConfig


def config(folder: Path, **changes: object) -> TextFilesConfig:
    fields: dict[str, object] = {"path": str(folder), "seq_len": 64, "eval_fraction": 0.1}
    return TextFilesConfig(**{**fields, **changes})  # type: ignore[arg-type]


def whole(dataset: Dataset, epoch: int = 0) -> dict[str, torch.Tensor]:
    return dataset.batch(range(len(dataset)), epoch)


def text_of(splits: Splits, dataset: Dataset) -> str:
    ids = whole(dataset)["input_ids"].numpy()
    return str(splits.info.extras["tokenizer"].decode(ids.reshape(-1)))  # type: ignore[attr-defined]


def lines_of(text: str) -> set[str]:
    return {line for line in text.split("\n") if line.startswith("line ") and line.endswith("数えた")}


class TestCausal:
    def test_rows_are_the_documents_one_after_the_other(self, make_request, corpus_folder: Path) -> None:
        splits = text_files.prepare(config(corpus_folder, eval_fraction=0.0), make_request("causal_lm"))
        rows = [
            np.append(np.frombuffer(path.read_bytes(), np.uint8) + 3, 1) for path in sorted(corpus_folder.iterdir())
        ]
        row = torch.from_numpy(np.concatenate(rows).astype(np.int64))
        batch = whole(splits.train)
        count = len(splits.train)
        assert count == (len(row) - 1) // 64
        assert batch["input_ids"].reshape(-1).equal(row[: count * 64])
        assert batch["labels"].reshape(-1).equal(row[1 : count * 64 + 1])
        assert batch["input_ids"].dtype == torch.int64

    def test_facts(self, make_request, corpus_folder: Path) -> None:
        splits = text_files.prepare(config(corpus_folder), make_request("causal_lm"))
        info = splits.info
        assert (info.task, info.vocab_size, info.seq_len, info.target_len) == ("causal_lm", 259, 64, None)
        assert (info.bytes_per_token, info.pad_id, info.eos_id) == (1.0, 0, 1)
        assert (info.num_train, info.num_eval) == (len(splits.train), len(splits.eval))
        assert abs(info.num_eval / (info.num_train + info.num_eval) - 0.1) < 0.01
        assert str(corpus_folder) in info.description

    def test_held_out_text_is_never_trained_on(self, make_request, corpus_folder: Path) -> None:
        splits = text_files.prepare(config(corpus_folder), make_request("causal_lm"))
        train, held_out = (lines_of(text_of(splits, split)) for split in (splits.train, splits.eval))
        assert train and held_out and not train & held_out
        assert len(train | held_out) > 3980  # of 4000: lines cut by the split and the rest of a row are missing

    def test_the_held_out_part_depends_on_no_seed(self, make_request, corpus_folder: Path) -> None:
        first, second = (
            text_files.prepare(config(corpus_folder), make_request("causal_lm", seed=seed)) for seed in (0, 1)
        )
        assert whole(first.eval)["input_ids"].equal(whole(second.eval)["input_ids"])

    def test_one_file_is_cut_in_two(self, make_request, corpus_folder: Path) -> None:
        path = corpus_folder / "file_07.txt"
        splits = text_files.prepare(config(path), make_request("causal_lm"))
        train, held_out = (lines_of(text_of(splits, split)) for split in (splits.train, splits.eval))
        assert max(train) < min(held_out)  # the end of the file

    def test_max_bytes_stops_reading(self, make_request, corpus_folder: Path) -> None:
        splits = text_files.prepare(config(corpus_folder, max_bytes=20_000), make_request("causal_lm"))
        assert 19_000 < 64 * (len(splits.train) + len(splits.eval)) <= 20_020

    def test_sequence_length_follows_the_model(self, make_request, corpus_folder: Path) -> None:
        request = make_request("causal_lm", seq_len=128)
        assert text_files.prepare(config(corpus_folder, seq_len=None), request).info.seq_len == 128
        with pytest.raises(DataError, match=r"data.seq_len=256 is longer than the model's longest sequence, 128"):
            text_files.prepare(config(corpus_folder, seq_len=256), request)


class TestSpanCorruption:
    def test_input_and_target_rebuild_the_text(self, make_request, corpus_folder: Path) -> None:
        causal = text_files.prepare(config(corpus_folder, eval_fraction=0.0), make_request("causal_lm"))
        row = whole(causal.train)["input_ids"].reshape(-1)
        splits = text_files.prepare(config(corpus_folder, eval_fraction=0.0), make_request("seq2seq_lm"))
        lengths = span_lengths(64, 0.15, 3.0)
        batch = whole(splits.train)
        assert batch["input_ids"].shape == (len(splits.train), 64)
        assert batch["labels"].shape == (len(splits.train), lengths.target_len)
        for number in (0, 1, 100, len(splits.train) - 1):
            rebuilt = rebuild(batch["input_ids"][number].tolist(), batch["labels"][number].tolist(), first_sentinel=358)
            assert rebuilt == row[number * lengths.raw_len : (number + 1) * lengths.raw_len].tolist()

    def test_facts(self, make_request, corpus_folder: Path) -> None:
        info = text_files.prepare(config(corpus_folder), make_request("seq2seq_lm")).info
        assert (info.task, info.vocab_size, info.seq_len, info.pad_id, info.eos_id) == ("seq2seq_lm", 359, 64, 0, 1)
        assert info.target_len == span_lengths(64, 0.15, 3.0).target_len

    def test_masks_follow_seed_epoch_and_sample(self, make_request, corpus_folder: Path) -> None:
        def prepared(seed: int) -> Splits:
            return text_files.prepare(config(corpus_folder), make_request("seq2seq_lm", seed=seed))

        splits, other = prepared(0), prepared(1)
        first = whole(splits.train)["labels"]
        assert first.equal(whole(prepared(0).train)["labels"])
        assert not first.equal(whole(splits.train, epoch=1)["labels"])
        assert not first.equal(whole(other.train)["labels"])
        # A sample is the same in whichever batch, so on whichever rank.
        assert splits.train.batch([7, 3], 0)["labels"].equal(first[[7, 3]])
        assert whole(splits.eval)["labels"].equal(whole(other.eval)["labels"])  # comparable between runs

    def test_density_and_span_length_are_obeyed(self, make_request, corpus_folder: Path) -> None:
        corruption = SpanCorruptionConfig(noise_density=0.5, mean_span_length=8.0)
        splits = text_files.prepare(config(corpus_folder, span_corruption=corruption), make_request("seq2seq_lm"))
        lengths = span_lengths(64, 0.5, 8.0)
        masked = (whole(splits.train)["labels"] < 259).sum(dim=1) - 1  # without the end
        assert set(masked.tolist()) == {lengths.num_noise_tokens}


def rebuild(inputs: list[int], target: list[int], first_sentinel: int) -> list[int]:
    """Put the target's spans back where the input's sentinels stand."""
    assert inputs[-1] == 1 and target[-1] == 1
    spans: dict[int, list[int]] = {}
    for token in target[:-1]:
        if token >= 259:
            assert token == first_sentinel - len(spans)  # descending, in order
            spans[token] = []
        else:
            spans[first_sentinel - len(spans) + 1].append(token)
    found: list[int] = []
    for token in inputs[:-1]:
        found.extend(spans.pop(token) if token in spans else [token])
    assert not spans
    return found


@given(
    num_noise=st.integers(1, 40),
    num_kept=st.integers(1, 200),
    data=st.data(),
    key=st.integers(0, 2**63),
    count=st.integers(1, 5),
)
def test_masks_have_exact_counts(num_noise: int, num_kept: int, data: st.DataObject, key: int, count: int) -> None:
    num_spans = data.draw(st.integers(1, min(num_noise, num_kept)))
    lengths = SpanLengths(num_noise + num_kept, num_noise, num_spans)
    masks = noise_masks(lengths, key, range(count))
    assert (masks.sum(axis=1) == num_noise).all()
    starts = masks & ~np.pad(masks, ((0, 0), (1, 0)))[:, :-1]
    assert (starts.sum(axis=1) == num_spans).all()
    assert not masks[:, 0].any() and masks[:, -1].all()


def test_every_place_is_masked_about_equally_often() -> None:
    """Except near the ends, where T5's masks begin with a kept and end with a masked span."""
    share = noise_masks(span_lengths(512, 0.15, 3.0), 0, range(10_000)).mean(axis=0)
    assert abs(share[20:-20] - 0.15).max() < 0.02


class TestTokenizers:
    def test_a_learned_tokenizer_is_kept_and_reused(self, make_request, corpus_folder: Path, reports) -> None:
        wanted = config(corpus_folder, tokenizer=TokenizerConfig(kind="train", vocab_size=400))
        first = text_files.prepare(wanted, make_request("causal_lm"))
        assert first.info.vocab_size == 400 and first.info.bytes_per_token > 2
        assert any("learning 400 tokens" in line for line in reports)
        train, held_out = (lines_of(text_of(first, split)) for split in (first.train, first.eval))
        assert train and held_out and not train & held_out
        reports.clear()
        again = text_files.prepare(wanted, make_request("causal_lm", is_main=False))
        assert reports == []
        assert whole(again.train)["input_ids"].equal(whole(first.train)["input_ids"])

    def test_tokenizers_share_the_split(self, make_request, corpus_folder: Path) -> None:
        learned = text_files.prepare(
            config(corpus_folder, tokenizer=TokenizerConfig(kind="train", vocab_size=400)), make_request("causal_lm")
        )
        in_bytes = text_files.prepare(config(corpus_folder), make_request("causal_lm"))
        assert lines_of(text_of(learned, learned.eval)) - lines_of(text_of(in_bytes, in_bytes.eval)) <= {
            max(lines_of(text_of(learned, learned.eval)))
        }

    def test_bytes_per_token_counts_every_byte_and_document(self, make_request, corpus_folder: Path) -> None:
        splits = text_files.prepare(
            config(corpus_folder, eval_fraction=0.0, tokenizer=TokenizerConfig(kind="train", vocab_size=400)),
            make_request("causal_lm"),
        )
        num_bytes = sum(path.stat().st_size for path in corpus_folder.iterdir())
        num_tokens = (num_bytes + 40) / splits.info.bytes_per_token
        assert abs(num_tokens - round(num_tokens)) < 1e-6
        assert 0 <= num_tokens - 1 - 64 * len(splits.train) < 64

    def test_local_without_a_folder(self, make_request, corpus_folder: Path) -> None:
        with pytest.raises(DataError, match="needs data.tokenizer.path"):
            text_files.prepare(
                config(corpus_folder, tokenizer=TokenizerConfig(kind="local")), make_request("causal_lm")
            )


class TestCache:
    def test_text_is_read_once(self, make_request, corpus_folder: Path, reports: list[str], monkeypatch) -> None:
        first = text_files.prepare(config(corpus_folder), make_request("causal_lm"))
        monkeypatch.setattr(text_files, "read_documents", None)  # calling it would fail
        longer = text_files.prepare(config(corpus_folder, seq_len=128), make_request("seq2seq_lm"))
        assert longer.info.extras["fingerprint"] == first.info.extras["fingerprint"]

    def test_changed_text_is_read_again(self, make_request, corpus_folder: Path) -> None:
        first = text_files.prepare(config(corpus_folder), make_request("causal_lm"))
        (corpus_folder / "new.txt").write_text("more\n" * 1000)
        second = text_files.prepare(config(corpus_folder), make_request("causal_lm"))
        assert second.info.num_train > first.info.num_train
        assert second.info.extras["fingerprint"] != first.info.extras["fingerprint"]

    def test_equal_text_elsewhere_has_the_same_fingerprint(self, make_request, corpus_folder: Path) -> None:
        first = text_files.prepare(config(corpus_folder), make_request("causal_lm"))
        moved = corpus_folder.rename(corpus_folder.with_name("moved"))
        second = text_files.prepare(config(moved), make_request("causal_lm"))
        assert first.info.extras["fingerprint"] == second.info.extras["fingerprint"]

    def test_a_damaged_file_is_noticed(self, make_request, corpus_folder: Path) -> None:
        request = make_request("causal_lm")
        text_files.prepare(config(corpus_folder), request)
        (path,) = (request.cache_dir / "tokens").glob("*/train.bin")
        path.write_bytes(path.read_bytes()[:-1])
        with pytest.raises(DataError, match=r"train\.bin is damaged.* Delete"):
            text_files.prepare(config(corpus_folder), request)

    def test_large_vocabularies_get_wider_files(self, tmp_path: Path) -> None:
        ids = np.array([70_000, 1, 2], dtype="<u4")
        (tmp_path / "t.bin").write_bytes(ids.tobytes())
        assert PackedTokens(tmp_path / "t.bin", "<u4", 3, length=3, overlap=0).blocks([0]).tolist() == [[70_000, 1, 2]]


class TestMessages:
    def test_too_little_text_for_one_sample(self, make_request, tmp_path: Path) -> None:
        (tmp_path / "a.txt").write_text("forty letters " * 3)
        with pytest.raises(DataError, match=r"too little text to train on: 39 tokens .* one sample needs 65"):
            text_files.prepare(config(tmp_path), make_request("causal_lm"))

    def test_too_little_text_to_hold_out(self, make_request, tmp_path: Path) -> None:
        (tmp_path / "a.txt").write_text("x" * 500)
        with pytest.raises(DataError, match=r"too little text to evaluate on.* Raise data.eval_fraction"):
            text_files.prepare(config(tmp_path), make_request("causal_lm"))
        assert text_files.prepare(config(tmp_path, eval_fraction=0.2), make_request("causal_lm")).info.num_eval == 1
        assert text_files.prepare(config(tmp_path, eval_fraction=0.0), make_request("causal_lm")).info.num_eval == 0

    def test_files_without_text(self, make_request, tmp_path: Path) -> None:
        for name in ("a.txt", "b.md"):
            (tmp_path / name).touch()
        with pytest.raises(DataError, match="holds no text"):
            text_files.prepare(config(tmp_path), make_request("causal_lm"))

    def test_an_unreadable_file_is_named(self, make_request, corpus_folder: Path) -> None:
        (corpus_folder / "file_05.txt").write_bytes(b"fine\nfine\n\xe9t\xe9\n")
        with pytest.raises(DataError, match=r"file_05\.txt:3: not UTF-8"):
            text_files.prepare(config(corpus_folder), make_request("causal_lm"))

    def test_text_for_a_click_model(self, make_request, corpus_folder: Path) -> None:
        with pytest.raises(DataError, match="the model's task is clicks; choose data for that task"):
            text_files.prepare(config(corpus_folder), make_request("clicks"))


class TestStdlib:
    def test_sources_and_topics_are_read_in_order(self) -> None:
        import sysconfig

        corpus = stdlib_text.StdlibCorpus(Path(sysconfig.get_path("stdlib")))
        documents = list(corpus.documents())
        places = [document.where for document in documents]
        assert places == [document.where for document in corpus.documents()]
        assert len(set(places)) == len(places)
        assert sum(len(document.text) for document in documents) > 8_000_000
        assert any(place.endswith("argparse.py") for place in places)
        assert any("help('" in place for place in places)
        assert not any("site-packages" in place or place.endswith("topics.py") for place in places)

    def test_a_broken_encoding_is_left_out(self, tmp_path: Path) -> None:
        (tmp_path / "bad.py").write_bytes(b"# coding: utf-8\nname = '\xff'\n")
        (tmp_path / "liar.py").write_bytes(b"# coding: no-such-thing\n")
        (tmp_path / "latin.py").write_bytes(b"# coding: latin-1\nname = '\xe9'\n")
        (tmp_path / "test.txt").write_bytes(b"\x80\x81")
        documents = list(stdlib_text.StdlibCorpus(tmp_path).documents())
        assert [document.text for document in documents if str(tmp_path) in document.where] == [
            "# coding: latin-1\nname = 'é'\n"
        ]

    def test_a_python_without_sources(self, tmp_path: Path) -> None:
        with pytest.raises(DataError, match="no library sources .*use data=text_files"):
            stdlib_text.StdlibCorpus(tmp_path).identity()

    def test_the_default_source_trains_both_text_tasks(self, make_request) -> None:
        source = StdlibTextConfig(seq_len=256, max_bytes=1_000_000)
        causal = stdlib_text.prepare(source, make_request("causal_lm"))
        spans = stdlib_text.prepare(source, make_request("seq2seq_lm"))
        assert causal.info.num_train > 3700 and spans.info.num_train > 3300
        assert "standard library" in causal.info.description
        text = ByteTokenizer().decode(causal.train.batch([20], 0)["input_ids"][0].numpy())
        assert text.isprintable() or "\n" in text


def test_ranks_that_prepare_together_read_the_same(make_request, corpus_folder: Path, reports: list[str]) -> None:
    """Three ranks, as threads: one builds, none waits for ever, all see the same samples."""
    barrier = threading.Barrier(3, timeout=60)
    wanted = config(corpus_folder, tokenizer=TokenizerConfig(kind="train", vocab_size=300))

    def rank(number: int) -> list[list[int]]:
        request = make_request("causal_lm", is_main=number == 0, barrier=lambda: barrier.wait() and None)
        return whole(text_files.prepare(wanted, request).train)["input_ids"].tolist()

    with ThreadPoolExecutor(3) as pool:
        first, *others = pool.map(rank, range(3))
    assert all(other == first for other in others)
    assert sum(line.startswith("learning") for line in reports) == 1


def test_preparing_twice_gives_the_same_bits(make_request, corpus_folder: Path, tmp_path: Path) -> None:
    first = text_files.prepare(config(corpus_folder), make_request("seq2seq_lm"))
    second = text_files.prepare(config(corpus_folder), make_request("seq2seq_lm", cache_dir=tmp_path / "other"))
    for name in ("train", "eval"):
        one, two = whole(getattr(first, name)), whole(getattr(second, name))
        assert all(one[key].equal(two[key]) for key in one)
    assert dataclasses.replace(first.info, extras={}) == dataclasses.replace(second.info, extras={})
