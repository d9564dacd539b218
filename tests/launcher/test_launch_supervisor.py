"""The supervisor with ranks that are tiny scripts: who is blamed, who is ended, what the exit code is."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher.rank_process import RankCommand
from launcher.supervisor import Limits, Outcome, supervise
from tests.support.processes import is_alive, wait_until, with_argument

PRELUDE = """
import os, signal, sys, time
from launcher import parent_death
from launcher.rank_signals import SignalWatch, Told
from launcher.status_pipe import StatusWriter
from launcher.worker import GOOD_ENDS, guarded, overdue
parent_death.die_with_launcher()
status = StatusWriter.from_environment()
rank = int(os.environ["RANK"])
signals = SignalWatch(Told(overdue(rank, status.failed), status.saving)).install()
signals.grace_s = 0.5

def work(function):
    def exit_code():
        result = function()
        return result if isinstance(result, int) else 0
    code = guarded(rank, exit_code, status.failed)
    if code in GOOD_ENDS:
        status.done()
    sys.stdout.flush()
    os._exit(code)

def lose_the_peer():
    raise RuntimeError("gloo: Connection closed by peer [127.0.0.1]:1")
"""
SLEEP = "work(lambda: time.sleep(600))"
DONE = "work(lambda: print('finished', rank))"
RAISE = "work(lambda: 1 / 0)"
LOSE = "work(lose_the_peer)"


@pytest.fixture
def tag() -> Iterator[str]:
    """A word in the command line of every process of the test; nothing with it may be left afterwards."""
    word = f"tag-{uuid.uuid4().hex}"
    yield word
    wait_until(lambda: not with_argument(word), limit_s=10)


class Runner:
    """Supervises scripts as ranks; ``said`` keeps the lines for people."""

    def __init__(self, folder: Path, tag: str) -> None:
        self.folder, self.tag = folder, tag
        self.said: list[str] = []

    def __call__(self, *scripts: str, grace_s: float = 20.0, time_limit_s: float | None = None) -> Outcome:
        return supervise(commands(self.folder, self.tag, scripts), Limits(grace_s, time_limit_s), self.said.append)


@pytest.fixture
def run(tmp_path: Path, tag: str) -> Runner:
    return Runner(tmp_path, tag)


def commands(folder: Path, tag: str, scripts: tuple[str, ...]) -> list[RankCommand]:
    return [
        RankCommand(
            rank,
            (sys.executable, "-c", PRELUDE + textwrap.dedent(script), tag),
            {**os.environ, "RANK": str(rank), "PYTHONPATH": os.getcwd()},
            folder / f"rank_{rank}.log",
        )
        for rank, script in enumerate(scripts)
    ]


def test_all_done_is_success_and_each_rank_has_its_log(run: Runner, tmp_path: Path) -> None:
    assert run(DONE, DONE, DONE) == Outcome(0)
    assert [(tmp_path / f"rank_{rank}.log").read_text() for rank in range(3)] == [f"finished {r}\n" for r in range(3)]


def test_a_rank_that_raises_is_named_with_its_traceback_and_the_others_are_ended(run: Runner) -> None:
    outcome = run(SLEEP, RAISE, SLEEP)
    assert outcome.exit_code == 1
    assert outcome.failure is not None
    assert (outcome.failure.rank, outcome.failure.what) == (1, "ZeroDivisionError: division by zero")
    assert "ZeroDivisionError" in outcome.failure.traceback


def test_a_killed_rank_is_named(run: Runner) -> None:
    outcome = run(SLEEP, SLEEP, "os.kill(os.getpid(), signal.SIGKILL)")
    assert outcome.exit_code == 1
    assert outcome.failure is not None
    assert (outcome.failure.rank, outcome.failure.what) == (2, "was killed by SIGKILL")


def test_a_segmentation_fault_is_named(run: Runner) -> None:
    outcome = run("os.kill(os.getpid(), signal.SIGSEGV)", SLEEP)
    assert outcome.failure is not None
    assert (outcome.failure.rank, outcome.failure.what) == (0, "was killed by SIGSEGV")


@pytest.mark.parametrize("code", [0, 3])
def test_a_rank_that_leaves_without_a_word_has_failed(run: Runner, code: int) -> None:
    outcome = run(SLEEP, SLEEP, f"os._exit({code})")
    assert outcome.exit_code == 1
    assert outcome.failure is not None
    assert (outcome.failure.rank, outcome.failure.what) == (2, f"left before the run ended (exit code {code})")


def test_sys_exit_inside_the_run_has_failed_even_with_0(run: Runner) -> None:
    outcome = run("work(lambda: sys.exit(0))", SLEEP)
    assert outcome.exit_code == 1
    assert outcome.failure is not None
    assert outcome.failure.what == "called sys.exit(0) before the run ended"


def test_a_lost_connection_is_not_blamed_when_its_cause_shows(run: Runner) -> None:
    outcome = run(LOSE, "time.sleep(0.2); work(lambda: 1 / 0)", LOSE)
    assert outcome.failure is not None
    assert outcome.failure.rank == 1


def test_a_lost_connection_alone_is_told(run: Runner) -> None:
    outcome = run(LOSE, SLEEP)
    assert outcome.failure is not None
    assert outcome.failure.rank == 0
    assert "Connection closed by peer" in outcome.failure.what


def test_running_out_of_memory_has_an_exit_code_of_its_own(run: Runner) -> None:
    script = """
    def allocate():
        raise MemoryError("4 TiB")
    work(allocate)
    """
    outcome = run(SLEEP, script)
    assert outcome.exit_code == 6
    assert outcome.failure is not None
    assert "micro_batch" in outcome.failure.hint


def test_what_a_failed_rank_started_is_ended_too(run: Runner, tmp_path: Path, tag: str) -> None:
    helper = f"""
    import subprocess
    helper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", {tag!r}])
    open({str(tmp_path / "helper")!r}, "w").write(str(helper.pid))
    {RAISE}
    """
    run(SLEEP, helper)
    wait_until(lambda: not is_alive(int((tmp_path / "helper").read_text())))


def test_the_time_limit_stops_all_ranks(run: Runner) -> None:
    outcome = run(SLEEP, SLEEP, time_limit_s=1.0)
    assert outcome.exit_code == 128 + signal.SIGTERM
    assert outcome.stopped_by is not None
    assert "cluster.time_limit" in outcome.stopped_by


def test_a_rank_that_ignores_the_stop_signal_is_killed_after_the_grace_period(run: Runner) -> None:
    stubborn = "signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    outcome = run(stubborn, SLEEP, time_limit_s=1.0, grace_s=0.5)
    assert outcome.exit_code == 128 + signal.SIGTERM


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_to_the_launcher_ends_everything(run: Runner, tmp_path: Path, signum: signal.Signals) -> None:
    ready = f"open({str(tmp_path)!r} + f'/ready_{{rank}}', 'w'); {SLEEP}"
    send_when_ready(tmp_path, 2, [signum])
    outcome = run(ready, ready)
    assert outcome.exit_code == 128 + signum
    assert outcome.stopped_by == signum.name


def test_a_second_signal_ends_at_once(run: Runner, tmp_path: Path) -> None:
    ready = f"open({str(tmp_path)!r} + f'/ready_{{rank}}', 'w')"
    stubborn = f"signal.signal(signal.SIGINT, signal.SIG_IGN); {ready}; time.sleep(600)"
    send_when_ready(tmp_path, 2, [signal.SIGINT, signal.SIGINT])
    outcome = run(stubborn, stubborn, grace_s=600)
    assert outcome.exit_code == 130
    assert any("again" in line for line in run.said[1:])


def test_ranks_that_saved_on_a_signal_leave_with_75(run: Runner, tmp_path: Path) -> None:
    send_when_ready(tmp_path, 2, [signal.SIGTERM])
    assert run(*[saves(tmp_path, 0.0)] * 2).exit_code == 75


def test_a_save_may_take_longer_than_the_grace_period(run: Runner, tmp_path: Path) -> None:
    send_when_ready(tmp_path, 2, [signal.SIGTERM])
    assert run(*[saves(tmp_path, 1.8)] * 2, grace_s=0.1).exit_code == 75


def test_ranks_that_were_asked_from_elsewhere_and_saved_are_no_failures(run: Runner) -> None:
    assert run("work(lambda: 75)", "time.sleep(0.3); work(lambda: 75)") == Outcome(75)


def test_a_rank_that_reaches_no_boundary_ends_itself_and_says_so(run: Runner) -> None:
    outcome = run("os.kill(os.getpid(), signal.SIGTERM); time.sleep(600)", SLEEP)
    assert outcome.failure is not None
    assert outcome.failure.rank == 0
    assert "reached no step boundary within 0.5 s (cluster.grace_s): ended without saving" in outcome.failure.what


def saves(folder: Path, seconds: float) -> str:
    """A rank whose next step boundary comes a moment after the signal, and whose save then takes ``seconds``."""
    return f"""
    open({str(folder)!r} + f'/ready_{{rank}}', 'w')
    def train():
        while signals.stop.why is None:
            time.sleep(0.01)
        signals.stop.heed()
        time.sleep({seconds})
        return 75
    work(train)
    """


def test_a_signal_that_was_ignored_stays_ignored(run: Runner, tmp_path: Path) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        slow = f"open({str(tmp_path)!r} + f'/ready_{{rank}}', 'w'); work(lambda: time.sleep(0.5))"
        send_when_ready(tmp_path, 2, [signal.SIGHUP])
        assert run(slow, slow).exit_code == 0
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_rank_that_cannot_start_leaves_nobody(tmp_path: Path, tag: str) -> None:
    plan = commands(tmp_path, tag, (SLEEP, SLEEP))
    broken = RankCommand(1, ("/does/not/exist",), plan[1].env, plan[1].log_path)
    with pytest.raises(FileNotFoundError):
        supervise([plan[0], broken], Limits(1.0), lambda text: None)


def test_ranks_die_with_a_launcher_that_is_killed(tmp_path: Path, tag: str) -> None:
    ready = f"open({str(tmp_path)!r} + f'/ready_{{rank}}', 'w'); {SLEEP}"
    launcher_script = f"""
