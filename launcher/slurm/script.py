"""The text handed to sbatch: a pure function of the config and of where the run's files are."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from launcher.schema import ClusterConfig, Config
from launcher.slurm.lead import lead_s
from launcher.slurm.records import SUBMISSION
from launcher.time_limit import canonical, seconds_of
from recipes.secrets import is_secret

JOB_LOG = Path("logs") / "slurm.log"  # in the run folder: what the script, srun and every rank print
SAVE_SIGNAL = "USR2"
Option = tuple[str, str | None]  # name without dashes, value; None: a flag
_PLAIN_VALUE = re.compile(r"[\w@%+=:,./\[\]&|*()!-]+")


@dataclass(frozen=True)
class Place:
    """Where one run's files are, all absolute.

    run_dir: the run folder, on a file system that every node sees.
    code_dir: the code's copy, which the job runs.
    plugins: the user's files, copied too.
    submission: what ``records.SUBMISSION`` in the run folder holds while this is its latest one.
    python: the interpreter of the ranks' end keeper and, without ``cluster.python``, of the ranks.
    """

    run_dir: Path
    code_dir: Path
    python: str
    plugins: tuple[Path, ...] = ()
    name: str = "fsdp"
    submission: str = "1"


@dataclass(frozen=True)
class Array:
    """Several runs as one array. folder: holds ``run_folders``, one line for each element; max_parallel: at once."""

    folder: Path
    num_jobs: int
    max_parallel: int

    @property
    def run_folders(self) -> Path:
        return self.folder / "run_folders"


def script_text(config: Config, place: Place, array: Array | None = None, measured_save_s: float | None = None) -> str:
    """The whole script.

    array: this script runs several runs, ``place.run_dir`` standing for none of them.
    measured_save_s: what a save of this run takes, if it is known.
    """
    lead = lead_s(config, measured_save_s)
    header = [f"#SBATCH {_option(name, value)}" for name, value in sbatch_options(config, place, array, lead)]
    return "\n".join(["#!/bin/bash", *header, "", *_body(config, place, array, lead), ""])


def sbatch_options(config: Config, place: Place, array: Array | None, lead: int) -> list[Option]:
    """What the script asks of SLURM, in the order in which it is written. lead: seconds, see ``lead``."""
    cluster = config.cluster
    log = place.run_dir / JOB_LOG if array is None else array.folder / "slurm-%a.log"
    options: list[Option] = [
        ("job-name", place.name),
        ("nodes", str(cluster.num_nodes)),
        ("ntasks-per-node", str(cluster.nproc_per_node)),
        ("output", _escaped(log)),
        ("open-mode", "append"),
    ]
    if array is not None:
        options.append(("array", f"0-{array.num_jobs - 1}%{array.max_parallel}"))
    if cluster.time_limit is not None:
        options.append(("time", canonical(seconds_of(cluster.time_limit))))
    options.append(("signal", f"{SAVE_SIGNAL}@{lead}"))
    options.append(("requeue" if cluster.requeue else "no-requeue", None))
    options.extend(_resources(cluster))
    options.extend((name, value or None) for name, value in cluster.sbatch.items())
    return options


def _resources(cluster: ClusterConfig) -> list[Option]:
    gpus = cluster.gpus_per_node
    if gpus is None and cluster.device == "cuda" and cluster.gres is None:
        gpus = cluster.nproc_per_node
    wanted = {
        "partition": cluster.partition,
        "account": cluster.account,
        "qos": cluster.qos,
        "constraint": cluster.constraint,
        "reservation": cluster.reservation,
        "nodelist": cluster.nodelist,
        "exclude": cluster.exclude,
        "gpus-per-node": gpus or None,
        "gres": cluster.gres,
        "cpus-per-task": cluster.cpus_per_task,
        "mem": cluster.memory,
        "dependency": cluster.dependency,
        "mail-user": cluster.mail_user,
        "mail-type": cluster.mail_type,
        "comment": cluster.comment,
        "nice": cluster.nice,
    }
    options: list[Option] = [(name, str(value)) for name, value in wanted.items() if value is not None]
    return [("exclusive", None), *options] if cluster.exclusive else options


def _body(config: Config, place: Place, array: Array | None, lead: int) -> list[str]:
    cluster = config.cluster
    if array is None:
        lines = [f"run_dir={shlex.quote(str(place.run_dir))}"]
    else:
        lines = [
            f'run_dir=$(sed -n "$((SLURM_ARRAY_TASK_ID + 1))p" {shlex.quote(str(array.run_folders))})',
            f'exec >>"$run_dir/{JOB_LOG}" 2>&1',
        ]
    max_requeues = cluster.max_requeues if cluster.requeue else 0
    limits = ["--max-restarts", str(cluster.max_restarts), "--max-requeues", str(max_requeues)]
    after = shlex.join([place.python, "-P", "-m", "launcher.slurm.after", *limits, "--lead", str(lead)])
    return [
        *lines,
        "# SLURM may take a job long after sbatch was given up: of the jobs of a run folder only the latest runs.",
        f'if [ "$(cat "$run_dir/{SUBMISSION}")" != {shlex.quote(place.submission)} ]; then',
        '  echo "this run folder was submitted again, or is gone: nothing is run" >&2',
        "  exit 1",
        "fi",
        f'export PYTHONPATH={shlex.quote(str(place.code_dir))}"${{PYTHONPATH:+:$PYTHONPATH}}" PYTHONUNBUFFERED=1',
        *_variables(cluster),
        "",
        "# However this script ends, the end is recorded; a run that saved, or may try again, goes back to the queue.",
        "finish() {",
        "  code=$?",
        "  trap - EXIT",
        f'  {after} --run-dir "$run_dir" --code "$code"',
        "  exit $?",
        "}",
        "trap finish EXIT",
        "trap : TERM USR1 USR2  # the ranks are told by SLURM too; this shell stays until they have ended",
        "set -e",
        *(f"module load {shlex.quote(module)}" for module in cluster.modules),
        *cluster.setup,
        "",
        _srun(config, place),
    ]


def _variables(cluster: ClusterConfig) -> list[str]:
    """``cluster.env``; a secret comes with the environment of sbatch and stands in no file."""
    lines = []
    for name, value in cluster.env.items():
        if is_secret(name, value):
            lines.append(f"# {name} comes from the environment of sbatch: secrets are not written down")
        else:
            lines.append(f"export {name}={shlex.quote(value)}")
    if cluster.cpus_per_task is not None:  # some versions of srun do not take it over from sbatch
        lines.append(f"export SRUN_CPUS_PER_TASK={cluster.cpus_per_task}")
    return lines


def _srun(config: Config, place: Place) -> str:
    cluster = config.cluster
    # --export: some sites keep the caller's environment from sbatch, and srun would keep the script's from the ranks.
    words = ["srun", "--kill-on-bad-exit=1", "--distribution=block", "--input=none", "--export=ALL"]
    python = cluster.python or (place.python if cluster.container_image is None else "python3")
    inside: list[str] = []
    if cluster.container_image is not None:
        mounts = [str(place.code_dir), *cluster.container_mounts]
        if cluster.container_runtime == "pyxis":
            pairs = [mount if ":" in mount else f"{mount}:{mount}" for mount in mounts]
            words += [f"--container-image={cluster.container_image}"]
            mounted = f'--container-mounts="$run_dir:$run_dir",{shlex.quote(",".join(pairs))}'
        else:
            gpus = ["--nv"] if cluster.device == "cuda" else []
            inside = ["apptainer", "exec", *gpus]
            mounted = f'--bind "$run_dir",{shlex.quote(",".join(mounts))}'
    task = [python, "-P", "-m", "launcher.slurm.task"]
    for plugin in place.plugins:
        task += ["--plugin", str(plugin)]
    words += cluster.srun_args
    if cluster.container_image is None:
        return f'{shlex.join([*words, *task])} --run-dir "$run_dir"'
    if not inside:
        return f'{shlex.join(words)} {mounted} {shlex.join(task)} --run-dir "$run_dir"'
    image = shlex.quote(cluster.container_image)
    return f'{shlex.join([*words, *inside])} {mounted} {image} {shlex.join(task)} --run-dir "$run_dir"'


def _option(name: str, value: str | None) -> str:
    """One option as sbatch reads it from a script: it knows double quotes and backslashes."""
    if value is None:
        return f"--{name}"
    if _PLAIN_VALUE.fullmatch(value):
        return f"--{name}={value}"
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'--{name}="{escaped}"'


def _escaped(path: Path) -> str:
    """sbatch replaces ``%`` patterns in file names: the folder's own ones are doubled. A backslash anywhere, itself
    doubled, switches the patterns off.
    """
    folder = str(path.parent)
    if "\\" in folder:
        return f"{folder}/{path.name}".replace("\\", "\\\\")
    return folder.replace("%", "%%") + "/" + path.name
