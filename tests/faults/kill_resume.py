"""Kill -9 of a random rank at random moments, resume each time: the end is bit-equal to the uninterrupted run.

    python tests/faults/kill_resume.py --kills 40

One run is left alone. The same run in another folder is started again and again; each time, at a random moment
(start-up, between steps, while a checkpoint is being written), one of its ranks gets SIGKILL, its launcher ends the
other and leaves with 1, and nothing of the run may be alive then. The last start is left alone, and every tensor of
the last checkpoint (parameters, optimizer, random generators) and every step's loss must be the same.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import psutil

T = TypeVar("T")
ROOT = Path(__file__).resolve().parents[2]
STEPS_PER_KILL = 12  # progress that a start makes before it is killed, on average somewhat less
SAVE_EVERY = 3
LIMIT_S = 180.0  # reached only by a hang
MOMENTS = ("start-up", "any step", "any step", "during a save", "during a save")


@dataclass(frozen=True)
class Run:
    """One run: a tiny GPT with dropout on a tiny corpus, a checkpoint every few steps."""

    folder: Path
    name: str
    steps: int

    @property
    def run_dir(self) -> Path:
        return self.folder / self.name

    def start(self, log: Path) -> subprocess.Popen[bytes]:
        words = [
            "model=gpt_tiny",
            "model.num_layers=2",
            "model.hidden_size=32",
            "model.num_heads=2",
            "model.max_seq_len=32",
            "model.dropout=0.1",
            "data=text_files",
            f"data.path={self.folder / 'corpus'}",
            f"data.cache_dir={self.folder / 'cache'}",
            "data.seq_len=32",
            f"train.steps={self.steps}",
            "train.log_every=1",
            "train.eval_samples=0",
            f"checkpoint.every={SAVE_EVERY}",
            "cluster.device=cpu",
            f"run.dir={self.run_dir}",
        ]
        with log.open("ab") as output:
            return subprocess.Popen(
                [sys.executable, "-m", "launcher", *words],
                cwd=self.folder,
                env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def steps_logged(self) -> int:
        try:
            return (self.run_dir / "metrics.jsonl").read_bytes().count(b'"loss"')
        except FileNotFoundError:
            return 0

    @property
    def is_saving(self) -> bool:
        try:
            return any(name.startswith(".step_") for name in os.listdir(self.run_dir / "checkpoints"))
        except FileNotFoundError:
            return False


def main(arguments: list[str] | None = None) -> int:
    """Exit code 0 if all is equal."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=40)
    parser.add_argument("--seed", type=int, default=None, help="of the moments and ranks; a random one is printed")
    options = parser.parse_args(arguments)
    seed = random.SystemRandom().randrange(10**6) if options.seed is None else options.seed
    with tempfile.TemporaryDirectory(prefix="kill_resume_") as folder:
        problems = kill_and_resume(Path(folder), options.kills, seed)
    print("\n".join(problems) or f"bit-equal after {options.kills} kills (seed {seed})")
    return 1 if problems else 0


def kill_and_resume(folder: Path, kills: int, seed: int, say: Callable[[str], None] = print) -> list[str]:
    """What was different at the end, or went wrong on the way; empty if nothing."""
    say(f"{kills} kills, seed {seed}")
    corpus = folder / "corpus"
    corpus.mkdir()
    (corpus / "a.txt").write_text("".join(f"the {number}th line of a small corpus\n" for number in range(400)))
    steps = STEPS_PER_KILL * (kills + 1)
    whole, killed = Run(folder, "whole", steps), Run(folder, "killed", steps)
    if code := finished(whole, folder):
        return [f"the uninterrupted run ended with {code}:\n{end_of(folder / 'whole.log')}"]
    say(f"uninterrupted: {steps} steps")
    chance = random.Random(seed)
    for number in range(1, kills + 1):
        moment = MOMENTS[number % len(MOMENTS)] if number <= len(MOMENTS) else chance.choice(MOMENTS)
        problem = killed_once(killed, moment, number, chance, folder, say)
        if problem is not None:
            return [f"start {number}: {problem}\n{end_of(folder / 'killed.log')}"]
    if code := finished(killed, folder):
        return [f"the last start ended with {code}:\n{end_of(folder / 'killed.log')}"]
    return different(whole, killed)


def finished(run: Run, folder: Path) -> int:
    """The exit code of a start that is left alone."""
    process = run.start(folder / f"{run.name}.log")
    try:
        return process.wait(LIMIT_S + run.steps)
    finally:
        end(process)


