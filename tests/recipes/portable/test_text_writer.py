"""How tokens are drawn and how text becomes ids; the model here is a table of logits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from recipes.data.errors import DataError
from recipes.data.text import text_info
from recipes.ranks import Ranks
from recipes.schema.data import StdlibTextConfig
from recipes.text_writer import Draw, Writer, write_tokens
from recipes.words import Words

LOGITS = torch.tensor([0.0, 3.0, 1.0, 2.0])


def words(task: str) -> Words:
    info = text_info(StdlibTextConfig(), task, 64)
    assert info is not None
    return Words.of(info)


def draws(temperature: float, top_k: int | None, seed: int = 0, count: int = 400) -> list[int]:
    draw = Draw(temperature, top_k, torch.Generator().manual_seed(seed))
    return [draw.token(LOGITS) for _ in range(count)]


def test_temperature_zero_takes_the_likeliest() -> None:
    assert set(draws(0, None)) == {1}


def test_top_k_draws_among_the_likeliest() -> None:
    assert set(draws(5.0, 2)) == {1, 3}
    assert set(draws(5.0, None)) == {0, 1, 2, 3}
    assert set(draws(5.0, 99)) == {0, 1, 2, 3}


def test_draws_follow_the_softmax() -> None:
    found = draws(1.0, None, count=4000)
    for token, chance in enumerate(LOGITS.softmax(0).tolist()):
        assert found.count(token) / len(found) == pytest.approx(chance, abs=0.04)


def test_a_seed_gives_the_same_draws_again() -> None:
    assert draws(1.0, None, seed=4) == draws(1.0, None, seed=4) != draws(1.0, None, seed=5)


class Countdown(Writer):
    """Likes token 9 - n after n tokens."""

    def logits(self, written: list[int]) -> Tensor:
        return torch.nn.functional.one_hot(torch.tensor(9 - len(written)), 10).float()

    def shown(self, prompt: str, text: str) -> str:
        return text


def test_writing_ends_at_the_end_token_or_at_the_limit() -> None:
    ranks = Ranks(0, 1, torch.device("cpu"))
    draw = Draw(0, None, torch.Generator())
    assert write_tokens(Countdown(), draw, 100, eos_id=6, ranks=ranks) == [9, 8, 7, 6]
    assert write_tokens(Countdown(), draw, 2, eos_id=6, ranks=ranks) == [9, 8]


def test_text_and_back() -> None:
    causal = words("causal_lm")
    assert causal.text(causal.ids("naïve <extra_id_0>")) == "naïve <extra_id_0>"
    assert len(causal.ids("<extra_id_0>")) == len("<extra_id_0>"), "plain text for a causal model"


def test_sentinels_of_span_corruption() -> None:
    t5 = words("seq2seq_lm")
    ids = t5.ids("a<extra_id_0>b<extra_id_99>")
    assert ids == [100, t5.sentinel_ids[0], 101, t5.sentinel_ids[99]]
    assert t5.text(ids) == "a<extra_id_0>b<extra_id_99>"
    with pytest.raises(DataError, match=r"<extra_id_100>; the model has .* to <extra_id_99>"):
        t5.ids("<extra_id_100>")
