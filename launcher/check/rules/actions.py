"""Rules about what actions beside training work on: model folders, and what may be evaluated, written, exported."""

from __future__ import annotations

import importlib.resources
import re
from collections.abc import Iterator

from launcher.check.about import About
from launcher.check.rules.rule import Rules
from launcher.errors import Problem
from launcher.schema import Config
from recipes.data.files import expanded
from recipes.portable.errors import FolderError
from recipes.portable.families import family_of
from recipes.portable.folder import EXPECTED, open_folder
from recipes.registry import MODELS

RULES = Rules()
_ALONE = ("export", "inspect")
_PRESET_NAME = "letters, digits, dots, dashes and underscores"
_WRITES_TEXT = ("causal_lm", "seq2seq_lm")


@RULES.reading("model", "action")
def model_folder(config: Config, about: About) -> Iterator[Problem]:
    """Every rank reads it; here only headers are looked at, and whether ``config.json`` tells of such a model."""
    init_from = config.model.init_from
    if init_from is None or not about.is_typed:
        return
    key = "model.init_from"
    try:
        folder = open_folder(init_from)
    except FolderError as error:
        yield about.problem(key, str(error).removeprefix(f"{key}={init_from}: "), got=init_from, expected=EXPECTED)
        return
    for what, theirs, ours in family_of(config.model).differences(folder.config):
        remedy = f"{what}={str(theirs).lower() if isinstance(theirs, bool) else theirs}"
        yield about.problem(
            what if what.startswith("model.") else key,
            f"the folder {init_from} holds another model" + ("" if what.startswith("model.") else f": its {what}"),
            got=ours,
            expected=f"{theirs}, as its config.json says",
            remedy=remedy if what.startswith("model.") and what != "model.kind" else "another model preset",
            also=(key,),
        )


@RULES.reading("action", "export")
def export_folder(config: Config, about: About) -> Iterator[Problem]:
    if config.action != "export" or not about.is_typed:
        return
    if config.export.dir is None:
        yield about.problem(
            "export.dir",
            "there is no place to export to",
            got="null",
            expected="a new or an empty folder",
            remedy="export.dir=PATH",
        )
        return
    place = expanded(config.export.dir)
    if place.exists() and (not place.is_dir() or any(place.iterdir())):
        yield about.problem(
            "export.dir",
            "this folder holds something already" if place.is_dir() else "this is a file",
            got=config.export.dir,
            expected="a new or an empty folder",
            remedy="another export.dir, or empty this one",
        )


@RULES.reading("action", "model", "train.eval_samples")
def uses(config: Config, about: About) -> Iterator[Problem]:
    """An evaluation needs samples, writing needs a language model."""
    if config.action == "eval" and config.train.eval_samples == 0:
        yield about.problem("train.eval_samples", "an evaluation of no samples", got=0, remedy="train.eval_samples=256")
    task = MODELS[config.model.kind].task
    if config.action == "generate" and task not in _WRITES_TEXT:
        yield about.problem(
            "action",
            f"the model '{config.model.kind}' writes no text",
            got="generate",
            expected="a language model (gpt, t5)",
            remedy="action=eval",
        )


@RULES.reading("action", "cluster.kind")
def alone(config: Config, about: About) -> Iterator[Problem]:
    """One process reads a checkpoint and writes, or prints; several would do it several times."""
    if config.action in _ALONE and about.joined is not None and about.joined.world_size > 1:
        yield about.problem(
            "action",
            f"action={config.action} is done by one process, and there are {about.joined.world_size}",
            got=config.action,
            remedy=f"fsdp-launch action={config.action} ..., without torchrun",
        )


@RULES.reading("action", "calibrate")
def profile_name(config: Config, about: About) -> Iterator[Problem]:
    """A preset's file of its own: no built-in's name, no path, nothing of an earlier one is lost."""
    if config.action != "calibrate" or not about.is_typed:
        return
    name, folder = config.calibrate.name, config.calibrate.dir
    if not re.fullmatch(r"[A-Za-z0-9._-]+", name):
        yield about.problem("calibrate.name", "a preset cannot be named like this", got=name, expected=_PRESET_NAME)
    elif importlib.resources.files("configs").joinpath(f"hardware/{name}.yaml").is_file():
        what = "a built-in profile has this name, and would be used instead"
        yield about.problem("calibrate.name", what, got=name, remedy="another calibrate.name")
    elif folder is not None and (expanded(folder) / "hardware" / f"{name}.yaml").exists():
        what = f"{folder}/hardware/{name}.yaml is there already"
        yield about.problem("calibrate.name", what, got=name, remedy="another calibrate.name, or remove the file")
