"""``fsdp-launch`` as a program under test."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path

from tests.support.processes import wait_until, with_argument

ROOT = Path(__file__).parents[2]
PLUGIN = ROOT / "tests" / "support" / "misbehaving_model.py"
LIMIT_S = 300  # reached only by a hang


class Program:
    """``fsdp-launch`` on a tiny model and a tiny corpus, in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tag = f"tag_{uuid.uuid4().hex}"  # in the run folder's name, and so in the command line of every rank
        self.started: list[subprocess.Popen[str]] = []
        corpus = folder / "corpus"
        corpus.mkdir()
        (corpus / "a.txt").write_text("".join(f"the {n}th line of a small corpus\n" for n in range(400)))
        self.environ = {
            **{name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")},
            "OMP_NUM_THREADS": "1",
        }

    def words(self, *overrides: str) -> list[str]:
        return [
            f"plugins=[{PLUGIN}]",
            "model=misbehaving",
            "data=text_files",
            f"data.path={self.folder / 'corpus'}",
            f"data.cache_dir={self.folder / 'cache'}",
            "train=smoke",
            "train.steps=3",
            f"run.name={self.tag}",
            "cluster.device=cpu",
            *overrides,
        ]

    def start(self, *overrides: str, before: tuple[str, ...] = ()) -> subprocess.Popen[str]:
        """``before``: what starts ``-m launcher`` instead of this Python (torchrun)."""
        command = [sys.executable, *before, "-m", "launcher", *self.words(*overrides)]
        process = subprocess.Popen(
            command,
            cwd=self.folder,
            env={**self.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.started.append(process)
        return process

    def run(self, *overrides: str, before: tuple[str, ...] = ()) -> tuple[int, str, str]:
        """(exit code, standard output, standard error)."""
        process = self.start(*overrides, before=before)
        out, err = process.communicate(timeout=LIMIT_S)
        return process.returncode, out, err

    def run_dirs(self) -> list[Path]:
        return sorted((self.folder / "runs").glob(f"*{self.tag}*"))

    def end(self) -> None:
        for process in self.started:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
        wait_until(lambda: not with_argument(self.tag), limit_s=10)


def torchrun(*words: str) -> tuple[str, ...]:
    return ("-m", "torch.distributed.run", *words)
