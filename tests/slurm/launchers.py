"""One way to start a run and to read how it ended, for the launcher on this machine and for a real SLURM alike."""

from __future__ import annotations

import abc
import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.slurm import records
from tests.slurm.testbed import Testbed
from tests.support.processes import wait_until

ROOT = Path(__file__).parents[2]
PLUGIN = ROOT / "tests" / "support" / "misbehaving_model.py"
LIMIT_S = 300  # reached only by a hang


@dataclass(frozen=True)
class Ended:
    """code: of the command. text: all it printed, and the job's log where there is one."""

    code: int
    text: str
    run_dir: Path

    def rows(self, name: str = "loss") -> dict[int, float]:
        """step -> value of a column of metrics.jsonl."""
        lines = [json.loads(line) for line in (self.run_dir / "metrics.jsonl").read_text().splitlines()]
        return {line["step"]: line[name] for line in lines if name in line}


class Launcher(abc.ABC):
    """Runs of a tiny model on a tiny corpus, below ``folder``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        corpus = folder / "corpus"
        if not corpus.exists():
            corpus.mkdir(parents=True)
            (corpus / "a.txt").write_text("".join(f"the {n}th line of a small corpus\n" for n in range(400)))
        self.started: list[subprocess.Popen[str]] = []

    @abc.abstractmethod
    def words(self) -> list[str]:
        """What chooses this cluster."""

    @abc.abstractmethod
    def popen(self, command: list[str]) -> subprocess.Popen[str]: ...

    def command(self, name: str, *overrides: str) -> list[str]:
        shared = [
            "data=text_files",
            f"data.path={self.folder}/corpus",
            f"data.cache_dir={self.folder}/cache",
            "train=smoke",
            "train.steps=3",
            "cluster.device=cpu",
            f"run.dir={self.folder / name}",
        ]
        if any(word.startswith("model.how") for word in overrides):
            shared = [f"plugins=[{PLUGIN}]", "model=misbehaving", *shared]
        return [sys.executable, "-m", "launcher", *shared, *self.words(), *overrides]

    def start(self, name: str, *overrides: str) -> subprocess.Popen[str]:
        process = self.popen(self.command(name, *overrides))
        self.started.append(process)
        return process

    def end(self, process: subprocess.Popen[str], name: str, limit_s: float = LIMIT_S) -> Ended:
        out, err = process.communicate(timeout=limit_s)
        log = self.folder / name / "logs" / "slurm.log"
        text = out + err + (log.read_text() if log.exists() else "")
        return Ended(process.returncode, text, self.folder / name)

    def run(self, name: str, *overrides: str) -> Ended:
        return self.end(self.start(name, *overrides), name)

    def close(self) -> None:
        for process in self.started:
            if process.poll() is None:
                process.kill()
            process.communicate()

    def environ(self) -> dict[str, str]:
        return {
            **{name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")},
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
        }


class Local(Launcher):
    def words(self) -> list[str]:
        return ["cluster=local", "cluster.nproc_per_node=2"]

    def popen(self, command: list[str]) -> subprocess.Popen[str]:
        return subprocess.Popen(
            command,
            cwd=self.folder,
            env=self.environ(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def close(self) -> None:
        for process in self.started:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
        super().close()


class Slurm(Launcher):
    """The command waits for its job. ``overrides`` may say other nodes and ranks."""

    def __init__(self, folder: Path, cluster: Testbed) -> None:
        super().__init__(folder)
        self.cluster = cluster

    def words(self) -> list[str]:
        return ["cluster=slurm", "cluster.nproc_per_node=2", "cluster.device=cpu", "sweep.wait=true"]

    def popen(self, command: list[str]) -> subprocess.Popen[str]:
        return self.cluster.start(*command, cwd=self.folder, environ=self.environ())

    def story(self, name: str) -> records.Story:
        return records.story(self.folder / name)

    def job(self, name: str) -> str:
        """The id, as soon as there is one."""
        wait_until(lambda: self.story(name).job is not None, LIMIT_S)
        job = self.story(name).job
        assert job is not None
        return job

    def lines(self, name: str) -> list[dict[str, Any]]:
        """Every event of the run's jobs."""
        text = (self.folder / name / "slurm" / "jobs.jsonl").read_text()
        return [json.loads(line) for line in text.splitlines()]

    def wait_for_step(self, name: str, step: int) -> None:
        """Until the run has recorded this step in its metrics."""
        path = self.folder / name / "metrics.jsonl"
        wait_until(lambda: path.exists() and f'"step": {step},' in path.read_text(), LIMIT_S, every_s=0.1)

    def close(self) -> None:
        super().close()
        ids = self.cluster.run("squeue", "-h", "-o", "%A").split()
        if ids:
            self.cluster.run("scancel", *ids)
            wait_until(lambda: not self.cluster.run("squeue", "-h").strip(), LIMIT_S, every_s=0.1)
