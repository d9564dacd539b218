"""``fsdp-launch`` whose local jobs are ``fake_job.py``: ``python -m tests.support.fake_sweep ARGUMENTS``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from launcher import cli
from launcher.sweep import chosen
from launcher.sweep.local import Command

SCRIPT = Path(__file__).with_name("fake_job.py")


def fake_command(plugins: Sequence[str]) -> Command:
    return lambda job: [sys.executable, str(SCRIPT), str(job.folder)]


if __name__ == "__main__":
    chosen.job_command = fake_command
    sys.exit(cli.main(sys.argv[1:]))