def killed_once(
    run: Run, moment: str, number: int, chance: random.Random, folder: Path, say: Callable[[str], None]
) -> str | None:
    """One start with one kill; a problem, if there is one."""
    before = run.steps_logged
    process = run.start(folder / "killed.log")
    try:
        ranks = wait_for(lambda: started_ranks(process), process)
        await_moment(run, moment, before, chance, process)
        if process.poll() is not None:
            return f"it ended by itself with {process.returncode}, before a rank was killed"
        victim = chance.randrange(len(ranks))
        was_saving = run.is_saving
        ranks[victim].send_signal(signal.SIGKILL)
        code = process.wait(LIMIT_S)
        left = [rank.pid for rank in ranks if rank.is_running() and rank.status() != psutil.STATUS_ZOMBIE]
        state = "while saving" if was_saving else f"at {moment}"
        say(f"kill {number}: rank {victim} {state}, {run.steps_logged} of {run.steps} steps logged")
        if code != 1:
            return f"the launcher left with {code} after a rank was killed"
        return f"processes {left} were left" if left else None
    finally:
        end(process)


def await_moment(run: Run, moment: str, before: int, chance: random.Random, process: subprocess.Popen[bytes]) -> None:
    """Returns at the moment, or when the run has ended."""
    if moment == "start-up":
        time.sleep(chance.uniform(0.0, 3.0))
        return
    goal = chance.randrange(1, STEPS_PER_KILL + 1)
    # Lines of steps that are run again are cut first, so the count falls before it grows.
    wait_for(lambda: has_begun(run, process), process)
    first = run.steps_logged
    wait_for(lambda: run.steps_logged >= min(first + goal, run.steps - 1), process)
    if moment == "during a save":
        wait_for(lambda: run.is_saving or run.steps_logged >= run.steps - 1, process, every_s=0.0)
    else:
        time.sleep(chance.uniform(0.0, 0.02))


def has_begun(run: Run, process: subprocess.Popen[bytes]) -> bool:
    """This start has opened the metrics: they are younger than it."""
    try:
        return (run.run_dir / "metrics.jsonl").stat().st_mtime > psutil.Process(process.pid).create_time() + 0.5
    except (FileNotFoundError, psutil.NoSuchProcess):
        return False


def started_ranks(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """Both of them, or none yet."""
    try:
        found = [
            child
            for child in psutil.Process(process.pid).children()
            if "launcher.worker" in child.cmdline() and child.status() != psutil.STATUS_ZOMBIE
        ]
    except psutil.NoSuchProcess:
        return []
    return found if len(found) == 2 else []


def wait_for(condition: Callable[[], T], process: subprocess.Popen[bytes], every_s: float = 0.005) -> T:
    """The first true answer, or the last one when the process ended. Raises TimeoutError at the limit."""
    limit = time.monotonic() + LIMIT_S
    while not (answer := condition()) and process.poll() is None:
        if time.monotonic() > limit:
            raise TimeoutError(f"waited {LIMIT_S:g} s in vain")
        time.sleep(every_s)
    return answer


def different(whole: Run, killed: Run) -> list[str]:
    """Between the last checkpoints and the losses of two runs."""
    import torch  # only now: while ranks are killed this process stays small

    from recipes.checkpoint.folder import checkpoints_of, newest_complete
    from recipes.checkpoint.reader import CheckpointReader
    from recipes.loggers.jsonl import read_lines

    readers = []
    for run in (whole, killed):
        found = newest_complete(checkpoints_of(run.run_dir))
        if found is None or found.step != run.steps:
            return [f"{run.name}: the last checkpoint is {found}, expected step {run.steps}"]
        readers.append(CheckpointReader(found.path))
    names, others = readers[0].names(), readers[1].names()
    problems = [] if names == others else [f"tensors of one run alone: {sorted(set(names) ^ set(others))}"]
    problems += [
        f"different: {name}"
        for name in names
        if name in others and not torch.equal(readers[0].whole(name), readers[1].whole(name))
    ]
    curves = []
    for run in (whole, killed):
        lines = [line for line in read_lines(run.run_dir / "metrics.jsonl") if "loss" in line]
        steps = [line["step"] for line in lines]
        if steps != list(range(1, run.steps + 1)):
            problems.append(f"{run.name}: metrics.jsonl does not hold every step once")
        curves.append([line["loss"] for line in lines])
    return problems if curves[0] == curves[1] else [*problems, "the losses are different"]


def end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def end_of(log: Path, count: int = 30) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-count:])


if __name__ == "__main__":
    sys.exit(main())
