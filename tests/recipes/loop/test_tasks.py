"""Losses are fp32 sums over counted targets; evaluation metrics agree with definitions written out by hand."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from recipes.data.loading import EvalBatch
from recipes.data.records import DataInfo
from recipes.evaluate import without_filling
from recipes.ranks import Ranks
from recipes.tasks import task_for
from recipes.tasks.base import logits_of
from recipes.tasks.clicks import area_under_roc, normalised_entropy

ONE_RANK = Ranks(0, 1, torch.device("cpu"))


def brute_force_auc(scores: list[float], labels: list[int]) -> float:
    """Every pair of a positive and a negative, a tie counting half."""
    pairs = [
        (p, n)
        for p, lp in zip(scores, labels, strict=True)
        if lp
        for n, ln in zip(scores, labels, strict=True)
        if not ln
    ]
    return sum(1.0 if p > n else 0.5 if p == n else 0.0 for p, n in pairs) / len(pairs)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("levels", [3, 1000])
def test_auc_equals_all_pairs_with_and_without_ties(seed: int, levels: int):
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randint(levels, (60,), generator=generator).float() / levels
    labels = torch.randint(2, (60,), generator=generator).float()
    expected = brute_force_auc(scores.tolist(), labels.int().tolist())
    assert area_under_roc(scores, labels) == pytest.approx(expected, abs=1e-12)


def test_auc_of_perfect_reversed_and_one_sided_scores():
    labels = torch.tensor([0.0, 0.0, 1.0, 1.0])
    assert area_under_roc(torch.tensor([1.0, 2.0, 3.0, 4.0]), labels) == 1.0
    assert area_under_roc(torch.tensor([4.0, 3.0, 2.0, 1.0]), labels) == 0.0
    assert area_under_roc(torch.zeros(4), labels) == 0.5
    assert math.isnan(area_under_roc(torch.zeros(4), torch.ones(4)))
    assert math.isnan(area_under_roc(torch.tensor([1.0, math.nan, 3.0, 4.0]), labels))


def test_normalised_entropy_of_predicting_the_base_rate_is_one():
    rate = 0.2
    base = -(rate * math.log(rate) + (1 - rate) * math.log(1 - rate))
    assert normalised_entropy(base, rate) == pytest.approx(1.0)
    assert normalised_entropy(base / 2, rate) == pytest.approx(0.5)
    assert math.isnan(normalised_entropy(0.3, 1.0))


@pytest.mark.parametrize("name", ["causal_lm", "seq2seq_lm"])
def test_text_loss_is_a_sum_in_fp32_over_counted_targets(name: str):
    torch.manual_seed(0)
    task = task_for(name, DataInfo(task=name, bytes_per_token=2.0))
    logits = torch.randn(2, 5, 11, dtype=torch.bfloat16)
    labels = torch.randint(11, (2, 5))
    labels[0, 3:] = -100
    batch = {"input_ids": torch.zeros(2, 7, dtype=torch.long), "labels": labels}
    loss = task.loss_sum(logits, labels)
    by_hand = sum(
        -F.log_softmax(logits[b, s].float(), dim=0)[labels[b, s]]
        for b in range(2)
        for s in range(5)
        if labels[b, s] >= 0
    )
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, by_hand)
    assert task.count_targets(batch) == 8
    assert task.count_units(batch) == (14 if name == "causal_lm" else 24)


def test_text_evaluation_gives_perplexity_and_nats_per_byte_where_a_token_stands_for_bytes():
    batch = {"input_ids": torch.zeros(1, 4, dtype=torch.long), "labels": torch.tensor([[1, 2, -100, 0]])}
    logits = torch.zeros(1, 4, 8)  # uniform: log 8 each
    results = {}
    for name in ("causal_lm", "seq2seq_lm"):
        evaluation = task_for(name, DataInfo(task=name, bytes_per_token=2.0)).evaluation()
        evaluation.add(logits, batch, 3)
        results[name] = evaluation.result(ONE_RANK)
    assert results["causal_lm"] == pytest.approx(
        {"loss": math.log(8), "perplexity": 8.0, "nats_per_byte": math.log(8) / 2}
    )
    assert results["seq2seq_lm"] == pytest.approx({"loss": math.log(8), "perplexity": 8.0})


def test_clicks_count_only_labels_that_are_not_ignored():
    task = task_for("clicks", DataInfo(task="clicks"))
    logits = torch.tensor([0.3, -1.2, 2.0, 5.0])
    labels = torch.tensor([1.0, 0.0, 0.0, -100.0])
    expected = F.binary_cross_entropy_with_logits(logits[:3], labels[:3], reduction="sum")
    torch.testing.assert_close(task.loss_sum(logits, labels), expected)
    evaluation = task.evaluation()
    evaluation.add(logits, {"labels": labels}, task.count_targets({"labels": labels}))
    result = evaluation.result(ONE_RANK)
    assert result["loss"] == pytest.approx(float(expected) / 3)
    assert result["auc"] == pytest.approx(brute_force_auc([0.3, -1.2, 2.0], [1, 0, 0]))
    assert result["normalised_entropy"] == pytest.approx(normalised_entropy(result["loss"], 1 / 3))


def test_image_accuracy_leaves_filling_out():
    task = task_for("images", DataInfo(task="images"))
    logits = torch.eye(4)[:, :3]
    labels = torch.tensor([0, 1, 0, 0])
    batch = without_filling(EvalBatch({"labels": labels}, torch.tensor([1.0, 1.0, 1.0, 0.0])))
    assert batch["labels"].tolist() == [0, 1, 0, -100]
    assert labels.tolist() == [0, 1, 0, 0], "the source's labels must not be written"
    evaluation = task.evaluation()
    evaluation.add(logits, batch, task.count_targets(batch))
    assert evaluation.result(ONE_RANK)["accuracy"] == pytest.approx(2 / 3)


def test_filling_of_float_labels_is_left_out_too():
    batch = without_filling(EvalBatch({"labels": torch.tensor([1.0, 0.0])}, torch.tensor([1.0, 0.0])))
    assert batch["labels"].tolist() == [1.0, -100.0]


def test_a_task_and_data_that_do_not_fit_are_named():
    with pytest.raises(ValueError, match="needs samples of task 'images', the data source makes 'clicks'"):
        task_for("images", DataInfo(task="clicks"))
    with pytest.raises(ValueError, match="task 'chess' does not exist"):
        task_for("chess", DataInfo(task="chess"))


def test_logits_come_bare_or_in_an_object():
    logits = torch.zeros(1)
    assert logits_of(logits) is logits
    assert logits_of(SimpleNamespace(logits=logits)) is logits
