"""Whole runs that are asked to stop: all ranks save one step, leave with 75, and the same command goes on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from recipes.checkpoint.folder import Found, checkpoints_of, newest_complete
from recipes.checkpoint.manifest import read_manifest
from tests.support.processes import is_alive, wait_until

ROOT = Path(__file__).parents[2]
LIMIT_S = 300  # reached only by a hang


class Training:
    """A tiny GPT on a tiny corpus in one folder, started as often as one likes."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.run_dir = folder, folder / "run"
        (folder / "corpus").mkdir()
        (folder / "corpus" / "a.txt").write_text("".join(f"the {n}th line of a small corpus\n" for n in range(400)))
        self.started: list[subprocess.Popen[str]] = []

    def start(self, *overrides: str, before: tuple[str, ...] = ()) -> subprocess.Popen[str]:
        words = [
            "model=gpt_tiny",
            "model.num_layers=1",
            "model.hidden_size=16",
            "model.num_heads=2",
            "model.max_seq_len=32",
            "data=text_files",
            f"data.path={self.folder / 'corpus'}",
            f"data.cache_dir={self.folder / 'cache'}",
            "scheduler=constant",
            "scheduler.warmup_steps=0",
            "train.log_every=1",
            "train.eval_samples=8",
            "cluster.device=cpu",
            f"run.dir={self.run_dir}",
            *overrides,
        ]
        process = subprocess.Popen(
            [sys.executable, *before, "-m", "launcher", *words],
            cwd=self.folder,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.started.append(process)
        return process

    def wait_for_step(self, step: int) -> None:
        wait_until(lambda: self.steps[-1:] >= [step], LIMIT_S)

    @property
    def steps(self) -> list[int]:
        path = self.run_dir / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [json.loads(line)["step"] for line in lines if '"loss"' in line and line.endswith("}")]

    @property
    def saved(self) -> Found | None:
        return newest_complete(checkpoints_of(self.run_dir))

    def ranks_of(self, process: subprocess.Popen[str]) -> list[int]:
        """Process ids of the ranks below the launcher or torchrun."""
        children = psutil.Process(process.pid).children(recursive=True)
        return [child.pid for child in children if {"launcher.worker", "launcher"} & set(child.cmdline())]

    def end(self) -> None:
        for process in self.started:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


@pytest.fixture
def training(tmp_path: Path) -> Iterator[Training]:
    training = Training(tmp_path)
    yield training
    training.end()


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    out, _ = process.communicate(timeout=LIMIT_S)
    return process.returncode, out


def test_a_signal_to_one_rank_saves_all_and_the_next_start_goes_on(training: Training) -> None:
    process = training.start("train.steps=1e6")
    training.wait_for_step(3)
    ranks = training.ranks_of(process)
    os.kill(ranks[1], signal.SIGTERM)
    code, out = ended(process)
    assert code == 75, out
    assert "stopped by SIGTERM to rank 1 after step" in out
    assert not any(is_alive(pid) for pid in ranks)
    assert training.saved is not None
    step = training.saved.step
    assert training.steps == list(range(1, step + 1)), "every rank left after the step that was saved"
    assert read_manifest(training.saved.path).world_size == 2
    assert not (training.run_dir / "summary.json").exists()

    code, out = ended(training.start(f"train.steps={step + 3}", "sharding.factor=1", "cluster.nproc_per_node=1"))
    assert code == 0, out
    assert f"resumed from step {step} of {training.saved.path}" in out
    assert "saved by 2 ranks, resharded to 1" in out
    assert training.steps == list(range(1, step + 4))
    summary = json.loads((training.run_dir / "summary.json").read_text())
    assert (summary["steps"], summary["samples"]) == (step + 3, 8 * (step + 3))


@pytest.mark.full
def test_a_signal_cuts_an_evaluation_short_and_the_next_start_makes_up_for_it(training: Training) -> None:
    evaluating = ("train.steps=3", "train.eval_samples=100000", "data.eval_fraction=0.5", "train.micro_batch=1")
    repeats = "data.seq_len=8"  # many short held-out samples: the evaluation after the last step takes a while
    process = training.start(*evaluating, repeats)
    training.wait_for_step(3)
    os.kill(training.ranks_of(process)[0], signal.SIGTERM)
    code, out = ended(process)
    assert code == 75, out
    assert "stopped by SIGTERM to rank 0 after step 3" in out
    assert training.saved is not None and training.saved.step == 3
    code, out = ended(training.start(*evaluating, repeats))
    assert code == 0, out
    assert "held-out after step 3" in out
    assert training.steps == [1, 2, 3]


@pytest.mark.full
def test_the_time_limit_saves_before_it_is_over(training: Training) -> None:
    code, out = ended(training.start("train.steps=1e6", "cluster.time_limit=12", "cluster.nproc_per_node=1"))
    assert code == 75, out
    assert "cluster.time_limit" in out
    assert training.saved is None or training.steps == list(range(1, training.saved.step + 1))


@pytest.mark.full
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2])
def test_a_signal_to_the_launcher_does_the_same(training: Training, signum: signal.Signals) -> None:
    process = training.start("train.steps=1e6", "checkpoint.every=5")
    training.wait_for_step(8)
    process.send_signal(signum)
    code, out = ended(process)
    assert code == 75, out
    assert training.saved is not None
    assert training.steps == list(range(1, training.saved.step + 1))


@pytest.mark.full
def test_a_signal_before_the_first_step_saves_nothing_and_says_so(training: Training) -> None:
    process = training.start("train.steps=1e6")
    wait_until(lambda: (training.run_dir / "logs" / "rank_1.log").exists(), LIMIT_S)
    wait_until(lambda: len(training.ranks_of(process)) == 2, LIMIT_S)
    process.send_signal(signal.SIGTERM)
    code, out = ended(process)
    assert code in (75, 128 + signal.SIGTERM), out  # before its handlers were there, a signal just ends a rank
    if code == 75:
        assert "after step 0: nothing was trained yet" in out
    assert training.saved is None


@pytest.mark.full
def test_a_rank_that_never_reaches_a_boundary_is_not_waited_for(training: Training) -> None:
    """A rank stopped by the system cannot say anything; its launcher ends it after the grace period."""
    process = training.start("train.steps=1e6", "cluster.grace_s=2")
    training.wait_for_step(2)
    ranks = training.ranks_of(process)
    os.kill(ranks[1], signal.SIGSTOP)
    process.send_signal(signal.SIGTERM)
    code, out = ended(process)
    assert code == 128 + signal.SIGTERM, out
    assert not any(is_alive(pid) for pid in ranks)


@pytest.mark.full
def test_ranks_of_torchrun_save_and_go_on(training: Training) -> None:
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    process = training.start("train.steps=1e6", before=torchrun)
    training.wait_for_step(3)
    os.kill(training.ranks_of(process)[0], signal.SIGUSR1)
    code, out = ended(process)
    assert code == 1, "torchrun turns every code into 1"
    assert "stopped by SIGUSR1 to rank" in out
    assert training.saved is not None
    step = training.saved.step
    code, out = ended(training.start(f"train.steps={step + 2}", before=torchrun))
    assert code == 0, out
    assert training.steps == list(range(1, step + 3))
