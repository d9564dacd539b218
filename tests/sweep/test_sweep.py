"""A sweep from its command to its results, with jobs that train nothing."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path

import pytest

from launcher.streams import visible
from launcher.sweep import folder
from launcher.sweep.local import LocalBackend, Machine, gpu_names
from launcher.sweep.locks import Lock, is_held
from tests.support.processes import wait_until, with_argument
from tests.sweep.conftest import Sweeping

TWELVE = ("-m", "sweep.dir=s", "optimizer.lr=1e-4,3e-4,1e-3", "run.seed=range(1,5)")


def test_twelve_jobs_of_which_two_fail(sweeping: Sweeping, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_FAIL", "3,7")
    assert sweeping.run(*TWELVE) == 4
    rows = sweeping.rows()
    assert len(rows) == 12
    assert [row["job"] for row in rows if row["state"] == "failed"] == ["3", "7"]
    assert (rows[3]["exit_code"], rows[3]["failed_rank"]) == ("1", "1")
    assert rows[3]["error"] == "RuntimeError: the fake fails"
    assert (rows[2]["optimizer.lr"], rows[2]["run.seed"], rows[2]["exit_code"]) == ("0.0001", "3", "0")
    assert float(rows[2]["eval_loss"]) == pytest.approx(2.03)
    assert int(float(rows[2]["memory_bytes"])) == 340 * 2**20
    assert "10 done, 2 failed" in sweeping.err
    assert "sweep.do=retry" in sweeping.err
    markdown = (sweeping.folder / "s" / "results.md").read_text().splitlines()
    assert len(markdown) == 14
    monkeypatch.setenv("FAKE_FAIL", "")
    assert sweeping.run("action=sweep", "sweep.dir=s", "sweep.do=retry") == 0
    assert sweeping.states() == ["done"] * 12
    assert sweeping.starts() == [*range(12), 3, 7]
    assert [row["attempts"] for row in sweeping.rows()] == [*"111211121111"]


def test_a_finished_sweep_runs_nothing_again(sweeping: Sweeping) -> None:
    words = ("-m", "sweep.dir=s", "run.seed=1,2")
    assert sweeping.run(*words) == 0
    assert sweeping.run(*words) == 0
    assert "not run again: 2 done" in sweeping.out
    assert sweeping.run("action=sweep", "sweep.dir=s", "sweep.do=resume") == 0
    assert "nothing to resume: 2 done" in sweeping.out
    assert sweeping.run("-m", "sweep.dir=s", "run.seed=2,3") == 0  # more values of the same sweep
    assert sweeping.starts() == [0, 1, 2]
    assert [row["run.seed"] for row in sweeping.rows()] == ["1", "2", "3"]
    assert sweeping.run("action=sweep", "sweep.dir=s", "sweep.do=status") == 0
    assert "3 done of 3 jobs" in sweeping.out


def test_the_same_job_twice_runs_once(sweeping: Sweeping) -> None:
    assert sweeping.run("-m", "sweep.dir=s", "optimizer.lr=0.001,1e-3") == 0
    assert "1 of 2 jobs are the same as another one" in sweeping.out
    assert sweeping.starts() == [0]


def test_a_sweep_of_its_own_folder(sweeping: Sweeping) -> None:
    assert sweeping.run("-m", "run.seed=1,2") == 0
    (folder,) = (sweeping.folder / "sweeps").iterdir()
    asked = json.loads((folder / "sweep.json").read_text())
    assert (asked["swept"], asked["command"][0]) == (["run.seed"], "fsdp-launch")
    assert sorted(path.name for path in folder.iterdir()) == [
        ".lock",
        "jobs",
        "report.html",
        "results.csv",
        "results.md",
        "sweep.json",
    ]


def test_a_foreign_folder_is_refused(sweeping: Sweeping) -> None:
    (sweeping.folder / "mine").mkdir()
    (sweeping.folder / "mine" / "thesis.tex").write_text("years of work")
    assert sweeping.run("-m", "sweep.dir=mine", "run.seed=1,2") == 2
    assert "holds something else than a sweep" in sweeping.err
    assert [path.name for path in (sweeping.folder / "mine").iterdir()] == ["thesis.tex"]
    assert sweeping.run("action=sweep", "sweep.dir=mine", "sweep.do=status") == 2
    assert sweeping.run("action=sweep", "sweep.dir=nowhere", "sweep.do=status") == 2
    assert "holds no sweep" in sweeping.err
    assert sweeping.run("-m", "sweep.dir=s", "run.seed=1,2") == 0
    assert sweeping.run("-m", "sweep.dir=s", "optimizer.lr=1e-3,1e-4") == 2
    assert "holds another sweep" in sweeping.err
    assert sweeping.run("-m", "sweep.dir=s", "run.seed=1,2", "train.steps=7") == 2
    assert "holds another sweep" in sweeping.err
    assert not list(sweeping.folder.glob(".*"))


def test_one_badly_composed_job_starts_nothing(sweeping: Sweeping) -> None:
    words = ("cluster.nproc_per_node=4", "sharding.factor=1,3,2,8", "train.steps=1,0")
    assert sweeping.run("-m", "sweep.dir=s", *words) == 2
    assert "F does not divide W = 4 (job 2, 3 of 8)" in sweeping.err
    assert "(job 6, 7 of 8)" in sweeping.err
    assert "train.steps: " in sweeping.err and "(job 1, 3, 5, 7 of 8)" in sweeping.err
    assert list(sweeping.folder.iterdir()) == []


def test_the_first_failure_can_end_the_sweep(sweeping: Sweeping, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_FAIL", "1")
    assert sweeping.run("-m", "sweep.dir=s", "sweep.fail_fast=true", "run.seed=range(0,5)") == 4
    assert sweeping.states() == ["done", "failed", "pending", "pending", "pending"]
    monkeypatch.setenv("FAKE_FAIL", "")
    assert sweeping.run("action=sweep", "sweep.dir=s", "sweep.do=resume") == 4  # the failed one is for retry
    assert sweeping.states() == ["done", "failed", "done", "done", "done"]


def test_a_killed_launcher_leaves_a_sweep_that_goes_on(sweeping: Sweeping) -> None:
    process = sweeping.start(*TWELVE, "sweep.max_parallel=2", FAKE_S="0.4")
    wait_until(lambda: len(sweeping.starts()) >= 5)
    process.kill()
    process.communicate()
    assert sweeping.run("action=sweep", "sweep.dir=s", "sweep.do=resume") == 0
    assert sweeping.states() == ["done"] * 12
    starts = sweeping.starts()
    twice = {number for number in starts if starts.count(number) > 1}
    assert set(starts) == set(range(12))
    assert len(twice) <= 2  # those that died with the launcher, and only they
    assert {row["job"] for row in sweeping.rows() if row["attempts"] != "1"} >= {str(number) for number in twice}


def test_jobs_die_with_their_launcher_and_are_seen_as_lost(sweeping: Sweeping) -> None:
    process = sweeping.start("-m", "sweep.dir=s", "run.seed=1,2", FAKE_S="600")
    wait_until(lambda: sweeping.starts() == [0])
    assert len(with_argument(f"{sweeping.folder.name}/s/jobs")) == 1
    process.kill()
    process.communicate()
    wait_until(lambda: not with_argument(f"{sweeping.folder.name}/s/jobs"))
    assert sweeping.run("action=sweep", "sweep.dir=s", "sweep.do=status") == 0
    assert "1 pending, 1 lost of 2 jobs" in sweeping.out


def test_a_sweep_in_use_is_left_alone_until_it_is_cancelled(sweeping: Sweeping) -> None:
    process = sweeping.start("-m", "sweep.dir=s", "run.seed=1,2,3", FAKE_S="600")
    wait_until(lambda: sweeping.starts() == [0])
    assert sweeping.run("action=sweep", "sweep.dir=s", "sweep.do=resume") == 2
    assert f"is in use: process {process.pid}" in sweeping.err
    assert sweeping.run("action=sweep", "sweep.dir=s", "sweep.do=status") == 0
    assert "2 pending, 1 running of 3 jobs" in sweeping.out
    assert sweeping.run("action=sweep", "sweep.dir=s", "sweep.do=cancel") == 0
    assert "3 cancelled" in sweeping.out
    process.communicate()
    assert process.returncode == 128 + signal.SIGTERM


def test_ctrl_c_ends_what_runs_and_the_sweep_can_go_on(sweeping: Sweeping) -> None:
    process = sweeping.start("-m", "sweep.dir=s", "sweep.max_parallel=2", "run.seed=1,2,3", FAKE_S="600")
    wait_until(lambda: sorted(sweeping.starts()) == [0, 1])
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate()
    assert process.returncode == 130, out
    assert "Traceback" not in out
    assert sweeping.states() == ["cancelled", "cancelled", "pending"]
    assert sweeping.run("action=sweep", "sweep.dir=s", "sweep.do=resume") == 0
    assert sweeping.states() == ["done"] * 3


def test_cores_are_divided_among_jobs(sweeping: Sweeping, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("launcher.sweep.chosen.num_cores", lambda: 16)
    words = ("sweep.dir=s", "sweep.max_parallel=2", "cluster.nproc_per_node=4", "run.seed=1,2,3")
    assert sweeping.run("-m", *words) == 0
    assert "up to 2 jobs at once: 2 threads a rank" in sweeping.err
    assert (sweeping.folder / "starts").read_text().split()[1::3] == ["2", "2", "2"]


def test_gpus_are_divided_among_jobs(sweeping: Sweeping, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "launcher.sweep.chosen.LocalBackend",
        lambda command, machine, max_parallel, cwd: LocalBackend(
            command, Machine(8, ("4", "5", "6", "7"), "12.8"), max_parallel, cwd=cwd
        ),
    )
    monkeypatch.setenv("FAKE_S", "0.3")
    words = ("sweep.dir=s", "sweep.max_parallel=4", "cluster.nproc_per_node=2", "run.seed=1,2,3")
    assert sweeping.run("-m", *words) == 0
    assert "2 of 4 GPUs for each job, so 2 at once" in sweeping.err
    gpus = {int(line.split()[0]): line.split()[2] for line in (sweeping.folder / "starts").read_text().splitlines()}
    assert {gpus[0], gpus[1]} == {"4,5", "6,7"}
    assert gpus[2] in ("4,5", "6,7")


def test_names_of_gpus() -> None:
    assert gpu_names(3, {}) == ("0", "1", "2")
    assert gpu_names(2, {"CUDA_VISIBLE_DEVICES": "3, GPU-abc"}) == ("3", "GPU-abc")
    assert gpu_names(0, {"CUDA_VISIBLE_DEVICES": ""}) == ()


def test_what_makes_no_sense_is_refused(sweeping: Sweeping) -> None:
    assert sweeping.run("-m", "run.dir=x", "run.seed=1,2") == 2
    assert "has a run folder of its own" in sweeping.err
    assert sweeping.run("-m", "sweep.max_parallel=1,2") == 2
    assert "one for the whole sweep" in sweeping.err
    assert sweeping.run("-m", "optimizer.lr=interval(1e-4,1e-2)") == 2
    assert "hydra/sweeper=optuna" in sweeping.err
    assert sweeping.run("-m", "hydra/launcher=joblib", "run.seed=1,2") == 2
    assert "sweep.max_parallel=4" in sweeping.err
    assert sweeping.run("-m", "hydra/launcher=submitit_slurm", "run.seed=1,2") == 2
    assert "cluster=slurm" in sweeping.err
    assert sweeping.run("sweep.dir=x") == 2
    assert "one run is no sweep" in sweeping.err
    assert sweeping.run("action=sweep", "sweep.dir=x") == 2
    assert "status, collect, resume, retry or cancel" in sweeping.err
    assert sweeping.run("sweep.do=status") == 2
    assert "this belongs to action=sweep" in sweeping.err
    assert sweeping.run("-m", "sweep.trials=7", "run.seed=1,2") == 2
    assert "a grid has no such choice" in sweeping.err
    assert list(sweeping.folder.iterdir()) == []


def test_words_beside_a_stored_sweep_are_refused(sweeping: Sweeping) -> None:
    assert sweeping.run("-m", "sweep.dir=s", "run.seed=1") == 0
    assert sweeping.run("action=sweep", "sweep.dir=s", "sweep.do=retry", "train.steps=9") == 2
    assert "train.steps: a sweep's jobs are what they were started with" in sweeping.err


def test_secrets_stay_out_of_the_folder(sweeping: Sweeping) -> None:
    words = ("cluster.env.WANDB_API_KEY=hush_hush", "run.seed=1,2")
    assert sweeping.run("-m", "sweep.dir=s", *words) == 0
    for path in (sweeping.folder / "s").rglob("*"):
        if path.is_file():
            assert "hush_hush" not in path.read_text(), path


def test_a_folder_that_cannot_be_made(sweeping: Sweeping) -> None:
    Path("file").write_text("")
    assert sweeping.run("-m", "sweep.dir=file/s", "run.seed=1,2") == 2
    assert "cannot be made" in sweeping.err
    assert sweeping.starts() == []


@pytest.mark.parametrize("how", ["moved", "deleted", "a job's folder deleted"])
def test_a_folder_that_goes_away_ends_the_sweep_with_a_word(sweeping: Sweeping, how: str) -> None:
    process = sweeping.start("-m", "sweep.dir=s", "run.seed=1,2,3", FAKE_S="1")
    wait_until(lambda: len(sweeping.starts()) == 1)
    folder = sweeping.folder / "s"
    if how == "moved":
        folder.rename(sweeping.folder / "elsewhere")
    else:
        shutil.rmtree(folder if how == "deleted" else folder / "jobs" / "0002")
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 4, out
    assert "Traceback" not in out
    assert "the sweep cannot go on" in out
    assert not with_argument(str(folder / "jobs"))
    if how == "moved":
        assert sweeping.run("action=sweep", "sweep.dir=elsewhere", "sweep.do=resume") == 0
        assert sweeping.states("elsewhere") == ["done"] * 3


def test_values_that_would_break_a_table_or_a_scale(sweeping: Sweeping) -> None:
    words = "cluster.env.NOTE='a\nb|c','\x1b[31m<script>','日本 $HOME `id`','it\\'s'"
    assert sweeping.run("-m", "sweep.dir=s", words) == 0
    assert "\x1b" not in sweeping.out + sweeping.err
    assert "'a\nb|c'" in {row["cluster.env.NOTE"] for row in sweeping.rows()}
    markdown = (sweeping.folder / "s" / "results.md").read_text()
    assert len(markdown.splitlines()) == 2 + 4
    assert "<script>" not in markdown + (sweeping.folder / "s" / "report.html").read_text()
    assert sweeping.run("-m", "sweep.dir=t", "cluster.env.NOTE=nan,inf,1") == 0  # no numbers on an axis
    assert len(sweeping.rows("t")) == 3


def test_what_a_killed_command_left_of_a_new_folder_is_removed(
    sweeping: Sweeping, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the next command that looks for the folder; not while somebody puts it together, and nothing else."""
    left = sweeping.folder / ".s.0123abcd"
    (left / "jobs" / "0000").mkdir(parents=True)
    others = [sweeping.folder / name for name in (".s.mine", ".s.0123abcde", ".t.0123abcd")]
    for other in others:
        other.mkdir()
    foreign = sweeping.folder / ".s.aaaaaaaa"
    (foreign / "thesis").mkdir(parents=True)
    for path in (left, foreign, *others):
        os.utime(path, (0, 0))
    with Lock(left / ".lock"):
        os.utime(left, (0, 0))
        assert sweeping.run("action=sweep", "sweep.dir=s", "sweep.do=status") == 2
        assert left.exists()
    assert sweeping.run("action=sweep", "sweep.dir=s", "sweep.do=status") == 2
    assert not left.exists()
    assert all(path.exists() for path in (foreign, *others))
    left = sweeping.folder / "sweeps" / ".2026-12-01_12-00-00-ab12.0123abcd"
    left.mkdir(parents=True)
    os.utime(left, (0, 0))
    assert sweeping.run("-m", "run.seed=1,2") == 0
    assert not left.exists()


