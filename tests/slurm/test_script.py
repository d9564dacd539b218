"""The text for sbatch, compared whole with golden files. FSDP_LAUNCHER_GOLDEN=write renews them."""

from __future__ import annotations

import copy
import dataclasses
import functools
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from launcher.checked import checked
from launcher.compose import compose
from launcher.schema import ClusterConfig, Config
from launcher.slurm.lead import lead_s, measured_save_s, shortest_limit_s
from launcher.slurm.script import Array, Place, script_text
from recipes.registry import MODELS

GOLDEN = Path(__file__).parent / "golden"
PLACE = Place(Path("/home/me/runs/one 100%"), Path("/home/me/runs/one 100%/code"), "/venv/bin/python", name="gpt_tiny")
CLUSTERS: dict[str, dict[str, Any]] = {
    "plain": {"num_nodes": 1, "nproc_per_node": 8, "device": "cuda"},
    "cpu": {"num_nodes": 2, "nproc_per_node": 2, "device": "cpu", "cpus_per_task": 4, "time_limit": "1-12:00:00"},
    "everything": {
        "num_nodes": 8,
        "nproc_per_node": 4,
        "device": "cuda",
        "time_limit": "24:00:00",
        "partition": "a100,h100",
        "account": "proj",
        "qos": "high",
        "constraint": "a100&ib",
        "reservation": "res",
        "nodelist": "gpu[01-08]",
        "exclude": "gpu03",
        "gres": "gpu:a100:4",
        "memory": "64G",
        "exclusive": True,
        "dependency": "afterok:12:13",
        "mail_user": "me@example.org",
        "mail_type": "END,FAIL",
        "comment": 'a "b" \\ c',
        "nice": 100,
        "modules": ["cuda/12.8", "nccl"],
        "setup": ["ulimit -n 65536", 'export X="$HOME/x"'],
        "python": "/opt/py/bin/python",
        "srun_args": ["--cpu-bind=cores"],
        "sbatch": {"licenses": "matlab:1", "contiguous": ""},
        "env": {"NCCL_DEBUG": "INFO", "WANDB_API_KEY": "do-not-write-me", "NAME": "a b"},
        "max_restarts": 2,
        "signal_lead_s": 300,
    },
    "no_requeue": {"num_nodes": 1, "nproc_per_node": 1, "device": "cpu", "requeue": False},
    "pyxis": {"nproc_per_node": 2, "device": "cuda", "container_image": "/im/t.sqsh", "container_mounts": ["/data"]},
    "apptainer": {
        "nproc_per_node": 2,
        "device": "cuda",
        "container_image": "/images/t.sif",
        "container_runtime": "apptainer",
    },
}  # fmt: skip


def config_of(**cluster: Any) -> Config:
    """The default run; what its cluster keys are is not checked."""
    config = copy.deepcopy(_default())
    config.cluster = ClusterConfig(kind="slurm", **cluster)
    return config


@functools.cache
def _default() -> Config:
    return checked(compose([]))


@pytest.mark.parametrize("name", CLUSTERS)
def test_script(name: str) -> None:
    place = (
        PLACE
        if name != "everything"
        else Place(PLACE.run_dir, Path("/c"), PLACE.python, (Path("/p/my model.py"),), "x")
    )
    _compare(name, script_text(config_of(**CLUSTERS[name]), place))


def test_script_of_an_array() -> None:
    array = Array(Path("/home/me/sweeps/one/array_0"), num_jobs=12, max_parallel=4)
    _compare("array", script_text(config_of(**CLUSTERS["cpu"]), PLACE, array))


def test_no_secret_is_written() -> None:
    assert "do-not-write-me" not in script_text(config_of(**CLUSTERS["everything"]), PLACE)


@pytest.mark.parametrize("name", [*CLUSTERS, "array"])
def test_scripts_are_bash(name: str) -> None:
    done = subprocess.run(["bash", "-n", str(GOLDEN / f"{name}.sh")], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_lead_follows_what_a_save_takes() -> None:
    config = config_of(grace_s=60)
    assert lead_s(config, measured_save_s=100) == 60 + 2 * 100 + 10
    assert lead_s(config) == 60 + 2 * 5 + 10  # a tiny model: the shortest guess
    assert shortest_limit_s(config) == 80 + 60 + 60
    assert lead_s(config_of(signal_lead_s=7), measured_save_s=100) == 7
    config.model = MODELS["gpt"].config(num_layers=96, hidden_size=12288, num_heads=96, max_seq_len=2048)
    assert lead_s(config) > 10_000  # 2.1 TB through one node


def test_what_a_save_took_is_read_from_the_run_folder(tmp_path: Path) -> None:
    assert measured_save_s(tmp_path) is None
    (tmp_path / "save_seconds.txt").write_text("12.5\n")
    assert measured_save_s(str(tmp_path)) == 12.5
    (tmp_path / "save_seconds.txt").write_text("a while\n")
    assert measured_save_s(tmp_path) is None


def test_a_backslash_in_a_folder_is_one_in_the_logs_path() -> None:
    """sbatch takes ``%`` for itself where a file name holds a backslash; its quotes want each of them doubled again."""
    place = dataclasses.replace(PLACE, run_dir=Path("/runs/a\\b 5%j"))
    lines = script_text(config_of(), place).splitlines()
    assert '#SBATCH --output="/runs/a\\\\\\\\b 5%j/logs/slurm.log"' in lines


def _compare(name: str, text: str) -> None:
    path = GOLDEN / f"{name}.sh"
    if os.environ.get("FSDP_LAUNCHER_GOLDEN") == "write":
        path.write_text(text)
    assert text == path.read_text()
