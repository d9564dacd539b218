"""What the pages about clusters and sweeps tell a reader to type is right, as far as a check can tell."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher import cli

ROOT = Path(__file__).parents[2]
PAGES = ("docs/cluster.md", "docs/sweeps.md", "README.md")
STARTERS = {"torchrun": ("--nnodes", "--nproc-per-node"), "srun": ("--nodes", "--ntasks-per-node")}


def commands(page: str) -> Iterator[str]:
    """Lines of code blocks that start a run, or print its script, and need no file of the reader's."""
    for block in re.findall(r"^ *```\n(.*?)^ *```", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL):
        for line in re.sub(r"\\\n\s*", "", block).splitlines():
            is_command = re.match(r" *(fsdp-launch|torchrun|srun) ", line)
            if is_command and not re.search(r"action=(?!print_script|check)|--(help|cfg)|\.\.\.|\$HOME|\[\./", line):
                yield line.strip()


COMMANDS = [(page, line) for page in PAGES for line in commands(page)]


def test_the_pages_have_commands() -> None:
    assert {page for page, _ in COMMANDS} == set(PAGES)
    assert {
        word for _, line in COMMANDS for word in ("torchrun", "srun", "cluster=slurm", "-m") if word in line.split()
    } == {
        "torchrun",
        "srun",
        "cluster=slurm",
        "-m",
    }


@pytest.mark.parametrize(("page", "line"), COMMANDS, ids=[line[:60] for _, line in COMMANDS])
def test_a_command_of_the_docs_is_right(
    page: str, line: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = shlex.split(line, comments=True)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    if words[0] in STARTERS:
        nodes, ranks = (int(words[words.index(option) + 1]) if option in words else 1 for option in STARTERS[words[0]])
        monkeypatch.setenv("RANK", "0")
        monkeypatch.setenv("WORLD_SIZE", str(nodes * ranks))
        monkeypatch.setenv("LOCAL_RANK", "0")
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    arguments = words[1 + words.index("launcher" if "launcher" in words else "fsdp-launch") :]
    if not any(word.startswith("action=") for word in arguments):
        arguments.append("action=check")
    monkeypatch.chdir(tmp_path)
    assert cli.main(arguments) == 0, capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
