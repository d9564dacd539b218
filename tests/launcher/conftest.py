"""The command line in this process: what it prints, its exit code, and that nothing is started or left behind."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from launcher import cli
from launcher.plugins import unload_plugins
from launcher.request import LaunchRequest
from launcher.schema import Config
from tests.launcher.programs import Program


@dataclass(frozen=True)
class Said:
    """What one command said. launched: the config and request that would have been launched, if any."""

    code: int
    out: str
    err: str
    launched: tuple[Config, LaunchRequest] | None


Command = Callable[..., Said]


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Command]:
    """``command("model=gpt_tiny", ...)`` in an empty folder; launching is recorded instead of done."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    launched: list[tuple[Config, LaunchRequest]] = []

    def launch(config: Config, request: LaunchRequest) -> int:
        launched.append((config, request))
        return 0

    monkeypatch.setattr(cli, "launch", launch)

    def run(*arguments: str) -> Said:
        launched.clear()
        capsys.readouterr()
        before = sorted(os.walk(tmp_path))
        code = cli.main(arguments)
        assert sorted(os.walk(tmp_path)) == before, "composing and checking leave no trace"
        printed = capsys.readouterr()
        return Said(code, printed.out, printed.err, launched[0] if launched else None)

    yield run
    unload_plugins()


@pytest.fixture
def program(tmp_path: Path) -> Iterator[Program]:
    program = Program(tmp_path)
    yield program
    program.end()
