"""Submitting, with SLURM's programs replaced by small scripts: what they are asked, what is left behind, refusals."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from launcher import cli, provenance, run_folder
from launcher.checked import checked
from launcher.compose import compose
from launcher.failure import Failure
from launcher.request import LaunchRequest
from launcher.resolved import to_yaml
from launcher.slurm import client, records, snapshot, submit
from launcher.slurm.status import states_of
from launcher.slurm.submit import Prepared

SBATCH = """#!/bin/bash
env | sort >{folder}/environment
n=$(($(cat {folder}/count 2>/dev/null || echo 0) + 1)); echo $n >{folder}/count
cp "${{@: -1}}" {folder}/script_$n
echo "$((100 + n));cluster"
"""
Programs = Callable[[str, str], None]


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Programs:
    """``programs(name, text)`` makes a program; sbatch is there from the start."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)

    def make(name: str, text: str) -> None:
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)

    make("sbatch", SBATCH.format(folder=tmp_path))
    make("squeue", "#!/bin/sh\necho 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1\n")
    make("sacct", "#!/bin/sh\necho 'Slurm accounting storage is disabled' >&2; exit 1\n")
    make("scontrol", "#!/bin/sh\necho 'MaxArraySize            = 3'\n")
    return make


def test_one_run_is_one_job(programs: Programs, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["cluster=slurm", "cluster.env.WANDB_API_KEY=hush", "run.dir=mine"]) == 0
    said = capsys.readouterr().out
    assert said.splitlines() == ["job 101 submitted", "run folder: mine", "log: mine/logs/slurm.log"]
    run_dir = tmp_path / "mine"
    assert (tmp_path / "script_1").read_text() == (run_dir / "slurm" / "job.sh").read_text()
    assert (run_dir / "code" / "launcher" / "slurm" / "task.py").exists()
    assert not list((run_dir / "code").rglob("__pycache__"))
    assert records.story(run_dir).job == "101"
    assert "WANDB_API_KEY=hush" in (tmp_path / "environment").read_text()
    written = [path for path in run_dir.rglob("*") if path.is_file() and b"hush" in path.read_bytes()]
    assert not written
    assert not (run_dir / "metrics.jsonl").exists()  # nothing was trained here