from pathlib import Path
from launcher.supervisor import Limits, supervise
from tests.launcher.test_launch_supervisor import commands
supervise(commands(Path({str(tmp_path)!r}), {tag!r}, ({ready!r},) * 3), Limits(5.0), print)
"""
    process = subprocess.Popen([sys.executable, "-c", launcher_script], cwd=os.getcwd())
    try:
        wait_until(lambda: all((tmp_path / f"ready_{rank}").exists() for rank in range(3)))
        assert len(with_argument(tag)) >= 3
    finally:
        process.kill()
        process.wait()
    wait_until(lambda: not with_argument(tag), limit_s=10)


def send_when_ready(folder: Path, num_ranks: int, signals: list[signal.Signals]) -> None:
    """Sends ``signals`` to this process, a moment apart, when every rank has left its file."""

    def send() -> None:
        wait_until(lambda: all((folder / f"ready_{rank}").exists() for rank in range(num_ranks)))
        for signum in signals:
            os.kill(os.getpid(), signum)
            threading.Event().wait(0.3)

    threading.Thread(target=send, daemon=True).start()


def test_one_request_that_comes_twice_is_one(run: Runner, tmp_path: Path) -> None:
    """``timeout`` signals its child and then the child's group: the launcher hears it twice, and still saves."""
    send_when_ready(tmp_path, 2, [signal.SIGTERM, signal.SIGTERM])
    assert run(*[saves(tmp_path, 1.5)] * 2).exit_code == 75
    assert len(run.said) == 1


def test_a_signal_without_a_name_is_told_by_its_number(run: Runner) -> None:
    outcome = run(f"os.kill(os.getpid(), {signal.SIGRTMIN + 5}); time.sleep(600)", SLEEP)
    assert outcome.failure is not None
    assert outcome.failure.what == f"was killed by signal {signal.SIGRTMIN + 5}"
