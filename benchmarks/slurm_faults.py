"""How long a fault on a SLURM cluster takes to become a state in the run's record: the table of docs/cluster.md.

    python -m benchmarks.slurm_faults [--repeat 3] [FAULT ...]

Starts the tests' two-node SLURM (root; Debian packages) and runs a tiny model on it. ``record``: seconds from the fault
to the line that tells of it in ``slurm/jobs.jsonl``; ``command``: to the end of the waiting command, which asks SLURM
every 5 s; ``again``: to the next start, where there is one. SLURM's own delays are in it: it looks for silent nodes
every 10 s, at time limits every 30 s, and lets a job that went back to the queue wait.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.slurm.launchers import Slurm
from tests.slurm.testbed import Testbed
from tests.support.processes import wait_until

LIMIT_S = 400
LONG = "train.steps=100000"
FOUR = ("cluster.num_nodes=2", "cluster.nproc_per_node=2")


@dataclass(frozen=True)
class Measured:
    """Seconds from the fault, see the module; None: does not apply. state: of the line; code: of the command."""

    state: str
    code: int | None
    record_s: float | None
    command_s: float | None
    again_s: float | None = None


class Run:
    """One run that waits for its job."""

    def __init__(self, cluster: Testbed, folder: Path, *words: str) -> None:
        folder.mkdir(parents=True)
        self.here, self.name = Slurm(folder, cluster), "run"
        self.process = self.here.start(self.name, *words)

    def marked(self, rank: int) -> float:
        """When this rank was about to misbehave: its mark's time."""
        mark = self.here.folder / f"ready_{rank}"
        wait_until(mark.exists, LIMIT_S)
        return mark.stat().st_mtime

    def step(self, number: int = 2) -> None:
        self.here.wait_for_step(self.name, number)

    def told(self, event: str, which: int = 0) -> dict[str, Any]:
        """The ``which``-th line of this kind in the record, once it is there."""
        found: list[dict[str, Any]] = []

        def is_there() -> bool:
            found[:] = [line for line in self.here.lines(self.name) if line["event"] == event]
            return len(found) > which

        wait_until(is_there, LIMIT_S, every_s=0.1)
        return found[which]

    def measured(self, at: float) -> Measured:
        """Of a fault that ends the run."""
        code = self.process.wait(LIMIT_S)
        command_s = time.time() - at
        end = self.told("ended")
        return Measured(end["state"], code, end["time"] - at, command_s)

    def close(self) -> None:
        self.here.close()


def a_rank_fails(how: str, rank: int) -> Callable[[Testbed, Path], Measured]:
    def fault(cluster: Testbed, folder: Path) -> Measured:
        run = Run(cluster, folder, *FOUR, f"model.how={how}", f"model.at_rank={rank}", f"model.ready_dir={folder}")
        at = run.marked(rank)
        measured = run.measured(at)
        run.close()
        return measured

    return fault


def cancelled(cluster: Testbed, folder: Path) -> Measured:
    run = Run(cluster, folder, *FOUR, LONG)
    run.step()
    at = time.time()
    cluster.run("scancel", run.here.job(run.name))
    measured = run.measured(at)
    run.close()
    return measured


def near_the_limit(cluster: Testbed, folder: Path) -> Measured:
    """From the moment from which SLURM owes the signal; the run may not go back to the queue."""
    run = Run(cluster, folder, LONG, "cluster.time_limit=00:05:00", "cluster.signal_lead_s=60", "cluster.requeue=false")
    run.step()
    cluster.run("scontrol", "update", f"JobId={run.here.job(run.name)}", "TimeLimit=1")
    measured = run.measured(time.time())
    run.close()
    return measured


def over_the_limit(cluster: Testbed, folder: Path) -> Measured:
    """The ranks sleep in a forward pass and cannot save: from the limit, a minute after the start."""
    run = Run(cluster, folder, "model.how=wait", "cluster.time_limit=00:05:00", f"model.ready_dir={folder}")
    run.marked(0)
    cluster.run("scontrol", "update", f"JobId={run.here.job(run.name)}", "TimeLimit=1")
    measured = run.measured(run.told("started")["time"] + 60)
    run.close()
    return measured


def preempted(cluster: Testbed, folder: Path) -> Measured:
    run = Run(cluster, folder, *FOUR, LONG, "cluster.grace_s=20")
    run.step()
    at = time.time()
    cluster.run("sbatch", "-Q", "-p", "urgent", "-N2", "--exclusive", "-t1", "-o", "/dev/null", "--wrap", "sleep 1")
    return _came_back(run, at)


def a_daemon_dies(cluster: Testbed, folder: Path) -> Measured:
    """The ranks of the node live on, cut off from SLURM. The daemon is started again once the node is down."""
    run = Run(cluster, folder, *FOUR, LONG, "checkpoint.every=4")
    run.step(5)
    at = time.time()
    cluster.kill_node("node2")
    wait_until(lambda: "down" in cluster.run("sinfo", "-h", "-n", "node2", "-o", "%T"), LIMIT_S, every_s=0.2)
    cluster.start_node("node2")
    measured = _came_back(run, at)
    cluster.wait_for_nodes()
    return measured


def a_cable_is_cut(cluster: Testbed, folder: Path) -> Measured:
    """All ranks of the job live on behind it, with the file system; another node is free."""
    blocker = cluster.run(
        "sbatch", "--parsable", "-w", "node1", "--exclusive", "-o", "/dev/null", "--wrap", "sleep 600"
    ).strip()
    run = Run(cluster, folder, LONG, "checkpoint.every=4")
    run.step(5)
    at = time.time()
    cluster.cable("node2", "down")
    cluster.run("scancel", blocker)
    measured = _came_back(run, at)
    cluster.cable("node2", "up")
    cluster.wait_for_nodes()
    return measured


def _came_back(run: Run, at: float) -> Measured:
    again = run.told("started", 1)
    ends = [line for line in run.here.lines(run.name) if line["event"] == "ended" and line["restart"] == 0]
    first = ends[0] if ends else None
    run.close()
    run.process.wait(LIMIT_S)
    state = "none" if first is None else first["state"]
    return Measured(state, None, None if first is None else first["time"] - at, None, again["time"] - at)


FAULTS: dict[str, Callable[[Testbed, Path], Measured]] = {
    "raise": a_rank_fails("raise", 3),
    "kill": a_rank_fails("kill", 1),
    "scancel": cancelled,
    "near_limit": near_the_limit,
    "over_limit": over_the_limit,
    "preempted": preempted,
    "daemon": a_daemon_dies,
    "cable": a_cable_is_cut,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("faults", nargs="*", metavar="FAULT", help=f"of {', '.join(FAULTS)}; all of them")
    parser.add_argument("--repeat", type=int, default=3)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        cluster = Testbed(Path(folder) / "cluster")
        try:
            version = cluster.run("sbatch", "--version").strip()
            print(f"{version}, two nodes on {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
            print(f"{'fault':<12}{'state':<12}{'code':>6}{'record':>10}{'command':>10}{'again':>10}", flush=True)
            for name in given.faults or FAULTS:
                for number in range(given.repeat):
                    found = FAULTS[name](cluster, Path(folder) / f"{name}_{number}")
                    code = "-" if found.code is None else str(found.code)
                    times = "".join(_seconds(value) for value in (found.record_s, found.command_s, found.again_s))
                    print(f"{name:<12}{found.state:<12}{code:>6}{times}", flush=True)
        finally:
            cluster.stop()


def _seconds(value: float | None) -> str:
    return f"{'-':>10}" if value is None else f"{value:>8.1f} s"


if __name__ == "__main__":
    main()
