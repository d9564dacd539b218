"""The loop in one process: accumulation, precision, recomputation, reruns, early stop, windows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import fsdp_core
from recipes.recompute import checkpoint_units
from recipes.report import progress_text
from recipes.schema.training import EarlyStopConfig
from recipes.seeds import derived_seed, seed_training
from recipes.train import run
from tests.recipes.loop.recipes_in_tests import context_of, lines_of, losses_of, small_recipe

SHORT = {"train__steps": 5}


@pytest.fixture(scope="module")
def plain_losses() -> dict[str, list[float]]:
    return {kind: losses_of(None, small_recipe(kind, **SHORT)) for kind in ("gpt", "t5", "dhen")}


@pytest.mark.parametrize("kind", ["gpt", "t5", "dhen"])
@pytest.mark.parametrize("with_communication", [False, True], ids=["without communication", "with communication"])
def test_accumulation_equals_one_large_batch(plain_losses: dict, kind: str, with_communication: bool):
    accumulated = small_recipe(
        kind, train__micro_batch=2, train__accumulate_with_communication=with_communication, **SHORT
    )
    assert losses_of(None, accumulated) == pytest.approx(plain_losses[kind], rel=1e-5)


def test_a_rerun_has_the_same_bits(plain_losses: dict):
    assert losses_of(None, small_recipe("gpt", run__deterministic=True, **SHORT)) == plain_losses["gpt"]
    torch.use_deterministic_algorithms(False)


def test_another_seed_gives_another_run(plain_losses: dict):
    assert losses_of(None, small_recipe("gpt", run__seed=1, **SHORT)) != plain_losses["gpt"]


def test_dropout_is_the_same_in_a_rerun_and_in_recomputation():
    dropped = {"model__dropout": 0.2, **SHORT}
    first = losses_of(None, small_recipe("gpt", **dropped))
    assert losses_of(None, small_recipe("gpt", **dropped)) == first
    assert losses_of(None, small_recipe("gpt", train__activation_checkpointing=True, **dropped)) == pytest.approx(
        first, rel=1e-6
    )


@pytest.mark.parametrize("kind", ["gpt", "t5", "dhen"])
def test_recomputation_changes_no_loss(plain_losses: dict, kind: str):
    recomputed = losses_of(None, small_recipe(kind, train__activation_checkpointing=True, **SHORT))
    assert recomputed == pytest.approx(plain_losses[kind], rel=1e-6)


@pytest.mark.full
@pytest.mark.parametrize("kind", ["gpt", "dhen"])
def test_compiled_units_change_no_loss(plain_losses: dict, kind: str):
    config = small_recipe(kind, train__compile=True, train__activation_checkpointing=True, **SHORT)
    assert losses_of(None, config) == pytest.approx(plain_losses[kind], rel=1e-5)


def test_checkpointed_units_keep_class_names_and_parameter_names():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    names = [name for name, _ in model.named_parameters()]
    checkpoint_units(model)
    assert [name for name, _ in model.named_parameters()] == names
    assert isinstance(model[0], torch.nn.Linear)
    assert type(model[0]).__name__ == "Linear"
    assert type(model[0]) is type(model[1])


def test_recomputation_counts_a_batch_once_in_running_statistics():
    def trained(is_recomputed: bool) -> torch.nn.Module:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.ReLU())
        if is_recomputed:
            checkpoint_units([model])
        for _ in range(3):
            model(torch.randn(2, 3, 8, 8)).square().mean().backward()
        return model

    plain, recomputed = trained(False), trained(True)
    assert plain[1].num_batches_tracked == recomputed[1].num_batches_tracked == 3
    assert plain[1].momentum == recomputed[1].momentum
    for (name, expected), (_, got) in zip(plain.named_buffers(), recomputed.named_buffers(), strict=True):
        assert torch.equal(expected, got), name
    assert torch.equal(plain[0].weight.grad, recomputed[0].weight.grad)


@pytest.mark.parametrize("init", ["eager", "deferred"])
def test_both_ways_of_building_start_from_the_same_bits(plain_losses: dict, init: str):
    assert losses_of(None, small_recipe("gpt", sharding__init=init, **SHORT)) == plain_losses["gpt"]


@pytest.mark.parametrize("units", ["size", "root"])
def test_units_change_no_loss(plain_losses: dict, units: str):
    config = small_recipe("gpt", sharding__units=units, sharding__min_unit_numel=2_000, **SHORT)
    assert losses_of(None, config) == pytest.approx(plain_losses["gpt"], rel=1e-6)


@pytest.mark.parametrize(
    "setting",
    [
        {"sharding__cpu_offload": True},
        {"sharding__gather_buffers": "allocator", "sharding__forward_prefetch": True},
        {"sharding__backward_prefetch": False, "rate_limiter__kind": "unlimited"},
        {"rate_limiter__kind": "adaptive"},
    ],
    ids=lambda setting: " ".join(name.rpartition("__")[2] for name in setting),
)
def test_engine_settings_change_no_loss(plain_losses: dict, setting: dict):
    assert losses_of(None, small_recipe("gpt", **setting, **SHORT)) == pytest.approx(plain_losses["gpt"], rel=1e-6)


def test_without_clipping_the_norm_is_still_measured():
    free, clipped = (
        lines_of(None, small_recipe("gpt", train__clip_norm=norm, train__steps=2)) for norm in (None, 1e-3)
    )
    assert free[0]["grad_norm"] == pytest.approx(clipped[0]["grad_norm"], rel=1e-6)
    assert free[0]["grad_norm"] > 1e-3
    assert free[1]["loss"] != clipped[1]["loss"]


def test_bf16_follows_fp32(plain_losses: dict):
    config = small_recipe("gpt", precision__param_dtype="bfloat16", precision__reduce_dtype="bfloat16", **SHORT)
    losses = losses_of(None, config)
    assert losses == pytest.approx(plain_losses["gpt"], rel=2e-2)
    assert losses != plain_losses["gpt"]


def test_fp16_scaler_backs_off_until_gradients_fit_and_then_trains():
    config = small_recipe(
        "gpt",
        precision__param_dtype="float16",
        precision__reduce_dtype="float16",
        precision__grad_scaler=True,
        precision__initial_scale=2.0**26,
        train__steps=14,
        data__num_samples=8,  # the same samples in every step: a skipped step leaves the loss where it was
        data__is_new_each_epoch=False,
    )
    lines = lines_of(None, config)
    scales = [line["loss_scale"] for line in lines]
    losses = [line["loss"] for line in lines]
    skipped = [k for k in range(len(lines) - 1) if scales[k + 1] < scales[k]]
    assert [bool(line["overflowed"]) for line in lines[:-1]] == [k in skipped for k in range(len(lines) - 1)]
    assert "overflow at loss scale" in progress_text(lines[: skipped[0] + 1])
    assert scales[0] == 2.0**26
    assert 0 < len(skipped) < 13
    assert all(scales[k + 1] == scales[k] / 2 for k in skipped)
    for k in skipped:
        assert losses[k + 1] == pytest.approx(losses[k], rel=1e-4), "a skipped step changed the weights"
    assert losses[-1] < losses[0] - 0.05


def test_fp16_scaler_covers_the_tables_of_their_own_optimizer():
    precision = {"precision__param_dtype": "float16", "precision__reduce_dtype": "float16"}
    config = small_recipe("dhen", precision__grad_scaler=True, precision__initial_scale=1024.0, **precision, **SHORT)
    plain = losses_of(None, small_recipe("dhen", **SHORT))
    assert losses_of(None, config) == pytest.approx(plain, rel=2e-2)


def test_every_step_has_a_line_whatever_log_every(capsys: pytest.CaptureFixture, tmp_path: Path):
    config = small_recipe("gpt", train__steps=7, train__log_every=3, train__eval_every=5, train__eval_samples=8)
    config.data.cache_dir = str(tmp_path / "cache")
    summary = run(config, context_of(None, tmp_path))
    lines = [json.loads(text) for text in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line] == [1, 2, 3, 4, 5, 6, 7]
    assert [line["step"] for line in lines if "eval_loss" in line] == [5, 7]
    written = json.loads((tmp_path / "summary.json").read_text())
    assert written == summary.as_json()
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert (summary.status, summary.steps, summary.samples, summary.sharding_factor) == ("finished", 7, 56, 1)
    assert summary.evaluation["loss"] == lines[-1]["eval_loss"]
    assert summary.num_parameters > 25_000
    printed = capsys.readouterr().out
    assert "sharding groups [0] by local" in printed
    assert "step 7/7" in printed
    assert printed.rstrip().endswith(str(tmp_path))


def test_early_stop_ends_the_run_and_says_so(capsys: pytest.CaptureFixture, tmp_path: Path):
    config = small_recipe("dhen", train__eval_every=1, train__eval_samples=4)
    config.train.early_stop = EarlyStopConfig(patience=2, min_delta=100.0)
    config.data.cache_dir = str(tmp_path / "cache")
    summary = run(config, context_of(None, tmp_path))
    assert (summary.status, summary.steps) == ("stopped_early", 3)
    assert "stopping early after step 3" in capsys.readouterr().out
    assert set(summary.evaluation) == {"loss", "normalised_entropy", "auc"}


def test_profiler_and_trace_windows_leave_their_files(tmp_path: Path):
    config = small_recipe("gpt", train__steps=4, train__profile_steps=[1, 3], train__trace=True)
    config.data.cache_dir = str(tmp_path / "cache")
    run(config, context_of(None, tmp_path))
    assert (tmp_path / "profile" / "rank0.json.gz").stat().st_size > 1000
    events = [json.loads(text) for text in (tmp_path / "trace" / "rank0.jsonl").read_text().splitlines()]
    assert {event["step"] for event in events} == {2, 3}
    assert {"gather", "free", "forward", "backward_end"} <= {event["kind"] for event in events}


def test_the_schedule_of_every_step_can_be_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    checked: list[int] = []
    monkeypatch.setattr(fsdp_core, "verify_schedule", lambda model, log: checked.append(len(log.events)))
    config = small_recipe("gpt", train__steps=4, train__check_schedule=True)
    config.data.cache_dir = str(tmp_path / "cache")
    run(config, context_of(None, tmp_path))
    assert len(checked) == 4 and min(checked) > 10
    assert not (tmp_path / "trace").exists()


def test_ranks_drop_different_activations_and_the_same_in_a_rerun():
    run_config = small_recipe("gpt").run
    draws = []
    for rank in (0, 1, 0):
        seed_training(run_config, rank)
        draws.append(torch.rand(4).tolist())
    assert draws[0] == draws[2] != draws[1]
    assert derived_seed(0, "a", 1) != derived_seed(0, "a", 11)
    assert 0 <= derived_seed(0, "weights") < 2**63


def test_the_wrong_data_for_a_model_is_named(tmp_path: Path):
    config = small_recipe("gpt")
    config.model = small_recipe("dhen").model
    config.model.table_rows = [3]
    config.data.cache_dir = str(tmp_path / "cache")
    with pytest.raises(ValueError, match="embedding tables"):
        run(config, context_of(None, tmp_path))
