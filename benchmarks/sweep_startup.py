"""How long a sweep takes until its first job could start: composing, checking, listing, putting on record.

    python benchmarks/sweep_startup.py [--jobs 200] [--repeat 3]

Each answer is a fresh process; the fastest of the repeats is printed beside the median. The target is 0.15 s a job for
the first line.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# Puts every job on record and leaves before the first one is started.
ON_RECORD = """
import sys
from launcher import cli
from launcher.sweep import start
start.run_jobs = lambda *words, **more: 0
sys.exit(cli.main(sys.argv[1:]))
"""


def words(num_jobs: int) -> list[str]:
    """A grid like people's: learning rates by seeds by sharding."""
    rates = ",".join(f"{1e-4 * (index + 1):g}" for index in range(num_jobs // 4))
    return ["-m", f"optimizer.lr={rates}", "sharding=full,replicate", "sharding.reshard_after_forward=true,false"]


def seconds_of(command: list[str], folder: str) -> float:
    """One fresh process. Raises RuntimeError if it does not answer with 0."""
    started = time.perf_counter()
    done = subprocess.run([sys.executable, *command], cwd=folder, capture_output=True, check=False)
    seconds = time.perf_counter() - started
    if done.returncode:
        raise RuntimeError(f"{command}: exit code {done.returncode}\n{done.stderr.decode()}")
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=200, help="a multiple of 4")
    parser.add_argument("--repeat", type=int, default=3, help="fresh processes per line")
    given = parser.parse_args()
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    grid = words(given.jobs)
    lines = {
        "composed, checked, listed": ["-m", "launcher", "action=check", *grid],
        "composed, checked, on record": ["-c", ON_RECORD, *grid],
    }
    print(
        f"Python {platform.python_version()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, {given.jobs} jobs"
    )
    print(f"{'':<30}{'fastest':>10}{'median':>10}{'a job':>10}")
    with tempfile.TemporaryDirectory() as folder:
        for name, command in lines.items():
            times = [seconds_of(command, folder) for _ in range(given.repeat)]
            median = statistics.median(times)
            print(f"{name:<30}{min(times):>8.2f} s{median:>8.2f} s{1e3 * median / given.jobs:>7.0f} ms")


if __name__ == "__main__":
    main()
