"""The keeper of a rank under srun: it records every end, leaves signals to the rank, and ends a rank out of date."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from launcher.slurm import records
from tests.slurm.test_step import STEP
from tests.support.processes import is_alive, wait_until

ROOT = Path(__file__).parents[2]
# The rank's part is replaced: no torch, and it ends as the test asks.
PROGRAM = """
import os, signal, sys, time, types
sys.path.insert(0, {root!r})
from launcher.failure import Failure
from launcher.slurm import task
task._LOOK_S = 0.1
def run(step, arguments, status, *signals):
    {body}
sys.modules["launcher.slurm.rank"] = types.SimpleNamespace(run=run)
task.main()
"""
BODIES = {
    "done": ("status.done(); os._exit(0)", 0, "done", ""),
    "saved": ("status.done(); os._exit(75)", 0, "saved", ""),
    "raised": (
        "status.failed(Failure(0, 'RuntimeError: rain', 1, 1.0)); os._exit(1)",
        1,
        "failed",
        "RuntimeError: rain",
    ),
    "memory": ("status.failed(Failure(0, 'MemoryError', 6, 1.0)); os._exit(6)", 6, "failed", "MemoryError"),
    "killed": ("os.kill(os.getpid(), 9)", 1, "failed", "was killed by SIGKILL"),
    "hung": ("os._exit(5)", 5, "failed", "the run hangs"),
    "left": ("os._exit(0)", 1, "failed", "left before the run ended (exit code 0)"),
    "left after a word": ("status.done(); os._exit(3)", 1, "failed", "left before the run ended (exit code 3)"),
}


def start(run_dir: Path, body: str, rank: int = 0) -> subprocess.Popen[str]:
    environ = {**os.environ, **STEP, "SLURM_PROCID": str(rank), "SLURM_NODEID": "0", "SLURM_LOCALID": str(rank)}
    command = [sys.executable, "-c", PROGRAM.format(root=str(ROOT), body=body), "--run-dir", str(run_dir)]
    return subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize(("body", "code", "how", "what"), BODIES.values(), ids=list(BODIES))
def test_every_end_is_recorded(tmp_path: Path, body: str, code: int, how: str, what: str) -> None:
    process = start(tmp_path, body)
    out, err = process.communicate(timeout=60)
    assert process.returncode == code, out + err
    (end,) = records.rank_ends(tmp_path, "1", 0)
    assert (end.rank, end.how) == (0, how)
    assert ("" if end.failure is None else end.failure.what) == what
    assert records.story(tmp_path) == records.Story("1", 0)


def test_a_good_end_of_another_rank_needs_no_record(tmp_path: Path) -> None:
    process = start(tmp_path, "status.done(); os._exit(0)", rank=1)
    process.communicate(timeout=60)
    assert process.returncode == 0
    assert records.rank_ends(tmp_path, "1", 0) == []
    assert records.story(tmp_path) == records.Story()


WAIT = "open(os.path.join(arguments.run_dir, 'pid'), 'w').write(str(os.getpid())); time.sleep(600)"


def rank_of(run_dir: Path) -> int:
    path = run_dir / "pid"
    wait_until(lambda: path.exists() and path.read_text() != "")
    return int(path.read_text())


def test_signals_are_the_ranks(tmp_path: Path) -> None:
    """SLURM sends USR2 to both; the rank saves, and the keeper is still there to tell."""
    heard = "signal.signal(signal.SIGUSR2, lambda *_: (status.done(), os._exit(75)))"
    process = start(tmp_path, f"{heard}; {WAIT}")
    rank = rank_of(tmp_path)
    process.send_signal(signal.SIGUSR2)
    process.send_signal(signal.SIGTERM)
    os.kill(rank, signal.SIGUSR2)
    process.communicate(timeout=60)
    assert process.returncode == 0
    (end,) = records.rank_ends(tmp_path, "1", 0)
    assert end.how == records.SAVED


@pytest.mark.parametrize(("whom", "kind"), [("both", "lost_peer"), ("the rank", "vanished")])
def test_a_rank_that_srun_ended_is_not_to_blame(tmp_path: Path, whom: str, kind: str) -> None:
    """It was about to tell of the rank that failed before it, and got no word out."""
    process = start(tmp_path, f"signal.signal(signal.SIGTERM, lambda *_: os._exit(143)); {WAIT}")
    rank = rank_of(tmp_path)
    if whom == "both":
        process.send_signal(signal.SIGTERM)
    os.kill(rank, signal.SIGTERM)
    process.communicate(timeout=60)
    (end,) = records.rank_ends(tmp_path, "1", 0)
    assert end.failure is not None and end.failure.kind == kind


def test_a_rank_does_not_outlive_its_keeper(tmp_path: Path) -> None:
    process = start(tmp_path, WAIT)
    rank = rank_of(tmp_path)
    process.kill()
    process.communicate(timeout=60)
    wait_until(lambda: not is_alive(rank))


@pytest.mark.parametrize("later", [("1", 1), ("2", 0)], ids=["restart", "another job"])
def test_a_later_start_ends_a_rank_that_was_cut_off(tmp_path: Path, later: tuple[str, int]) -> None:
    process = start(tmp_path, WAIT)
    rank = rank_of(tmp_path)
    records.add(tmp_path, "started", job=later[0], restart=later[1])
    process.communicate(timeout=60)
    assert process.returncode == 1
    assert not is_alive(rank)


def test_only_srun_starts_it() -> None:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    command = [sys.executable, "-m", "launcher.slurm.task", "--run-dir", "x"]
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 2
    assert "fsdp-launch cluster=slurm" in done.stderr
    assert not Path("x").exists()
