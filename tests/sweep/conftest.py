"""Sweeps in this process, in a folder of their own, with jobs that train nothing (``tests/support/fake_job.py``)."""

from __future__ import annotations

import csv
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from launcher import cli
from launcher.plugins import unload_plugins
from launcher.sweep import chosen
from tests.support.fake_sweep import fake_command
from tests.support.processes import wait_until, with_argument

ROOT = Path(__file__).parents[2]


@dataclass
class Sweeping:
    """``run(...)`` is fsdp-launch in this process; ``start(...)`` a process of its own."""

    folder: Path
    capsys: pytest.CaptureFixture[str]
    started: list[subprocess.Popen[str]]
    out: str = ""
    err: str = ""

    def run(self, *arguments: str) -> int:
        self.capsys.readouterr()
        code = cli.main(arguments)
        self.out, self.err = self.capsys.readouterr()
        return code

    def start(self, *arguments: str, **variables: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.fake_sweep", *arguments],
            cwd=self.folder,
            env={**os.environ, "PYTHONPATH": str(ROOT), **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.started.append(process)
        return process

    def rows(self, sweep: str = "s") -> list[dict[str, str]]:
        with (self.folder / sweep / "results.csv").open() as file:
            return list(csv.DictReader(file))

    def states(self, sweep: str = "s") -> list[str]:
        return [row["state"] for row in self.rows(sweep)]

    def starts(self) -> list[int]:
        """Numbers of the jobs that were started, in order."""
        path = self.folder / "starts"
        return [int(line.split()[0]) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.fixture
def sweeping(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Sweeping]:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    folder = tmp_path / f"tag_{uuid.uuid4().hex}"  # in the command line of every job
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("FAKE_STARTS", str(folder / "starts"))
    monkeypatch.setattr(chosen, "job_command", fake_command)
    sweeping = Sweeping(folder, capsys, [])
    yield sweeping
    for process in sweeping.started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    wait_until(lambda: not with_argument(folder.name), limit_s=10)
    unload_plugins()