def test_printing_the_script_makes_nothing(
    programs: Programs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(tmp_path.rglob("*"))
    assert cli.main(["cluster=slurm", "action=print_script"]) == 0
    assert capsys.readouterr().out.startswith("#!/bin/bash\n#SBATCH --job-name=gpt_tiny\n")
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("do", ["status", "collect", "resume", "retry", "cancel"])
def test_a_file_is_no_folder_of_a_sweep(tmp_path: Path, do: str, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("mine")
    for name, says in (("file", "something else than a sweep"), ("file/below", "holds no sweep")):
        assert cli.main(["action=sweep", f"sweep.dir={tmp_path / name}", f"sweep.do={do}"]) == 2
        assert says in capsys.readouterr().err


def test_a_sweep_that_sbatch_refuses_leaves_nothing(
    programs: Programs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The next try, with another partition, may use the same sweep.dir; a sweep with jobs on record stays."""
    words = ["-m", "cluster=slurm", "sweep.dir=s"]
    programs("sbatch", "#!/bin/sh\necho 'sbatch: error: invalid partition specified: nowhere' >&2; exit 1\n")
    for more in ([], ["hydra/sweeper=optuna"]):
        assert cli.main([*words, *more, "run.seed=1,2", "cluster.partition=nowhere"]) == 2
        assert not (tmp_path / "s").exists()
    programs("sbatch", SBATCH.format(folder=tmp_path))
    assert cli.main([*words, "run.seed=1,2", "cluster.partition=somewhere"]) == 0
    programs("sbatch", "#!/bin/sh\necho 'sbatch: error: no' >&2; exit 1\n")
    assert cli.main([*words, "run.seed=3,4", "cluster.partition=somewhere"]) == 2
    assert (tmp_path / "s" / "sweep.json").exists()


REFUSALS = {
    "partition": ("Batch job submission failed: Invalid partition name specified", "cluster.partition"),
    "GPUs": ("Invalid generic resource (gres) specification", "cluster.device=cpu"),
    "limit": ("Requested time limit is invalid (missing or exceeds some limit)", "a shorter cluster.time_limit"),
}


@pytest.mark.parametrize(("words", "hint"), REFUSALS.values(), ids=list(REFUSALS))
def test_what_sbatch_refuses_leaves_nothing(
    programs: Programs, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: str, hint: str
) -> None:
    programs("sbatch", f"#!/bin/sh\necho 'sbatch: error: {words}' >&2; exit 1\n")
    assert cli.main(["cluster=slurm"]) == 2
    said = capsys.readouterr().err
    assert words in said
    assert hint in said
    assert "Traceback" not in said
    assert not list((tmp_path / "runs").glob("*"))


def test_without_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.chdir(tmp_path)
    assert cli.main(["cluster=slurm"]) == 2
    assert "sbatch is not installed here" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_a_submitted_run_can_be_asked_after_and_cancelled(
    programs: Programs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def told(do: str) -> tuple[int, str]:
        code = cli.main(["action=sweep", "sweep.dir=mine", f"sweep.do={do}"])
        said = capsys.readouterr()
        return code, said.out + said.err

    assert cli.main(["cluster=slurm", "run.dir=mine"]) == 0
    capsys.readouterr()
    programs("squeue", "#!/bin/sh\necho '101|PENDING|PartitionTimeLimit||10:00'\n")
    code, text = told("status")
    assert (code, text.startswith("job 101: pending: will not start by itself: PartitionTimeLimit")) == (0, True)
    programs("scancel", f"#!/bin/sh\necho $* >{tmp_path}/cancelled\n")
    programs("squeue", "#!/bin/sh\necho '101|CANCELLED|None||10:00'\n")
    assert told("cancel") == (0, "job 101: cancelled: it was cancelled\n")
    assert (tmp_path / "cancelled").read_text() == "101\n"
    code, text = told("retry")
    assert code == 2
    assert "run.dir=" in text


def test_a_folder_that_a_job_uses_is_refused(
    programs: Programs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["cluster=slurm", "run.dir=mine"]) == 0
    programs("squeue", "#!/bin/sh\necho '101|PENDING|Priority||10:00'\n")
    assert cli.main(["cluster=slurm", "run.dir=mine"]) == 2
    assert "job 101 uses this folder (pending)" in capsys.readouterr().err
    programs("squeue", "#!/bin/sh\necho '101|FAILED|NonZeroExitCode||10:00'\n")
    assert cli.main(["cluster=slurm", "run.dir=mine"]) == 0
    assert records.story(tmp_path / "mine").job == "102"


def test_runs_that_ask_for_the_same_share_an_array(programs: Programs, tmp_path: Path) -> None:
    words = [[f"optimizer.lr={rate}"] for rate in ("1e-3", "2e-3", "3e-3", "4e-3")] + [["cluster.nproc_per_node=2"]]
    jobs = [_prepared(tmp_path / f"run_{number}", some) for number, some in enumerate(words)]
    ids = submit.submit(jobs, folder=tmp_path / "sweep", max_parallel=2)
    assert ids == ["101_0", "101_1", "101_2", "102_0", "103_0"]  # at most MaxArraySize = 3 in one
    first = (tmp_path / "script_1").read_text()
    assert "#SBATCH --array=0-2%2\n" in first
    folders = (tmp_path / "sweep" / "array_0" / "run_folders").read_text().splitlines()
    assert folders == [str(tmp_path / f"run_{number}") for number in range(3)]
    assert [records.story(job.run_dir).job for job in jobs] == ids
    assert not (tmp_path / "run_0" / "code").exists()  # one copy for all
    assert (tmp_path / "sweep" / "code" / "recipes").is_dir()


def test_what_cannot_be_taken_back_is_told(
    programs: Programs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The controller goes away between the first array and the second."""
    programs(
        "sbatch", f"#!/bin/sh\n[ -e {tmp_path}/once ] && {{ echo away >&2; exit 1; }}; touch {tmp_path}/once; echo 7\n"
    )
    programs("scancel", "#!/bin/sh\necho 'Unable to contact slurm controller (connect failure)' >&2; exit 1\n")
    assert cli.main(["-m", "cluster=slurm", "sweep.dir=s", "cluster.nproc_per_node=1,2"]) == 2
    assert "scancel 7_0" in capsys.readouterr().err


def test_states_come_from_squeue_or_sacct_or_the_record(programs: Programs, tmp_path: Path) -> None:
    run_dirs = [tmp_path / f"run_{number}" for number in range(4)]
    for number, run_dir in enumerate(run_dirs):
        run_dir.mkdir()
        records.add(run_dir, "submitted", job=f"7_{number}")
    records.add_end(run_dirs[3], "7_3", 0, records.Ended("done", 0, ""))
    programs("squeue", "#!/bin/sh\nprintf '7_0|PENDING|Resources||5:00\\n7_1|RUNNING|None|n[1-2]|1-00:00:01\\n'\n")
    programs("sacct", "#!/bin/sh\nprintf '7_2|CANCELLED by 1000|n1\\n'\n")
    assert [state.state for state in states_of(run_dirs)] == ["pending", "running", "cancelled", "done"]
    assert client.queue(["7"])["7_1"].time_left_s == 86_401


def test_a_controller_that_is_away_is_no_unknown_job(programs: Programs) -> None:
    programs("squeue", "#!/bin/sh\necho 'Unable to contact slurm controller (connect failure)' >&2; exit 1\n")
    with pytest.raises(client.SlurmError, match="Unable to contact"):
        client.queue(["7"])


NO_CONTROLLER = "#!/bin/sh\necho 'Unable to contact slurm controller (connect failure)' >&2; exit 1\n"


def test_the_program_that_fails_is_named(
    programs: Programs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each with a title and a remedy of its own: nobody looks for sbatch's options because squeue is silent."""
    assert cli.main(["cluster=slurm", "run.dir=one"]) == 0
    assert cli.main(["-m", "cluster=slurm", "sweep.dir=s", "run.seed=1,2"]) == 0
    programs("squeue", NO_CONTROLLER)
    cancelled = [["action=sweep", f"sweep.dir={name}", "sweep.do=cancel"] for name in ("one", "s")]
    for words in (["action=sweep", "sweep.dir=one", "sweep.do=status"], ["cluster=slurm", "run.dir=one"], *cancelled):
        programs("scancel", "#!/bin/sh\n")
        assert cli.main(words) == 2
        said = capsys.readouterr().err
        assert "1 problem with SLURM:\n\n1. cluster: SLURM cannot be asked about its jobs\n" in said
        assert "from:     squeue\n" in said
        assert "sbatch" not in said and "--help" not in said
    programs("squeue", "#!/bin/sh\nprintf '101|RUNNING|None|n1|1:00\\n102_0|RUNNING|None|n1|1:00\\n'\n")
    programs("scancel", NO_CONTROLLER)
    for words in cancelled:
        assert cli.main(words) == 2
        said = capsys.readouterr().err
        assert "cluster: SLURM does not cancel the job\n" in said and "from:     scancel\n" in said


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "_QUIET_S", 0.2)
    monkeypatch.setattr(client, "_TIMEOUT_S", 0.6)


def test_a_program_that_hangs_is_told_and_ended(
    programs: Programs, impatient: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With what it started: a site's wrapper must not submit after it was given up."""
    assert cli.main(["-m", "cluster=slurm", "sweep.dir=s", "run.seed=1,2"]) == 0
    programs("squeue", f"#!/bin/sh\n(sleep 2; touch {tmp_path}/late) & sleep 600\n")
    began = time.monotonic()
    assert cli.main(["action=sweep", "sweep.dir=s", "sweep.do=status"]) == 0
    said = capsys.readouterr()
    assert "squeue has not answered for 0.2 s; waiting for it, 0.6 s in all" in said.err
    assert "SLURM does not answer, jobs are shown as they are on record: squeue did not answer in 0.6 s" in said.err
    assert "2 running of 2 jobs" in said.out
    time.sleep(max(0.0, began + 3 - time.monotonic()))
    assert not (tmp_path / "late").exists()


@pytest.mark.parametrize("words", [[], ["-m", "run.seed=1,2"], ["action=print_script"]])
def test_a_folder_of_two_lines_is_refused_before_sbatch(
    programs: Programs,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
) -> None:
    (tmp_path / "two\nlines").mkdir()
    monkeypatch.chdir(tmp_path / "two\nlines")
    assert cli.main(["cluster=slurm", *words]) == 2
    assert "run.dir: a line of the script cannot hold a line break" in capsys.readouterr().err
    assert not (tmp_path / "count").exists() and not list(Path().iterdir())


def run_script(script: Path, tmp_path: Path) -> tuple[int, bool]:
    """The exit code of a batch script, run here, and whether it came to its srun."""
    ran = tmp_path / "ran"
    ran.unlink(missing_ok=True)
    environ = {**os.environ, "SLURM_ARRAY_TASK_ID": "0", "SLURM_JOB_ID": "7"}
    code = subprocess.run(["bash", script], env=environ, cwd="/", capture_output=True, check=False).returncode
    return code, ran.exists()


SILENT = SBATCH.replace('echo "$((', 'sleep 600; echo "$((')


def test_a_sweep_that_sbatch_says_nothing_about_cannot_run_twice(
    programs: Programs, impatient: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """While SLURM cannot be asked, nothing is submitted again; what it takes of the first submission runs nothing."""
    programs("srun", f"#!/bin/sh\ntouch {tmp_path}/ran\n")
    programs("sbatch", SILENT.format(folder=tmp_path))
    programs("squeue", NO_CONTROLLER)
    resume = ["action=sweep", "sweep.dir=s", "sweep.do=resume"]
    assert cli.main(["-m", "cluster=slurm", "sweep.dir=s", "run.seed=1,2"]) == 2
    said = capsys.readouterr().err
    assert "it is not known whether SLURM takes the job" in said and "sweep.do=resume" in said
    assert "Nothing was started" not in said
    script = next((tmp_path / "s").rglob("job.sh"))
    assert str(script) in said
    for words in (resume, ["-m", "cluster=slurm", "sweep.dir=s", "run.seed=1,2"]):
        assert cli.main(words) == 2
        assert "SLURM cannot be asked about its jobs" in capsys.readouterr().err
    assert cli.main(["action=sweep", "sweep.dir=s", "sweep.do=status"]) == 0
    assert "nobody noted whether SLURM has taken it" in capsys.readouterr().out
    assert (tmp_path / "count").read_text() == "1\n"
    assert run_script(script, tmp_path)[1]  # until it is submitted again
    programs("sbatch", SBATCH.format(folder=tmp_path))
    programs("squeue", "#!/bin/sh\n")
    assert cli.main(resume) == 0
    assert run_script(script, tmp_path) == (1, False)
    assert "submitted again" in (tmp_path / "s" / "jobs" / "0000" / "run" / "logs" / "slurm.log").read_text()
    assert run_script(tmp_path / "script_2", tmp_path)[1]


def test_a_run_that_sbatch_says_nothing_about_cannot_run_twice(
    programs: Programs, impatient: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    programs("srun", f"#!/bin/sh\ntouch {tmp_path}/ran\n")
    programs("sbatch", SILENT.format(folder=tmp_path))
    programs("squeue", NO_CONTROLLER)
    status = ["action=sweep", "sweep.dir=one", "sweep.do=status"]
    for words in (["cluster=slurm", "run.dir=one"], ["cluster=slurm", "run.dir=one"], status):
        assert cli.main(words) == 2  # the folder is kept: a job may come to run there
    assert (tmp_path / "count").read_text() == "1\n"
    programs("squeue", "#!/bin/sh\n")
    capsys.readouterr()
    assert cli.main(status) == 0
    assert "sbatch did not say whether it took the run" in capsys.readouterr().out
    programs(
        "squeue",
        f"#!/bin/sh\ncase $* in *%o*) echo '55|{tmp_path}/one/slurm/job.sh';; *) echo '55|RUNNING|None|n1|1';; esac\n",
    )
    assert cli.main(["cluster=slurm", "run.dir=one"]) == 2
    assert "job 55 uses this folder (running)" in capsys.readouterr().err
    programs("squeue", "#!/bin/sh\n")
    programs("sbatch", SBATCH.format(folder=tmp_path))
    assert cli.main(["cluster=slurm", "run.dir=one"]) == 0
    assert run_script(tmp_path / "script_1", tmp_path) == (1, False)
    assert run_script(tmp_path / "script_2", tmp_path)[1]


def test_a_job_that_has_started_though_nobody_noted_it_is_taken_over(
    programs: Programs, impatient: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One that waits is cancelled; the sweep goes on when it has left the queue."""
    programs("sbatch", SILENT.format(folder=tmp_path))
    programs("squeue", NO_CONTROLLER)
    assert cli.main(["-m", "cluster=slurm", "sweep.dir=s", "run.seed=1,2,3"]) == 2
    run_dirs = [tmp_path / "s" / "jobs" / f"000{number}" / "run" for number in range(3)]
    records.add(run_dirs[0], "started", job="9_0", restart=0)
    records.add_end(run_dirs[0], "9_0", 0, records.Ended("done", 0, ""))
    records.add(run_dirs[1], "started", job="9_1", restart=0)
    script = next((tmp_path / "s").rglob("job.sh"))
    programs("scancel", f"#!/bin/sh\necho $* >>{tmp_path}/cancelled\n")
    queue = f"""#!/bin/sh
    case $* in
    *%o*) echo '9_1|{script}'; [ -e {tmp_path}/cancelled ] || echo '9_2|{script}' ;;
    *) echo '9_0|COMPLETED|None|n1|1:00'; echo '9_1|RUNNING|None|n1|1:00' ;;
    esac
    """
    programs("squeue", queue)
    programs("sbatch", SBATCH.format(folder=tmp_path))
    assert cli.main(["action=sweep", "sweep.dir=s", "sweep.do=resume"]) == 0
    assert (tmp_path / "cancelled").read_text() == "9_2\n"
    assert [records.story(run_dir).job for run_dir in run_dirs] == ["9_0", "9_1", "102"]
    capsys.readouterr()


@pytest.mark.parametrize("words", [["run.dir=one"], ["-m", "sweep.dir=s", "run.seed=1,2"]], ids=["run", "array"])
def test_a_job_that_has_run_before_sbatch_was_given_up_is_known_by_its_folder(
    programs: Programs, impatient: None, tmp_path: Path, words: list[str]
) -> None:
    """It has left the queue, too."""
    run_dir = tmp_path / ("one" if words == ["run.dir=one"] else "s/jobs/0001/run")
    job = "77" if words == ["run.dir=one"] else "77_1"
    line = json.dumps({"event": "started", "job": job, "restart": 0, "folder": str(run_dir)})
    programs("sbatch", f"#!/bin/sh\necho '{line}' >>{run_dir}/slurm/jobs.jsonl; sleep 600\n")
    programs("squeue", "#!/bin/sh\n")
    assert cli.main(["cluster=slurm", *words]) == 0
    story = records.story(run_dir)
    assert (story.job, story.restart, story.is_submitting) == (job, 0, False)


STRANGE = ["<html>502 Bad gateway</html>", "", "Submitted batch job 12", "\\211PNG\\r\\n"]


@pytest.mark.parametrize("said", STRANGE)
def test_an_answer_without_a_job_is_no_submission(
    programs: Programs, tmp_path: Path, capsys: pytest.CaptureFixture[str], said: str
) -> None:
    programs("sbatch", f"#!/bin/sh\nprintf '{said}'\n")
    programs("squeue", "#!/bin/sh\n")
    for words in (["run.dir=one"], ["-m", "sweep.dir=s", "run.seed=1,2"]):
        assert cli.main(["cluster=slurm", *words]) == 2
        told = capsys.readouterr().err
        assert "sbatch named no job" in told and "squeue knows no job of" in told
    assert not (tmp_path / "one").exists()


def test_lines_of_a_sites_own_are_passed_over(programs: Programs, tmp_path: Path) -> None:
    programs("sbatch", "#!/bin/sh\necho 'Welcome to the cluster'; echo '12;big'; echo 'Have a nice day'\n")
    assert client.sbatch(tmp_path / "script", os.environ) == "12"
    programs("squeue", "#!/bin/sh\nprintf 'Welcome\\n7|RUNNING|None|n1|5:00\\n'\n")
    assert client.queue(["7"])["7"].state == "RUNNING"


def test_a_job_that_was_submitted_without_a_word_is_found_by_its_script(programs: Programs, tmp_path: Path) -> None:
    script = tmp_path / "a folder" / "script"
    programs("sbatch", "#!/bin/sh\n")
    programs("squeue", f"#!/bin/sh\nprintf '11|/else\\n12_3|{script}\\n'\n")
    assert client.sbatch(script, os.environ) == "12"


@pytest.mark.parametrize("said", ["<html>", "7|RUNNING", "\\211PNG\\r\\n"])
def test_a_queue_that_cannot_be_read_is_an_error_and_no_traceback(programs: Programs, said: str) -> None:
    programs("squeue", f"#!/bin/sh\nprintf '{said}'\n")
    programs("sacct", f"#!/bin/sh\nprintf '{said}'\n")
    with pytest.raises(client.SlurmError, match="squeue said nothing that could be read"):
        client.queue(["7"])
    assert client.accounting(["7"]) == {}


def _prepared(run_dir: Path, words: list[str]) -> Prepared:
    config = checked(compose(["cluster=slurm", *words]))
    run_folder.open_named(run_dir)
    provenance.write(run_dir, LaunchRequest(to_yaml(config)), config.plugins)
    return Prepared(config, run_dir, "gpt_tiny")


@pytest.mark.parametrize("line", ['{"event": "ended", "job": "7"}', '{"event": "started"}', '{"event": {}}', "[]"])
def test_a_damaged_line_of_a_jobs_record_is_passed_over(tmp_path: Path, line: str) -> None:
    records.add(tmp_path, "submitted", job="7")
    with (tmp_path / "slurm" / "jobs.jsonl").open("a") as file:
        file.write(line + "\n")
    records.add(tmp_path, "started", job="7", restart=1)
    assert (records.story(tmp_path).job, records.story(tmp_path).restart) == ("7", 1)


def test_ctrl_c_while_the_controller_is_away_says_that_the_job_goes_on(
    programs: Programs, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*words: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("launcher.slurm.start.wait_for", interrupted)
    programs("scancel", "#!/bin/sh\necho 'Unable to contact slurm controller (connect failure)' >&2; exit 1\n")
    assert cli.main(["cluster=slurm", "run.dir=mine", "sweep.wait=true"]) == 130
    assert "the job goes on: Unable to contact" in capsys.readouterr().err


def test_lines_about_the_start_are_said_once(
    programs: Programs, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("launcher.resuming.lines", lambda config: ["goes on from step 3"])
    assert cli.main(["cluster=slurm", "run.dir=mine"]) == 0
    assert capsys.readouterr().err.count("goes on from step 3") == 1


def test_a_copy_of_the_code_leaves_links_to_nowhere_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lock file of an editor is such a link."""
    for package in snapshot.PACKAGES:
        (tmp_path / package).mkdir()
        (tmp_path / package / "a.py").write_text("")
        (tmp_path / package / "b.py").symlink_to("a.py")
        (tmp_path / package / "nowhere.py").symlink_to("not/there")
    monkeypatch.setattr("launcher.__file__", str(tmp_path / "launcher" / "__init__.py"))
    code = snapshot.take(tmp_path / "code")
    assert sorted(path.name for path in (code / "recipes").iterdir()) == ["a.py", "b.py"]
    assert not (code / "recipes" / "b.py").is_symlink()


def test_a_sweep_that_is_cancelled_is_waited_for(
    programs: Programs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A job that saves for some seconds after scancel is over before anything can start it again; one that reached its
    end in the meantime is done."""
    assert cli.main(["-m", "cluster=slurm", "sweep.dir=s", "run.seed=1,2"]) == 0
    programs("scancel", f"#!/bin/sh\ntouch {tmp_path}/cancelled\n")
    looks = f"""#!/bin/sh
    [ -e {tmp_path}/cancelled ] || {{ printf '101_0|RUNNING|None|n1|1:00\\n101_1|RUNNING|None|n1|1:00\\n'; exit; }}
    echo >>{tmp_path}/looks
    [ $(wc -l <{tmp_path}/looks) -lt 3 ] && state=COMPLETING || state=CANCELLED
    printf "101_0|$state|None|n1|1:00\\n101_1|COMPLETED|None|n1|1:00\\n"
    """
    programs("squeue", looks)
    capsys.readouterr()
    assert cli.main(["action=sweep", "sweep.dir=s", "sweep.do=cancel"]) == 0
    assert "1 done, 1 cancelled" in capsys.readouterr().out
    assert len((tmp_path / "looks").read_text().splitlines()) >= 3


def test_a_copy_of_a_folder_leaves_the_jobs_of_the_original_alone(
    programs: Programs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Cancelled or resumed, the copy's jobs are its own; a folder that was moved keeps its jobs."""
    assert cli.main(["-m", "cluster=slurm", "sweep.dir=s", "run.seed=1,2"]) == 0
    assert cli.main(["cluster=slurm", "run.dir=one"]) == 0
    programs("scancel", f"#!/bin/sh\necho $* >>{tmp_path}/cancelled\n")
    lines = "".join(f"{job}|RUNNING|None|n1|1:00\\n" for job in ("101_0", "101_1", "102"))
    programs("squeue", f"#!/bin/sh\nprintf '{lines}'\n")
    for name in ("s", "one"):
        shutil.copytree(tmp_path / name, tmp_path / f"copy_of_{name}")
    capsys.readouterr()
    assert cli.main(["action=sweep", "sweep.dir=copy_of_s", "sweep.do=status"]) == 0
    text = capsys.readouterr().out
    assert "2 lost of 2 jobs" in text
    assert "a copy: job 101_1 belongs to its original, " in text
    assert cli.main(["action=sweep", "sweep.dir=copy_of_s", "sweep.do=cancel"]) == 0
    assert cli.main(["action=sweep", "sweep.dir=copy_of_one", "sweep.do=cancel"]) == 2
    assert "this folder is a copy, and job 102 is its original's" in capsys.readouterr().err
    assert not (tmp_path / "cancelled").exists()
    assert cli.main(["action=sweep", "sweep.dir=copy_of_s", "sweep.do=resume"]) == 0
    assert [records.story(tmp_path / "copy_of_s" / "jobs" / f"000{n}" / "run").job for n in (0, 1)] == [
        "103_0",
        "103_1",
    ]
    (tmp_path / "one").rename(tmp_path / "moved")
    shutil.rmtree(tmp_path / "copy_of_one")
    assert cli.main(["action=sweep", "sweep.dir=moved", "sweep.do=cancel"]) == 0
    assert (tmp_path / "cancelled").read_text() == "102\n"


def test_what_the_user_must_change_is_told_without_a_traceback(
    programs: Programs, capsys: pytest.CaptureFixture[str]
) -> None:
    """By a command that waits, and by one that asks; of any other error the traceback is shown."""
    for is_users in (True, False):
        name = f"mine_{is_users}"
        assert cli.main(["cluster=slurm", f"run.dir={name}"]) == 0
        job = records.story(Path(name)).job
        assert job is not None
        failure = Failure(1, "too little text", 1, 0.0, traceback="Traceback: in prepare", is_users=is_users)
        records.add_end(Path(name), job, 0, records.Ended("failed", 1, "rank 1: too little text", failure=failure))
        capsys.readouterr()
        assert cli.main(["action=sweep", f"sweep.dir={name}", "sweep.do=status"]) == 0
        text = capsys.readouterr().out
        assert text.startswith(f"job {job}: failed: rank 1: too little text\n")
        assert ("Traceback" in text) == (not is_users)
        assert "\n\n" not in text
