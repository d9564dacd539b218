"""Loggers: what they write, what they hide, and that none of them can end a run."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from recipes.context import RankContext
from recipes.loggers import open_loggers
from recipes.loggers import wandb as wandb_logger
from recipes.loggers.base import Start
from recipes.loggers.jsonl import JsonlLogger, read_lines
from recipes.loggers.select import without_secrets
from recipes.loggers.wandb import WandbLogger
from recipes.loss_picture import draw_loss
from recipes.provenance import recorded_provenance
from recipes.schema import RecipeConfig
from recipes.schema.fields import described
from recipes.schema.training import TensorboardLoggerConfig, WandbLoggerConfig


def context(run_dir: Path, rank: int = 0) -> RankContext:
    return RankContext(rank, 2, rank, 2, 0, 1, ("here", "here"), "cpu", run_dir)


def test_jsonl_writes_one_strict_json_object_a_line(tmp_path: Path):
    logger = JsonlLogger(tmp_path / "m.jsonl")
    logger.log(1, {"step": 1, "loss": 2.5, "mfu": None})
    logger.log(2, {"step": 2, "loss": float("nan"), "grad_norm": float("inf")})
    logger.flush()
    lines = [json.loads(text, parse_constant=pytest.fail) for text in (tmp_path / "m.jsonl").read_text().splitlines()]
    assert lines == [{"step": 1, "loss": 2.5, "mfu": None}, {"step": 2, "loss": None, "grad_norm": None}]
    logger.close(None)


def test_jsonl_continues_a_run_without_the_steps_that_are_run_again(tmp_path: Path):
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 1, "loss": 3}\n{"step": 2, "loss": 2}\n{"step": 3, "loss": 1}\n{"step": 4, "lo')
    logger = JsonlLogger(path, Start(steps_done=2))
    logger.log(3, {"loss": 1.5})
    logger.close(None)
    assert [(line["step"], line["loss"]) for line in read_lines(path)] == [(1, 3), (2, 2), (3, 1.5)]
    JsonlLogger(path).close(None)
    assert read_lines(path) == []


def test_only_rank_0_logs(tmp_path: Path):
    assert open_loggers(RecipeConfig(), context(tmp_path, rank=1)) == []
    (logger,) = open_loggers(RecipeConfig(), context(tmp_path))
    logger.close({})
    assert (tmp_path / "metrics.jsonl").exists()


@dataclass
class Cluster:
    env: dict[str, str] = described({}, "variables")
    auth_token: str = "abc"
    tokenizer: str = "bytes"


@dataclass
class WithCluster(RecipeConfig):
    cluster: Cluster = field(default_factory=Cluster)


def test_secrets_stay_here():
    config = WithCluster()
    config.cluster.env = {"WANDB_API_KEY": "s3cret"}
    shown = without_secrets(config)
    assert shown["cluster"] == {"env": {"WANDB_API_KEY": "<hidden>"}, "auth_token": "<hidden>", "tokenizer": "bytes"}
    assert shown["train"]["global_batch"] == config.train.global_batch
    assert "s3cret" not in json.dumps(shown)


class FakeRun:
    def __init__(self, fail: bool) -> None:
        self.fail, self.logged, self.summary, self.exit_code = fail, [], {}, None

    def log(self, metrics: dict, step: int) -> None:
        if self.fail:
            raise ConnectionError("no route to host")
        self.logged.append((step, metrics))

    def finish(self, exit_code: int) -> None:
        self.exit_code = exit_code


class FakeWandb:
    Settings = dict

    def __init__(self, run: FakeRun | None) -> None:
        self.run, self.options = run, {}

    def init(self, **options: object) -> FakeRun:
        self.options = options
        if self.run is None:
            raise TimeoutError("no answer")
        return self.run


def open_wandb(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, run: FakeRun | None) -> tuple[WandbLogger, FakeWandb]:
    fake = FakeWandb(run)
    monkeypatch.setattr(wandb_logger, "_import_wandb", lambda: fake)
    return WandbLogger(WandbLoggerConfig(tags=["a"]), tmp_path, "gpt", {"run": {"seed": 1}}), fake


def test_wandb_gets_config_metrics_and_summary(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    run = FakeRun(fail=False)
    logger, fake = open_wandb(monkeypatch, tmp_path, run)
    logger.log(3, {"step": 3, "loss": 1.0, "mfu": None})
    logger.close({"train_loss": 1.0})
    assert fake.options["mode"] == "offline"
    assert fake.options["config"] == {"run": {"seed": 1}}
    assert fake.options["dir"] == str(tmp_path)
    assert run.logged == [(3, {"loss": 1.0})]
    assert run.summary == {"train_loss": 1.0}
    assert run.exit_code == 0


def test_wandb_keeps_the_id_of_a_run_that_goes_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    seen = []
    for start in (Start(), Start(steps_done=5), Start(steps_done=7), Start()):
        fake = FakeWandb(FakeRun(fail=False))
        monkeypatch.setattr(wandb_logger, "_import_wandb", lambda fake=fake: fake)
        WandbLogger(WandbLoggerConfig(), tmp_path, "gpt", {}, start).close({})
        assert fake.options["resume"] == "allow"
        seen.append(fake.options["id"])
    assert seen[0] == seen[1] == seen[2] != seen[3]


@pytest.mark.parametrize("run", [None, FakeRun(fail=True)], ids=["start fails", "log fails"])
def test_wandb_that_fails_warns_once_and_the_run_goes_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture, run: FakeRun | None
):
    with caplog.at_level(logging.WARNING):
        logger, _ = open_wandb(monkeypatch, tmp_path, run)
        logger.log(1, {"loss": 1.0})
        logger.log(2, {"loss": 1.0})
        logger.close({})
    assert len(caplog.records) == 1
    assert "the run goes on without it" in caplog.text


def test_tensorboard_writes_events_grouped_by_kind(tmp_path: Path):
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    config = RecipeConfig()
    config.logger.tensorboard = TensorboardLoggerConfig()
    for logger in open_loggers(config, context(tmp_path)):
        logger.log(1, {"step": 1, "loss": 2.0, "mfu": None})
        logger.log(1, {"eval_loss": 3.0})
        logger.close({})
    events = event_accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert {tag: events.Scalars(tag)[0].value for tag in events.Tags()["scalars"]} == {
        "train/loss": 2.0,
        "eval/loss": 3.0,
    }


def test_the_loss_picture_is_drawn_from_the_metrics(tmp_path: Path):
    metrics, picture = tmp_path / "metrics.jsonl", tmp_path / "loss.png"
    metrics.write_text("")
    assert not draw_loss(metrics, picture, "t")
    metrics.write_text('{"step": 1, "loss": 3}\n{"step": 2, "loss": null}\n{"step": 2, "eval_loss": 2}\n')
    assert draw_loss(metrics, picture, "t")
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.full
def test_the_real_wandb_works_offline_without_an_account(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    logger = WandbLogger(WandbLoggerConfig(), tmp_path, "gpt", {"run": {"seed": 1}})
    logger.log(1, {"loss": 1.0})
    logger.close({"train_loss": 1.0, "evaluation": {"loss": 2.0}})
    assert list(tmp_path.glob("wandb/offline-run-*/run-*.wandb"))


def test_wandb_gets_what_the_launcher_recorded(tmp_path: Path):
    (tmp_path / "command.txt").write_text("cd /somewhere\nfsdp-launch run.seed=3\n")
    (tmp_path / "revision.txt").write_text("abc with uncommitted changes (diff.patch)\n")
    (tmp_path / "diff.patch").write_text("+a line\n" * 10_000)
    (tmp_path / "packages.txt").write_text("torch==2.13.0\nnumpy==2.3\n")
    (tmp_path / "environment.json").write_text('{"cores": 2, "gpus": []}\n')
    told = recorded_provenance(tmp_path)
    assert told["command"] == "cd /somewhere\nfsdp-launch run.seed=3"
    assert told["packages"] == {"torch": "2.13.0", "numpy": "2.3"}
    assert told["environment"] == {"cores": 2, "gpus": []}
    assert str(told["diff"]).endswith("... 59999 more characters in diff.patch")
    assert recorded_provenance(tmp_path / "nowhere") == {}


def test_lines_that_are_none_of_ours_are_left_out(tmp_path: Path):
    """A disk that lost a block, an editor, a half-copied file: a run that goes on must not end there."""
    path = tmp_path / "m.jsonl"
    path.write_bytes(b'{"step": 1}\n\xff\xfe\n5\n[1]\nnull\n{"loss": 3}\n{"step": "x"}\n{"step": 2}\n')
    JsonlLogger(path, Start(steps_done=5)).close(None)
    assert read_lines(path) == [{"step": 1}, {"step": 2}]
