"""Rules about sweeps: what action=sweep needs, and options of a search without a search."""

from __future__ import annotations

from collections.abc import Iterator

from launcher.check.about import About
from launcher.check.rules.rule import Rules
from launcher.errors import Problem
from launcher.schema import Config, SweepConfig

RULES = Rules()
OF_A_SEARCH = ("trials", "sampler", "sampler_seed")


@RULES.reading("action", "sweep")
def what_to_do(config: Config, about: About) -> Iterator[Problem]:
    sweep = config.sweep
    if config.action == "sweep":
        if sweep.do is None:
            choices = "status, collect, resume, retry or cancel"
            yield about.problem(
                "sweep.do", "nothing to do with the sweep", got="null", expected=choices, remedy="sweep.do=status"
            )
        if sweep.dir is None:
            yield about.problem("sweep.dir", "which sweep?", got="null", remedy="sweep.dir=sweeps/FOLDER")
    elif sweep.do is not None:
        yield about.problem(
            "sweep.do", "this belongs to action=sweep", got=sweep.do, remedy="add action=sweep, or leave it out"
        )


@RULES.reading("sweep")
def options_of_a_search(config: Config, about: About) -> Iterator[Problem]:
    if config.sweep.sweeper != "grid":
        return
    default = SweepConfig()
    for name in OF_A_SEARCH:
        value = getattr(config.sweep, name)
        if value != getattr(default, name):
            yield about.problem(
                f"sweep.{name}",
                "a grid has no such choice: it runs every combination",
                got=value,
                remedy="hydra/sweeper=optuna, or leave it out",
            )


@RULES.reading("action", "sweep", "cluster.kind")
def searching_waits(config: Config, about: About) -> Iterator[Problem]:
    """A search needs results to go on, so it waits for its jobs whatever ``sweep.wait`` says."""
    typed = about.sources.text("sweep.wait")
    if config.sweep.sweeper == "optuna" and typed is not None and not config.sweep.wait:
        yield about.problem(
            "sweep.wait",
            "a search waits for its jobs: each choice depends on results",
            got="false",
            remedy="leave sweep.wait out",
            also=("sweep.sweeper",),
        )
