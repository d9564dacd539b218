"""How long the command line takes to answer: help, a config error, a check, a sweep's table. Starts no ranks.

    python benchmarks/startup.py [--repeat 5]

Each answer is a fresh process; the fastest of the repeats is printed beside the median, because other programs on
the machine only ever make a run slower. The target for the first three is 1.5 s.
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

ANSWERS = {
    "--help": (["--help"], 0),
    "a config error": (["train.stepz=3", "model=gpt_tny"], 2),
    "action=check": (["action=check"], 0),
    "--cfg job --resolve": (["--cfg", "job", "--resolve"], 0),
    "-m action=check, 20 jobs": (["-m", "action=check", f"run.seed={','.join(map(str, range(20)))}"], 0),
}


def seconds_of(arguments: list[str], expected_code: int, folder: str) -> float:
    """One fresh process. Raises RuntimeError if it answers with another exit code than expected."""
    started = time.perf_counter()
    done = subprocess.run([sys.executable, "-m", "launcher", *arguments], cwd=folder, capture_output=True, check=False)
    seconds = time.perf_counter() - started
    if done.returncode != expected_code:
        raise RuntimeError(f"{arguments}: exit code {done.returncode}, not {expected_code}\n{done.stderr.decode()}")
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=5, help="fresh processes per answer")
    repeat = parser.parse_args().repeat
    # An installed launcher is found anyway; a checkout only from its own folder.
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    os.environ["PYTHONPATH"] = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    print(f"Python {platform.python_version()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    print(f"{'answer':<28}{'fastest':>10}{'median':>10}")
    with tempfile.TemporaryDirectory() as folder:
        for name, (arguments, code) in ANSWERS.items():
            times = [seconds_of(arguments, code, folder) for _ in range(repeat)]
            print(f"{name:<28}{min(times):>8.2f} s{statistics.median(times):>8.2f} s")


if __name__ == "__main__":
    main()
