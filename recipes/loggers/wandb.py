"""Weights & Biases. Offline needs no account: the run lies under the run folder, to be sent with ``wandb sync``."""

from __future__ import annotations

import logging
import secrets
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from recipes.loggers.base import FROM_THE_BEGINNING, Logger, Start, Value
from recipes.schema.training import WandbLoggerConfig

ID_FILE = "wandb_id.txt"
_LOG = logging.getLogger(__name__)
# No code, no git, no console: the run folder has them. Silence at the other end (a server, or nobody to answer a
# question about an account) costs a minute or two once, never the run.
_SETTINGS: dict[str, Any] = {
    "init_timeout": 60,
    "login_timeout": 60,
    "finish_timeout": 120,
    "finish_timeout_raises": True,
    "console": "off",
    "silent": True,
    "save_code": False,
    "disable_git": True,
}


class WandbLogger(Logger):
    """Whatever wandb raises is a warning, once; the run goes on without it.

    config: what is shown beside the run, already without secrets. name: the run's short name.

    A run that goes on keeps the id of its first start, which lies in the run folder. wandb itself ignores steps that
    it has had before; they are the same ones.
    """

    def __init__(
        self,
        options: WandbLoggerConfig,
        run_dir: Path,
        name: str,
        config: Mapping[str, object],
        start: Start = FROM_THE_BEGINNING,
    ) -> None:
        self._run: Any = None
        self._guard("start", lambda: self._start(options, run_dir, name, config, start))

    def log(self, step: int, metrics: Mapping[str, Value]) -> None:
        known = {name: value for name, value in metrics.items() if value is not None and name != "step"}
        self._guard("log", lambda: self._run.log(known, step=step))

    def close(self, summary: Mapping[str, object] | None) -> None:
        if summary is not None:
            self._guard("write the summary", lambda: self._run.summary.update(dict(summary)))
        self._guard("finish", lambda: self._run.finish(exit_code=0 if summary is not None else 1))

    def _start(
        self, options: WandbLoggerConfig, run_dir: Path, name: str, config: Mapping[str, object], start: Start
    ) -> None:
        wandb = _import_wandb()
        self._run = wandb.init(
            project=options.project,
            entity=options.entity,
            mode=options.mode,
            tags=list(options.tags),
            notes=options.notes,
            name=name,
            id=run_id(run_dir / ID_FILE, is_new=start.steps_done == 0),
            resume="allow",
            dir=str(run_dir),
            config=dict(config),
            settings=wandb.Settings(**_SETTINGS),
        )

    def _guard(self, doing: str, call: Callable[[], None]) -> None:
        if self._run is None and doing != "start":
            return
        try:
            call()
        except Exception as error:  # a metrics service must not end a training run
            _LOG.warning("wandb could not %s (%s: %s); the run goes on without it", doing, type(error).__name__, error)
            self._run = None


def run_id(path: Path, is_new: bool) -> str:
    """The id kept in ``path``; a new one, kept there, at the first start and where there is none."""
    if not is_new and path.exists():
        return path.read_text().strip()
    made = secrets.token_hex(6)
    path.write_text(made + "\n")
    return made


def _import_wandb() -> types.ModuleType:
    """Imported only where asked for: it costs a second and starts threads."""
    import wandb

    return wandb
