"""Whole runs from the command line: they end well, they fail with a name, and nobody is left behind."""

from __future__ import annotations

import json
import re
import signal
import socket

import pytest
import yaml

from tests.launcher.programs import LIMIT_S, PLUGIN, Program, torchrun
from tests.support.processes import wait_until, with_argument


def test_a_run_leaves_every_artefact_and_tells_the_end(program: Program) -> None:
    code, out, err = program.run("run.seed=5")
    assert code == 0, out + err
    (run_dir,) = program.run_dirs()
    for name in ("config.yaml", "overrides.yaml", "command.txt", "revision.txt", "packages.txt", "environment.json"):
        assert (run_dir / name).stat().st_size > 0, name
    assert (run_dir / "plugins" / PLUGIN.name).exists()
    assert (run_dir / "loss.png").exists()
    assert len((run_dir / "metrics.jsonl").read_text().splitlines()) >= 3
    assert yaml.safe_load((run_dir / "config.yaml").read_text())["run"]["seed"] == 5
    assert "run.seed=5" in yaml.safe_load((run_dir / "overrides.yaml").read_text())
    assert sorted(path.name for path in (run_dir / "logs").iterdir()) == ["rank_0.log", "rank_1.log"]
    assert out.startswith(f"run folder: {run_dir.relative_to(program.folder)}\n2 ranks started on this machine")
    shown = out.split("\n", 2)[2]
    assert (run_dir / "logs" / "rank_0.log").read_text() == shown  # what the terminal showed of rank 0
    assert str(run_dir) in shown.splitlines()[-1]


@pytest.mark.parametrize(
    ("how", "rank", "code", "says"),
    [
        ("raise", 1, 1, "rank 1 of 2 failed: RuntimeError: this rank does not like the weather"),
        ("kill", 1, 1, "rank 1 of 2 was killed by SIGKILL"),
        ("leave", 1, 1, "rank 1 of 2 left before the run ended (exit code 0)"),
        pytest.param("memory", 0, 6, "rank 0 of 2 failed: MemoryError: no room", marks=pytest.mark.full),
    ],
)
def test_a_failing_rank_is_named(program: Program, how: str, rank: int, code: int, says: str) -> None:
    returned, out, err = program.run(f"model.how={how}", f"model.at_rank={rank}")
    assert returned == code, out + err
    assert err.splitlines()[0] == says
    (run_dir,) = program.run_dirs()
    log = run_dir / "logs" / f"rank_{rank}.log"
    assert f"log: {log.relative_to(program.folder)}" in err
    if how == "raise":
        assert "_misbehave" in err  # the traceback
        assert "This rank was at: training, step 2: " in err
        assert "_misbehave" in log.read_text()


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_launcher_takes_its_ranks_along(program: Program, signum: signal.Signals) -> None:
    process = program.start("model.how=wait", f"model.ready_dir={program.folder}", "cluster.grace_s=0.5")
    wait_until(lambda: all((program.folder / f"ready_{rank}").exists() for rank in range(2)), LIMIT_S)
    process.send_signal(signum)
    out, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 128 + signum
    assert f"stopped by {signum.name}" in err
    assert "Traceback" not in out + err
    assert not with_argument(program.tag)


def test_a_killed_launcher_leaves_nobody(program: Program) -> None:
    process = program.start("model.how=wait", f"model.ready_dir={program.folder}")
    wait_until(lambda: all((program.folder / f"ready_{rank}").exists() for rank in range(2)), LIMIT_S)
    assert len(with_argument(program.tag)) == 3
    process.kill()
    wait_until(lambda: not with_argument(program.tag), limit_s=10)


def test_two_runs_at_once_share_nothing(program: Program) -> None:
    both = [program.start(), program.start()]
    outputs = [process.communicate(timeout=LIMIT_S) for process in both]
    assert [process.returncode for process in both] == [0, 0], outputs
    run_dirs = program.run_dirs()
    assert len(run_dirs) == 2
    assert {out.splitlines()[0] for out, _ in outputs} == {
        f"run folder: {run_dir.relative_to(program.folder)}" for run_dir in run_dirs
    }


def test_a_named_folder_can_be_used_again_but_not_at_once(program: Program) -> None:
    named = f"run.dir={program.folder / 'mine'}"
    process = program.start(named, "model.how=wait", f"model.ready_dir={program.folder}")
    wait_until(lambda: (program.folder / "ready_0").exists(), LIMIT_S)
    code, _, err = program.run(named)
    assert code == 2
    assert "in use by another run" in err
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=LIMIT_S)
    code, out, err = program.run(named)
    assert code == 0, out + err
    assert (program.folder / "mine" / "earlier" / "0" / "config.yaml").exists()


