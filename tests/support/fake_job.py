"""Stands where a job's process would be: keeps the job's lock and record as the real one does, and trains nothing.

    python fake_job.py FOLDER

What it does follows from the job's swept values and from variables:
FAKE_FAIL (job numbers, comma separated) end with exit code 1; FAKE_OOM likewise with 6;
FAKE_NAN: their losses are no numbers; FAKE_S: seconds each takes;
FAKE_STARTS: a file that gets a line per start, "number environment".
Its loss is a bowl over ``optimizer.lr`` and ``run.seed``, so that a search has something to find.
"""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import time
from pathlib import Path
from types import FrameType

from launcher.parent_death import die_with_launcher
from launcher.sweep import record, states
from launcher.sweep.locks import Lock
from launcher.sweep.measures import measures_of
from launcher.sweep.record import End, Job


def numbers(name: str) -> set[int]:
    return {int(text) for text in os.environ.get(name, "").split(",") if text}


def loss_of(job: Job) -> float:
    lr = float(job.swept.get("optimizer.lr", "1e-3"))
    return 1.0 + (math.log10(lr) + 3) ** 2 + 0.01 * float(job.swept.get("run.seed", "0"))


def train(job: Job) -> None:
    job.run_dir.mkdir(exist_ok=True)
    final, is_nan = loss_of(job), job.number in numbers("FAKE_NAN")
    memory = (300 + 20 * (job.number % 5)) * 2**20
    with (job.run_dir / "metrics.jsonl").open("w") as file:
        for step in range(1, 41):
            loss = final + 3.0 * math.exp(-step / 8) + 0.05 * math.sin(step * (1 + job.number))
            loss = None if is_nan else loss  # as JSON has it
            line = {"step": step, "loss": loss, "step_s": 0.01 + 0.002 * (job.number % 7), "peak_rss_bytes": memory}
            file.write(json.dumps(line) + "\n")
        file.write(json.dumps({"step": 40, "eval_loss": None if is_nan else final}) + "\n")


def stopped(signum: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + signum)


def main(folder: Path) -> int:
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, stopped)
    with Lock(folder / record.LOCK_FILE):
        job = record.read(folder)
        assert job is not None
        record.add(folder, "started", host="here", pid=os.getpid())
        if name := os.environ.get("FAKE_STARTS"):
            with open(name, "a") as file:
                threads, gpus = os.environ.get("OMP_NUM_THREADS", "-"), os.environ.get("CUDA_VISIBLE_DEVICES", "-")
                file.write(f"{job.number} {threads} {gpus}\n")
        print(f"job {job.number} at work", flush=True)
        train(job)
        try:
            time.sleep(float(os.environ.get("FAKE_S", "0")))
        except SystemExit as stop:
            record.add_end(folder, End(states.CANCELLED, int(str(stop.code)), measures=measures_of(job.run_dir)))
            raise
        code = 1 if job.number in numbers("FAKE_FAIL") else 6 if job.number in numbers("FAKE_OOM") else 0
        error = "RuntimeError: the fake fails" if code else ""
        record.add_end(folder, End(states.state_of(code), code, 1 if code else None, error, measures_of(job.run_dir)))
        return code


if __name__ == "__main__":
    die_with_launcher()
    sys.exit(main(Path(sys.argv[1])))