def test_a_folder_is_locked_while_it_is_put_together(sweeping: Sweeping, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []

    def write_asked(path: Path, asked: folder.Asked) -> None:
        seen.append(is_held(path / folder.LOCK_FILE))
        write(path, asked)

    write = folder._write_asked
    monkeypatch.setattr(folder, "_write_asked", write_asked)
    assert sweeping.run("-m", "sweep.dir=s", "run.seed=1,2") == 0
    assert seen == [True]


def test_nothing_that_is_said_steers_a_terminal(sweeping: Sweeping) -> None:
    """A value that is quoted in an error, a table or a summary."""
    evil = "\x1b]0;evil\x07\x9b31m\u202e"
    for words in (
        [f"run.name={evil}x", "run.nmae=1"],
        [f"train.steps={evil}"],
        [f"run.nmae='{evil}'"],
        [f"--hlep{evil}"],
        [f"sweep.dir={evil}", "action=sweep", "sweep.do=status"],
        ["-m", f"run.name='{evil}',b", "action=check"],
        [f"cluster.env.A='{evil}'", "action=check", f"run.name='{evil}'"],
        ["-m", f"cluster.env.A='{evil}',b", "train.steps=0"],
    ):
        sweeping.run(*words)
        said = sweeping.out + sweeping.err
        assert said
        assert not [letter for letter in said if not (letter.isprintable() or letter == "\n")], words
    assert "\\x1b]0;evil\\x07\\x9b31m\\u202e" in visible(evil)
    assert visible("eins\n\tzwei\r") == "eins\n\tzwei\\r"