def test_torchrun_ranks_join_one_run(program: Program) -> None:
    code, out, err = program.run(before=torchrun("--standalone", "--nproc-per-node", "2"))
    assert code == 0, out + err
    (run_dir,) = program.run_dirs()
    assert out.count("run folder: ") == 1
    assert "2 ranks joined on this machine, CPU (gloo)" in out
    assert sorted(path.name for path in (run_dir / "logs").iterdir()) == ["rank_0.log", "rank_1.log"]
    assert "2 ranks joined" in (run_dir / "logs" / "rank_0.log").read_text()
    assert len((run_dir / "metrics.jsonl").read_text().splitlines()) >= 3


def test_torchrun_names_the_rank_that_failed(program: Program) -> None:
    words = ("model.how=raise", "model.at_rank=1")
    code, _, err = program.run(*words, before=torchrun("--standalone", "--nproc-per-node", "2"))
    assert code == 1
    assert "rank 1: RuntimeError: this rank does not like the weather" in err
    root_cause = err[err.index("Root Cause") :]
    assert re.search(r"rank\s*:\s*1 ", root_cause)
    assert "does not like the weather" in root_cause
    (run_dir,) = program.run_dirs()
    assert "does not like the weather" in (run_dir / "logs" / "rank_1.log").read_text()


@pytest.mark.full
def test_ranks_that_torchrun_starts_again_keep_their_folder(program: Program) -> None:
    again = torchrun("--standalone", "--nproc-per-node", "2", "--max-restarts", "1")
    code, out, err = program.run("model.how=raise_once", "model.at_rank=1", before=again)
    assert code == 0, out + err
    (run_dir,) = program.run_dirs()
    assert (run_dir / "earlier" / "0" / "config.yaml").exists()
    assert (run_dir / "summary.json").exists()


def test_a_config_error_under_torchrun_is_told_once(program: Program) -> None:
    code, out, err = program.run("train.stepz=3", before=torchrun("--standalone", "--nproc-per-node", "2"))
    assert code != 0
    assert (out + err).count("train.stepz") >= 1
    assert (out + err).count("1 problem in the config") == 1
    assert program.run_dirs() == []


def test_two_torchrun_agents_make_one_run_of_two_nodes(program: Program) -> None:
    common = ("--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-id", program.tag)
    endpoint = ("--rdzv-endpoint", f"localhost:{_free_port()}")
    nodes = [program.start(before=torchrun(*common, *endpoint)) for _ in range(2)]
    outputs = [node.communicate(timeout=LIMIT_S) for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], outputs
    (run_dir,) = program.run_dirs()
    both = "".join(out for out, _ in outputs)
    assert "2 ranks joined on 2 hosts, CPU (gloo)" in both
    assert both.count("run folder: ") == 1
    assert len((run_dir / "metrics.jsonl").read_text().splitlines()) >= 3


def _free_port() -> int:
    """For torchrun, which takes no socket. The race this leaves is torchrun's; ours has none."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_half_an_environment_is_told(program: Program) -> None:
    program.environ |= {"RANK": "0", "WORLD_SIZE": "2"}
    code, _, err = program.run()
    assert code == 2
    assert "MASTER_ADDR" in err
    assert program.run_dirs() == []


def test_one_rank_alone_needs_no_process_group(program: Program) -> None:
    code, out, err = program.run("cluster.nproc_per_node=1")
    assert code == 0, out + err
    (run_dir,) = program.run_dirs()
    assert json.loads((run_dir / "summary.json").read_text())["world_size"] == 1


def test_a_failed_run_is_started_again_in_its_folder(program: Program) -> None:
    words = ("model.how=raise_once", "model.at_rank=1", f"model.ready_dir={program.folder}", "cluster.max_restarts=2")
    code, out, err = program.run(*words)
    assert code == 0, out + err
    assert "does not like the weather" in err  # the failure is told, then what follows
    assert "restart 1 of 2 (cluster.max_restarts), attempt 2 in this folder" in err
    (run_dir,) = program.run_dirs()
    assert (run_dir / "attempt").read_text() == "2\n"
    log = (run_dir / "logs" / "rank_1.log").read_text()
    assert log.index("does not like the weather") < log.index("--- attempt 2, ")
    assert (run_dir / "summary.json").exists()


@pytest.mark.full
def test_restarts_are_bounded_and_the_last_failure_counts(program: Program) -> None:
    code, out, err = program.run("model.how=kill", "model.at_rank=1", "cluster.max_restarts=1")
    assert code == 1, out + err
    assert err.count("rank 1 of 2 was killed by SIGKILL") == 2
    assert err.count("starting the ranks again") == 1
