"""A job's stored config, ready to run in the job's own run folder."""

from __future__ import annotations

import os
from collections.abc import Sequence

from launcher.errors import ConfigErrors, Problem
from launcher.provenance import HIDDEN
from launcher.request import LaunchRequest
from launcher.resolved import from_yaml, to_yaml
from launcher.schema import Config
from launcher.sweep.record import Job


def stored_config(job: Job, plugins: Sequence[str]) -> Config:
    """The stored config, in its own run folder, with secret variables filled in from the environment.

    Raises:
        ConfigErrors: it cannot be read, or a secret is not there.
    """
    config = from_yaml(job.config_file, plugins)
    config.run.dir = str(job.run_dir)
    absent = []
    for name, value in config.cluster.env.items():
        if value == HIDDEN:
            config.cluster.env[name] = os.environ.get(name, "")
            if name not in os.environ:
                absent.append(name)
    if absent:
        what = "the value of a secret variable is not stored with a sweep"
        raise ConfigErrors(
            [Problem(what, f"cluster.env.{name}", remedy=f"export {name}=... before resuming") for name in absent]
        )
    return config


def request_of(job: Job, config: Config) -> LaunchRequest:
    """What the run folder is told about where the config came from."""
    command = ("fsdp-launch", *job.overrides)
    return LaunchRequest(config_yaml=to_yaml(config), overrides=job.overrides, command=command)
