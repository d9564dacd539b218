"""What made this run: config, overrides, command, code, packages, machine. Secrets are hidden before writing."""

from __future__ import annotations

import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import yaml

import launcher
from launcher.machine import num_cores
from launcher.request import LaunchRequest
from launcher.run_folder import CONFIG_FILE
from recipes.secrets import HIDDEN, is_secret, is_secret_name, without_secret_values

ARTEFACTS = (
    CONFIG_FILE,
    "overrides.yaml",
    "command.txt",
    "revision.txt",
    "diff.patch",
    "packages.txt",
    "environment.json",
    "plugins",
)
_SECRET_IN_CODE = re.compile(
    r"""((?:api_?key|access_?key|token|secret|passw(?:or)?d)['"]?\s*[:=]\s*)(['"])[^'"]{8,}\2""", re.IGNORECASE
)
_PAIR = re.compile(r"(\w+)(\s*[:=]\s*)([^\s,{}\[\]]+)")
_SECRET_FILES = ("*.env", ".env*", "*.pem", "*.key", "*credentials*", "*secret*")
# Variables that change how a run computes or talks; nothing else of the environment is anybody's business.
_TOLD_PREFIXES = (
    "NCCL_",
    "GLOO_",
    "TORCH",
    "PYTORCH_",
    "CUDA_",
    "CUBLAS_",
    "OMP_",
    "MKL_",
    "SLURM_JOB_ID",
    "TOKENIZERS_",
)
_GIT_TIMEOUT_S = 10
_LARGEST_DIFF_BYTES = 5_000_000


def write(run_dir: Path, request: LaunchRequest, plugins: Sequence[str]) -> None:
    """Writes every artefact; those of an earlier start in this folder move to ``earlier/<n>``.

    All or none: where one cannot be written (a full disk), the folder is left as it was found.
    """
    earlier = _set_aside(run_dir)
    try:
        _write_all(run_dir, request, plugins)
    except BaseException:
        _take_back(run_dir, earlier)
        raise


def _write_all(run_dir: Path, request: LaunchRequest, plugins: Sequence[str]) -> None:
    (run_dir / CONFIG_FILE).write_text(without_secrets(request.config_yaml))
    (run_dir / "overrides.yaml").write_text(yaml.safe_dump([hide_override(word) for word in request.overrides]))
    words = shlex.join(hide_override(word) for word in request.command)
    (run_dir / "command.txt").write_text(f"cd {shlex.quote(os.getcwd())}\n{words}\n", errors="surrogateescape")
    _write_code(run_dir)
    (run_dir / "packages.txt").write_text("\n".join(packages()) + "\n")
    (run_dir / "environment.json").write_text(json.dumps(environment(os.environ), indent=2) + "\n")
    for plugin in plugins:
        (run_dir / "plugins").mkdir(exist_ok=True)
        shutil.copy2(plugin, run_dir / "plugins" / Path(plugin).name)


def without_secrets(config_yaml: str) -> str:
    """The config with the secrets of ``cluster.env`` hidden; ranks get that group through their environment."""
    config = yaml.safe_load(config_yaml)
    variables = (config.get("cluster") or {}).get("env") or {}
    secret = [name for name, value in variables.items() if is_secret(name, value)]
    if not secret:
        return config_yaml
    variables.update(dict.fromkeys(secret, HIDDEN))
    return yaml.safe_dump(config, sort_keys=False, allow_unicode=True)


def hide_override(word: str) -> str:
    """An override as typed, without values of secret keys: ``cluster.env.API_KEY=...`` and ``'env={API_KEY: ...}'``."""
    key, equals, value = word.partition("=")
    if equals and value and is_secret_name(key):
        return f"{key}={HIDDEN}"
    return without_secret_values(_PAIR.sub(_hide_pair, word))


def packages() -> list[str]:
    """``name==version`` of every installed distribution, sorted."""
    found = {(dist.metadata["Name"], dist.version) for dist in metadata.distributions()}
    return sorted((f"{name}=={version}" for name, version in found), key=str.lower)


def environment(environ: Mapping[str, str]) -> dict[str, Any]:
    """Python, machine, GPUs and the variables that steer training."""
    return {
        "python": sys.version.split()[0],
        "executable": sys.executable,
        "platform": platform.platform(),
        "hostname": platform.node(),
        "cpu": _cpu_model(),
        "cores": num_cores(),
        "memory_bytes": _memory_bytes(),
        "gpus": _gpus(),
        "variables": {
            name: HIDDEN if is_secret_name(name) else without_secret_values(value)
            for name, value in sorted(environ.items())
            if name.startswith(_TOLD_PREFIXES)
        },
    }


def _set_aside(run_dir: Path) -> Path | None:
    """Where the artefacts of an earlier start are now; None if there were none."""
    present = [name for name in ARTEFACTS if (run_dir / name).exists()]
    if not present:
        return None
    earlier = run_dir / "earlier"
    earlier.mkdir(exist_ok=True)
    folder = earlier / str(1 + max((int(path.name) for path in earlier.iterdir() if path.name.isdigit()), default=-1))
    folder.mkdir()
    for name in present:
        (run_dir / name).rename(folder / name)
    return folder


def _take_back(run_dir: Path, earlier: Path | None) -> None:
    """Undo a start that could not be written down."""
    for name in ARTEFACTS:
        path = run_dir / name
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
    if earlier is not None:
        for path in earlier.iterdir():
            path.rename(run_dir / path.name)
        earlier.rmdir()


def _write_code(run_dir: Path) -> None:
    root = Path(launcher.__file__).parent.parent
    revision = _git(root, "rev-parse", "HEAD")
    if revision is None:
        version = metadata.version("fsdp-launcher") if _is_installed() else "unknown"
        (run_dir / "revision.txt").write_text(f"fsdp-launcher {version}, not a git checkout\n")
        return
    exclude = [f":(exclude,icase){pattern}" for pattern in _SECRET_FILES]
    diff = _git(root, "diff", "HEAD", "--no-color", "--no-ext-diff", "--", ".", *exclude) or ""
    changed = " with uncommitted changes (diff.patch)" if diff else ""
    (run_dir / "revision.txt").write_text(f"{revision.strip()}{changed}\n")
    if diff:
        hidden = without_secret_values(_SECRET_IN_CODE.sub(rf"\1\2{HIDDEN}\2", diff))
        (run_dir / "diff.patch").write_text(hidden[:_LARGEST_DIFF_BYTES])


def _is_installed() -> bool:
    try:
        metadata.version("fsdp-launcher")
    except metadata.PackageNotFoundError:
        return False
    return True


def _git(root: Path, *words: str) -> str | None:
    """Standard output of git in ``root`` if that is the top of a checkout; None otherwise or without git."""
    if not (root / ".git").exists():
        return None
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *words],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_GIT_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def _hide_pair(match: re.Match[str]) -> str:
    key, sign, _ = match.groups()
    return f"{key}{sign}{HIDDEN}" if is_secret_name(key) else match.group(0)


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.processor()
    )


def _memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _gpus() -> list[str]:
    """One line per GPU as nvidia-smi names them: name, memory, driver."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return []
    query = ["--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run([command, *query], capture_output=True, text=True, timeout=_GIT_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return done.stdout.splitlines() if done.returncode == 0 else []
