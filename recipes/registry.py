"""Short names for models, data sources and optimizers, without importing what they name.

Built-in entries point at a module that is imported when the thing is built; a plugin's entry holds its own
function. YAML only ever carries the short name (``model.kind: gpt``), never an import path.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from recipes.schema import data as data_schema
from recipes.schema import model as model_schema
from recipes.schema import training as training_schema

TASKS = ("causal_lm", "seq2seq_lm", "clicks", "images")
C = TypeVar("C", bound=type)


@dataclass(frozen=True)
class Entry:
    """One kind.

    name: what YAML says in ``kind``.
    config: the dataclass that is its schema.
    task: what batches look like and how loss is computed (one of ``TASKS``); empty for optimizers.
    module: import path of the built-in implementation, which offers the group's functions; None for a plugin.
    functions: a plugin's implementation, by the group's function names.
    """

    name: str
    config: type
    task: str = ""
    module: str | None = None
    functions: dict[str, Callable[..., Any]] | None = None

    def load(self, function: str) -> Callable[..., Any]:
        """The named function of this kind; imports a built-in's module (and torch with it)."""
        if self.module is not None:
            return getattr(importlib.import_module(self.module), function)
        assert self.functions is not None
        return self.functions[function]

    def offers(self, function: str) -> bool:
        """Whether this kind defines an optional function of its group."""
        if self.module is not None:
            return function in vars(importlib.import_module(self.module))
        return self.functions is not None and function in self.functions


class Registry(Generic[C]):
    """Names of one config group."""

    def __init__(self, group: str, entries: list[Entry]) -> None:
        self.group = group
        self._entries = {entry.name: entry for entry in entries}

    def names(self) -> list[str]:
        return sorted(self._entries)

    def get(self, name: str) -> Entry | None:
        return self._entries.get(name)

    def __getitem__(self, name: str) -> Entry:
        return self._entries[name]

    def plugin_entries(self) -> list[Entry]:
        return [entry for entry in self._entries.values() if entry.module is None]

    def discard(self, name: str) -> None:
        """Forget a plugin's entry, if it is there; built-in kinds stay."""
        entry = self._entries.get(name)
        if entry is not None and entry.module is None:
            del self._entries[name]

    def add(self, entry: Entry) -> None:
        """Raises ValueError if the name is taken."""
        if entry.name in self._entries:
            raise ValueError(f"{self.group} '{entry.name}' is already registered; choose another name")
        self._entries[entry.name] = entry


MODELS: Registry = Registry(
    "model",
    [
        Entry("gpt", model_schema.GPTConfig, "causal_lm", "recipes.models.gpt"),
        Entry("t5", model_schema.T5Config, "seq2seq_lm", "recipes.models.t5"),
        Entry("dhen", model_schema.DHENConfig, "clicks", "recipes.models.dhen"),
        Entry("regnet", model_schema.RegNetConfig, "images", "recipes.models.regnet"),
        Entry("deepvit", model_schema.DeepViTConfig, "images", "recipes.models.deepvit"),
    ],
)
DATA: Registry = Registry(
    "data",
    [
        Entry("stdlib_text", data_schema.StdlibTextConfig, "text", "recipes.data.stdlib_text"),
        Entry("text_files", data_schema.TextFilesConfig, "text", "recipes.data.text_files"),
        Entry("hf_dataset", data_schema.HFDatasetConfig, "text", "recipes.data.hf_dataset"),
        Entry("flights", data_schema.FlightsConfig, "clicks", "recipes.data.flights"),
        Entry("criteo", data_schema.CriteoConfig, "clicks", "recipes.data.criteo"),
        Entry("synthetic_clicks", data_schema.SyntheticClicksConfig, "clicks", "recipes.data.synthetic_clicks"),
        Entry("image_folder", data_schema.ImageFolderConfig, "images", "recipes.data.image_folder"),
        Entry("synthetic_images", data_schema.SyntheticImagesConfig, "images", "recipes.data.synthetic_images"),
    ],
)
OPTIMIZERS: Registry = Registry(
    "optimizer",
    [
        Entry("adamw", training_schema.AdamWConfig, "", "recipes.optimizers.adamw"),
        Entry("sgd", training_schema.SGDConfig, "", "recipes.optimizers.sgd"),
        Entry("lamb", training_schema.LAMBConfig, "", "recipes.optimizers.lamb"),
        Entry("adafactor", training_schema.AdafactorConfig, "", "recipes.optimizers.adafactor"),
    ],
)


def register_model(name: str, config: type, task: str) -> Callable[[C], C]:
    """Class decorator for plugins: a class whose static functions are the model group's functions.

    ``build(config, info) -> nn.Module`` is needed; ``unit_classes() -> tuple[type, ...]``,
    ``forward_flops(config, info) -> float`` (per sample), ``unit_forward_flops(config, info) -> float``,
    ``ignored_modules(model) -> list`` and ``extra_optimizers(model, config) -> list`` are optional.
    """
    if task not in TASKS:
        raise ValueError(f"model '{name}': task must be one of {', '.join(TASKS)}, got {task!r}")
    return _register(MODELS, name, config, task)


def register_data(name: str, config: type, task: str) -> Callable[[C], C]:
    """Class decorator for plugins: ``prepare(config, request) -> Splits`` is needed."""
    if task not in ("text", "clicks", "images"):
        raise ValueError(f"data '{name}': task must be one of text, clicks, images, got {task!r}")
    return _register(DATA, name, config, task)


def register_optimizer(name: str, config: type) -> Callable[[C], C]:
    """Class decorator for plugins: ``build(config, groups) -> torch.optim.Optimizer`` is needed.

    The optimizer steps on flat shards, where only element-wise updates are exact. One that this project does not
    know must say that it is (class attribute ``is_elementwise = True``), else it is refused by name. Optional:
    ``weight_decay_kind() -> "decoupled" | "l2"`` for decay by name, or ``decays_by_group() -> True`` to get
    parameter groups that carry their own ``weight_decay``.
    """
    return _register(OPTIMIZERS, name, config, "")


def _register(registry: Registry, name: str, config: type, task: str) -> Callable[[C], C]:
    def decorate(cls: C) -> C:
        functions = {key: getattr(cls, key) for key in vars(cls) if not key.startswith("_")}
        registry.add(Entry(name, config, task, None, functions))
        return cls

    return decorate
