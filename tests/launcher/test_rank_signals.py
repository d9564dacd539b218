"""Signals inside a rank: requests are flags, two of them from two senders are one, a second one ends it at once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

PRELUDE = """
import os, signal, sys, time
from launcher.rank_signals import SignalWatch, Told
signals = SignalWatch(Told(lambda what: print("overdue", what, flush=True), lambda: print("heeded", flush=True)))
signals.grace_s = 600
signals.install()
print("ready", flush=True)
def until(condition):
    while not condition():
        time.sleep(0.005)
"""


class Script:
    """A process with the handlers installed, ready for signals."""

    def __init__(self, body: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", PRELUDE + textwrap.dedent(body)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "PYTHONPATH": str(Path.cwd())},
        )
        self.expect("ready")

    def expect(self, line: str) -> None:
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == line + "\n"

    def send(self, *signals: signal.Signals) -> None:
        for signum in signals:
            self.process.send_signal(signum)

    def end(self) -> tuple[int, str]:
        out, _ = self.process.communicate(timeout=60)
        return self.process.returncode, out


@pytest.fixture
def started() -> Iterator[list[Script]]:
    scripts: list[Script] = []
    yield scripts
    for script in scripts:
        script.process.kill()
        script.process.communicate()


def start(started: list[Script], body: str) -> Script:
    started.append(Script(body))
    return started[-1]


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2])
def test_a_request_sets_a_flag_and_nothing_else(started: list[Script], signum: signal.Signals) -> None:
    script = start(started, "until(lambda: signals.stop.why); print(signals.stop.why, flush=True)")
    script.send(signum)
    assert script.end() == (0, f"{signum.name}\n")


def test_the_same_request_from_scheduler_and_launcher_is_one(started: list[Script]) -> None:
    script = start(started, "until(lambda: signals.stop.why); time.sleep(0.3); print('saved', flush=True)")
    script.send(signal.SIGTERM, signal.SIGTERM, signal.SIGUSR1)
    assert script.end() == (0, "saved\n")


@pytest.mark.parametrize("is_late", [False, True], ids=["before", "after"])
def test_where_there_is_nothing_to_save_a_request_unwinds(started: list[Script], is_late: bool) -> None:
    body = """
    try:
        until(lambda: signals.stop.why or {is_late})
        signals.nothing_to_save()
        print("working", flush=True)
        time.sleep(600)
    except KeyboardInterrupt as stop:
        print("unwound", stop.exit_code)
    """
    script = start(started, body.replace("{is_late}", str(is_late)))
    if is_late:
        script.expect("working")
    script.send(signal.SIGTERM)
    assert script.end() == (0, "unwound 143\n")


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_at_once(started: list[Script], second: signal.Signals) -> None:
    body = "until(lambda: signals.stop.why); time.sleep(1.2); print('asked', flush=True); time.sleep(600)"
    script = start(started, body)
    script.send(signal.SIGTERM)
    script.expect("asked")
    script.send(second)
    assert script.end() == (128 + second, "")


def test_a_rank_that_hangs_outside_python_ends_itself(started: list[Script]) -> None:
    """A mutex that is never given back: no Python handler runs any more."""
    body = """
    import ctypes
    libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
    libc.pthread_mutex_lock(mutex)
    signals.grace_s = 0.2
    print("hanging", flush=True)
    libc.pthread_mutex_lock(mutex)
    """
    script = start(started, body)
    script.expect("hanging")
    script.send(signal.SIGUSR1)
    code, out = script.end()
    assert code == 128 + signal.SIGUSR1
    assert out.startswith("overdue was asked to stop by SIGUSR1 and reached no step boundary within 0.2 s")


def test_a_heeded_request_has_no_clock_any_more(started: list[Script]) -> None:
    body = (
        "signals.grace_s = 1.0; until(lambda: signals.stop.why); signals.stop.heed(); time.sleep(1.5); print('saved')"
    )
    script = start(started, body)
    script.send(signal.SIGTERM)
    assert script.end() == (0, "heeded\nsaved\n")


def test_ctrl_c_unwinds(started: list[Script]) -> None:
    body = """
    try:
        print("inside", flush=True)  # a signal before the try block would be nobody's to catch
        time.sleep(600)
    except KeyboardInterrupt as stop:
        print("unwound", stop.exit_code)
    """
    script = start(started, body)
    script.expect("inside")
    script.send(signal.SIGINT)
    assert script.end() == (0, "unwound 130\n")


LOADING = """
import os, signal, sys, threading
threading.Timer({delay_s}, os.kill, (os.getpid(), signal.SIGINT)).start()
from launcher.entry import main
sys.argv = ["fsdp-launch", "--help"]
code = main()
signal.signal(signal.SIGINT, signal.SIG_IGN)  # too late: the command has answered
os._exit(code)
"""


@pytest.mark.parametrize("delay_s", [0.02, 0.06, 0.12, 0.2])
def test_ctrl_c_while_the_command_still_loads_leaves_no_traceback(delay_s: float) -> None:
    command = [sys.executable, "-c", LOADING.format(delay_s=delay_s)]
    done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, timeout=60)
    assert (done.returncode, done.stderr) in {(130, ""), (0, "")}


UNWINDING = """
import os, signal, sys, time
import launcher.cli
from launcher.entry import main
def at_work():
    try:
        os.kill(os.getpid(), signal.{name})
        time.sleep({sleep_s})
        return 0
    finally:
        print("unwound", flush=True)
launcher.cli.main = at_work
sys.exit(main())
"""


@pytest.mark.parametrize(
    ("name", "before", "code"), [("SIGTERM", [], 143), ("SIGHUP", [], 129), ("SIGHUP", ["nohup"], 0)]
)
def test_a_signal_before_there_are_ranks_unwinds(name: str, before: list[str], code: int) -> None:
    script = UNWINDING.format(name=name, sleep_s=0.1 if before else 60)
    command = [*before, sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr.replace("nohup: ignoring input\n", "")) == (code, "unwound\n", "")
