"""``action=figure``: a figure of the FSDP paper, computed run by run from configs. Torch comes with the work itself."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from launcher import run_folder
from launcher.announce import short
from launcher.checked import checked
from launcher.command_line import parse
from launcher.compose import Composer
from launcher.errors import EXIT_OK, ConfigErrors, Problem
from launcher.planning.folder import FIGURES, plan_folder
from launcher.request import LaunchRequest
from launcher.schema import Config
from launcher.words import read_words
from recipes.plan.figures.points import Figure, Point, load

_OF_THE_FIGURE = ("action", "experiment", "figure", "run")  # words that are not for the runs of which it consists


def run(config: Config, request: LaunchRequest) -> int:
    """Prints the table, leaves figure.json and figure.html. Errors of the prediction are told, not failed on.

    Raises:
        ConfigErrors: an override does not go with one of the figure's runs, or the folder cannot be used.
    """
    assert config.figure.name is not None  # the checker's word
    figure = load(config.figure.name)
    configs = run_configs(figure, request)
    figures = import_module("recipes.plan.figures.compute")  # by name and now: it imports torch
    runs = {words: _run(figures, one) for words, one in configs.items()}
    progress = _Progress(figure)
    try:
        found = figures.computed(figure, runs, progress.tell)
    except figures.USERS_ERRORS as error:
        raise ConfigErrors([Problem(f"no plan can be made: {error}")]) from None
    folder = plan_folder(config, f"fig{figure.name}", FIGURES)
    with run_folder.usable(folder):
        figures.write(found, folder, " ".join(request.command))
    print(figures.text_of(found), f"picture: {short(folder / FIGURES.page)}", sep="\n")
    return EXIT_OK


def run_configs(figure: Figure, request: LaunchRequest) -> dict[tuple[str, ...], Config]:
    """The checked config of every run, by the words of its points: the figure's preset, the point, what was typed.

    Raises:
        ConfigErrors: every problem of every run, each told once.
    """
    composer = Composer(parse(request.command[1:]))
    configs: dict[tuple[str, ...], Config] = {}
    problems: dict[tuple[str, str], Problem] = {}
    for point in figure.points:
        if point.words in configs or point.not_predicted:
            continue
        words = run_words(figure.name, point.words, request.overrides)
        try:
            configs[point.words] = checked(composer.compose(read_words(words, is_multirun=False).overrides))
        except ConfigErrors as errors:
            problems |= {(problem.key, problem.what): problem for problem in errors.problems}
    if problems:
        raise ConfigErrors(list(problems.values()))
    return configs


def run_words(name: str, point: Sequence[str], typed: Sequence[str]) -> list[str]:
    """What a run of the figure would be planned with; of words with one key the last wins, and typed ones do."""
    own = [word for word in typed if _key(word).partition(".")[0] not in _OF_THE_FIGURE]
    return list({_key(word): word for word in [f"experiment=paper/fig{name}", *point, *own, "action=plan"]}.values())


def _key(word: str) -> str:
    return word.partition("=")[0].strip().lstrip("+")


def _run(figures: Any, config: Config) -> Any:
    ranks_per_host = config.cluster.nproc_per_node
    return figures.Run(config, config.cluster.num_nodes * ranks_per_host, ranks_per_host)


class _Progress:
    """A line for every point, as soon as it is known."""

    def __init__(self, figure: Figure) -> None:
        self._left = sum(not point.not_predicted for point in figure.points)
        self._number, self._done = self._left, 0

    def tell(self, point: Point, value: float | bool | None) -> None:
        self._done += 1
        told = "no speed (retries)" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
        where = f"[{self._done}/{self._number}] {point.series}, {point.at}"
        print(f"{where}: predicted {told}, paper {point.published}", file=sys.stderr, flush=True)
