"""A sweep as an array on a real SLURM: submitted, seen, collected, retried, cancelled."""

from __future__ import annotations

import csv
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher.slurm import records
from tests.slurm.testbed import Testbed
from tests.support.processes import wait_until

ROOT = Path(__file__).parents[2]
PLUGIN = ROOT / "tests" / "support" / "misbehaving_model.py"
LIMIT_S = 300  # reached only by a hang


class OnSlurm:
    """``fsdp-launch`` on the login node, in a folder of its own (paths are absolute: the login node starts in /)."""

    def __init__(self, folder: Path, cluster: Testbed) -> None:
        self.folder, self.cluster = folder, cluster
        (folder / "corpus").mkdir()
        (folder / "corpus" / "a.txt").write_text("".join(f"the {n}th line of a small corpus\n" for n in range(400)))

    def run(self, *arguments: str, cwd: Path | None = None) -> tuple[int, str]:
        environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-m", "launcher", f"plugins=[{PLUGIN}]", *arguments]
        process = self.cluster.start(*command, cwd=cwd or self.folder, environ=environ)
        out, err = process.communicate(timeout=LIMIT_S)
        return process.returncode, out + err

    def sweep(self, *arguments: str) -> tuple[int, str]:
        words = ["model=misbehaving", "data=text_files", f"data.path={self.folder}/corpus"]
        words += [f"data.cache_dir={self.folder}/cache", "train=smoke", "train.steps=3", "cluster.device=cpu"]
        return self.run(
            "-m", *words, "cluster=slurm", "cluster.nproc_per_node=1", f"sweep.dir={self.folder}/s", *arguments
        )

    def do(self, what: str, *arguments: str) -> tuple[int, str]:
        return self.run("action=sweep", f"sweep.dir={self.folder}/s", f"sweep.do={what}", *arguments)

    def rows(self) -> list[dict[str, str]]:
        with (self.folder / "s" / "results.csv").open() as file:
            return list(csv.DictReader(file))


@pytest.fixture
def there(slurm: Testbed, tmp_path: Path) -> Iterator[OnSlurm]:
    yield OnSlurm(tmp_path, slurm)
    ids = slurm.run("squeue", "-h", "-o", "%A").split()
    if ids:
        slurm.run("scancel", *ids)
        wait_until(lambda: not slurm.run("squeue", "-h").strip(), LIMIT_S, every_s=0.1)


def test_a_sweep_becomes_an_array(there: OnSlurm) -> None:
    code, text = there.sweep("model.how=train,raise", "sweep.max_parallel=2")
    assert code == 0, text
    found = re.search(r"submitted to SLURM as (\d+), up to 2 of each at once", text)
    assert found is not None, text
    code, text = there.do("status")
    assert re.search(r"\b(running|done|failed) of 2 jobs|2 running", text), text
    wait_until(lambda: there.do("status")[1].splitlines()[-1] == "1 done, 1 failed of 2 jobs", LIMIT_S, every_s=0.5)
    code, text = there.do("collect")
    assert code == 0, text
    good, bad = there.rows()
    assert (good["state"], good["exit_code"], good["slurm_id"]) == ("done", "0", f"{found[1]}_0")
    assert float(good["train_loss"]) > 0
    assert (bad["state"], bad["failed_rank"]) == ("failed", "0")
    assert bad["error"] == "RuntimeError: this rank does not like the weather"
    code, text = there.do("retry", "sweep.wait=true")
    assert code == 4, text
    assert [row["attempts"] for row in there.rows()] == ["1", "2"]


def test_what_was_submitted_can_be_cancelled(there: OnSlurm) -> None:
    code, text = there.sweep("model.how=wait", "run.seed=1,2")
    assert code == 0, text
    code, text = there.do("cancel")
    assert code == 0, text
    assert "2 cancelled" in text
    assert not there.cluster.run("squeue", "-h").strip()  # what goes on afterwards meets nobody


NAMES = [
    "a b%j%%x $(touch HACKED) `id` $HOME q'uote dq\"uote ;semi& *star #hash ",
    "back\\slash %j \\n $HOME q'uote dq\"uote",
]


@pytest.mark.parametrize("name", NAMES, ids=["percent", "backslash"])
def test_any_name_of_a_folder_reaches_the_ranks_as_it_is(there: OnSlurm, name: str) -> None:
    """Through sbatch's reading of the script, its file name patterns and the shell; of one run and of an array."""
    folder = there.folder / name
    folder.mkdir()
    words = ["model=gpt_tiny", "data=text_files", f"data.path={there.folder}/corpus", "train=smoke"]
    words += ["cluster=slurm", "cluster.device=cpu", "cluster.nproc_per_node=1", "cluster.python=/bin/echo"]
    assert there.run(*words, cwd=folder)[0] == 0
    assert there.run("-m", *words, "run.seed=1,2", "sweep.max_parallel=2", cwd=folder)[0] == 0
    run_dirs = [*(folder / "runs").iterdir(), *folder.glob("sweeps/*/jobs/*/run")]
    assert len(run_dirs) == 3
    logs = [run_dir / "logs" / "slurm.log" for run_dir in run_dirs]
    wait_until(lambda: not there.cluster.run("squeue", "-h").strip(), LIMIT_S, every_s=0.2)
    for run_dir, log in zip(run_dirs, logs, strict=True):
        assert log.read_text().splitlines()[0].endswith(f"/misbehaving_model.py --run-dir {run_dir}")
        assert records.story(run_dir).ended is not None
    assert not list(there.folder.rglob("HACKED"))
