"""How long a plan takes: the FSDP paper's GPT-175B on 512 ranks, wall and CPU time and the peak of memory.

    python benchmarks/plan.py

Wanted: under 30 s and 4 GB on a machine with two cores.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import tempfile
import time

WORDS = ["experiment=paper_gpt_175b", "cluster.num_nodes=64", "train.global_batch=512"]


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "launcher", "action=plan", *WORDS, f"run.dir={folder}/plan"]
        began = time.perf_counter()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        wall_s = time.perf_counter() - began
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = used.ru_utime + used.ru_stime
    print(f"175B on 512 ranks: {wall_s:.1f} s, {cpu_s:.1f} s of CPU, {used.ru_maxrss / 1e6:.2f} GB at most")


if __name__ == "__main__":
    main()
