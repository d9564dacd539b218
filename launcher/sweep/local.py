"""Jobs on this machine: each a process tree of its own, several at once if asked for, cores and GPUs divided.

A job gets its share when it starts: cores by number (threads of a rank), GPUs by name. Jobs start in order; one that
finds too few free GPUs waits, and those after it with it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from launcher import failure
from launcher.device import choose_device
from launcher.errors import EXIT_RANK_FAILED
from launcher.parent_death import PARENT_PID_VARIABLE
from launcher.rank_plan import python_path
from launcher.rank_signals import exit_code_of
from launcher.sweep import record, states
from launcher.sweep.backends import Backend, Event
from launcher.sweep.measures import measures_of
from launcher.sweep.record import End, Job

NAME = "local"
_LOOK_S = 0.05
Command = Callable[[Job], Sequence[str]]


@dataclass(frozen=True)
class Machine:
    """cores: as many as this process may use. gpus: names, as CUDA_VISIBLE_DEVICES takes them.

    torch_cuda: the CUDA version of the installed torch; None: it has none.
    """

    cores: int
    gpus: tuple[str, ...] = ()
    torch_cuda: str | None = None


def gpu_names(count: int, environ: Mapping[str, str]) -> tuple[str, ...]:
    """The first ``count`` GPUs a process started here would see, by the names to hand on."""
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    names = [name.strip() for name in visible.split(",")] if visible is not None else [str(n) for n in range(count)]
    return tuple(names[:count])


def job_command(plugins: Sequence[str]) -> Command:
    """The real one; tests have their own."""
    ours = [sys.executable, "-P", "-m", "launcher.sweep.job"]
    named = [word for plugin in plugins for word in ("--plugin", plugin)]
    return lambda job: [*ours, str(job.folder), *named]


@dataclass
class _Running:
    job: Job
    process: subprocess.Popen[bytes]
    gpus: tuple[str, ...]
    is_stopped: bool = False


@dataclass
class LocalBackend(Backend):
    """max_parallel: jobs at once. base: the environment jobs start from. cwd: the folder."""

    command: Command
    machine: Machine
    max_parallel: int = 1
    base: Mapping[str, str] = field(default_factory=lambda: os.environ)
    cwd: str | None = None
    name = NAME
    outlives = False

    def __post_init__(self) -> None:
        self._waiting: deque[Job] = deque()
        self._running: list[_Running] = []
        self._free_gpus = list(self.machine.gpus)
        self._num_stops = 0

    @property
    def is_busy(self) -> bool:
        return bool(self._waiting or self._running)

    def describe(self) -> list[str]:
        if self.max_parallel == 1:
            return ["one job after the other, each with the whole machine"]
        ranks = max((job.num_ranks for job in self._waiting), default=1)
        threads = self._threads(ranks)
        lines = [f"up to {self.max_parallel} jobs at once: {threads} thread{'s' if threads > 1 else ''} a rank"]
        if threads * ranks * self.max_parallel > self.machine.cores:
            lines.append(
                f"more ranks than the {self.machine.cores} cores of this machine: they will wait for each other"
            )
        if any(self._num_gpus(job) for job in self._waiting):
            at_once = min(self.max_parallel, len(self.machine.gpus) // ranks)
            lines.append(f"{ranks} of {len(self.machine.gpus)} GPUs for each job, so {at_once} at once")
        return lines

    def submit(self, jobs: Sequence[Job]) -> None:
        self._waiting.extend(jobs)

    def poll(self, wait_s: float) -> list[Event]:
        deadline = time.monotonic() + wait_s
        while True:
            # An end is told before anything follows it: it may be the reason to start nothing more.
            events = self._ended() or self._start_what_fits()
            if events or not self._running or time.monotonic() >= deadline:
                return events
            time.sleep(_LOOK_S)

    def stop(self, signum: int) -> None:
        self._waiting.clear()
        self._num_stops += 1
        for running in self._running:
            running.is_stopped = True
            running.process.send_signal(signum if self._num_stops == 1 else signal.SIGKILL)

    def _start_what_fits(self) -> list[Event]:
        events = []
        while self._waiting and len(self._running) < self.max_parallel:
            wanted = self._num_gpus(self._waiting[0])
            if wanted > len(self._free_gpus):
                break
            job = self._waiting.popleft()
            gpus = tuple(self._free_gpus[:wanted])
            del self._free_gpus[:wanted]
            self._running.append(_Running(job, self._start(job, gpus), gpus))
            events.append(Event("started", job.number))
        return events

    def _start(self, job: Job, gpus: tuple[str, ...]) -> subprocess.Popen[bytes]:
        """Raises OSError if there can be no process; the job is pending again then."""
        record.add(job.folder, "claimed", attempt=job.attempt + 1, backend=self.name)
        try:
            with job.log.open("ab") as log:
                return subprocess.Popen(
                    self.command(job),
                    env=self._environment(job, gpus),
                    cwd=self.cwd,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # Ctrl-C of the terminal reaches the sweep alone, which passes it on
                )
        except OSError:
            record.add(job.folder, "released")
            raise

    def _environment(self, job: Job, gpus: tuple[str, ...]) -> dict[str, str]:
        env = {**self.base, **python_path(self.base), PARENT_PID_VARIABLE: str(os.getpid())}
        if self.max_parallel > 1:
            env.setdefault("OMP_NUM_THREADS", str(self._threads(job.num_ranks)))
            if gpus:
                env["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
        return env

    def _threads(self, num_ranks: int) -> int:
        return max(1, self.machine.cores // (self.max_parallel * num_ranks))

    def _num_gpus(self, job: Job) -> int:
        """GPUs the job will use by itself, as its launcher decides."""
        try:
            device, _ = choose_device(job.device, job.num_ranks, len(self.machine.gpus), self.machine.torch_cuda)
        except ValueError:
            return 0  # asked for by name and not there: the job says so itself
        return job.num_ranks if device == "cuda" else 0

    def _ended(self) -> list[Event]:
        events = []
        for running in [running for running in self._running if running.process.poll() is not None]:
            self._running.remove(running)
            self._free_gpus.extend(running.gpus)
            job = record.reread(running.job.folder)
            if job.end is None:
                record.add_end(job.folder, _unsaid(job, running.process.returncode, running.is_stopped))
            events.append(Event("ended", job.number))
        return events


def _unsaid(job: Job, returncode: int, is_stopped: bool) -> End:
    """The end of a job whose process could not write it."""
    measures = measures_of(job.run_dir)
    if returncode < 0 and is_stopped:
        return End(states.CANCELLED, exit_code_of(-returncode), measures=measures)
    if returncode < 0:
        error = f"the job's own launcher was killed by {failure.signal_name(-returncode)}"
        return End(states.LOST, exit_code_of(-returncode), error=error, measures=measures)
    last = failure.last_lines(job.log, 1)
    return End(states.FAILED, returncode or EXIT_RANK_FAILED, error=last or "left without a word", measures=measures)
