"""Hydra behind one small class: search path, groups, composing, and which file gave what.

Everything of Hydra that is not its public interface is named here and nowhere else. Hydra only composes: it starts
no job of ours, changes no folder, configures no logging and writes no file.
"""

from __future__ import annotations

import copy
import functools
import importlib.resources
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

from hydra import version
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import CachingConfigRepository, ConfigRepository, IConfigRepository
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_config_search_path, get_args_parser
from hydra.core.config_search_path import ConfigSearchPath, SearchPathQuery
from hydra.core.config_store import ConfigStore
from hydra.core.default_element import ResultDefault
from hydra.core.hydra_config import HydraConfig
from hydra.core.object_type import ObjectType
from hydra.plugins.config_source import ConfigResult
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from launcher.sources import Layer, shown

PACKAGE = "configs"
PRIMARY = "config"
VERSION_BASE = "1.3"
_stored: list[tuple[str, str]] = []  # (group, name) of what is in Hydra's ConfigStore because of us


class CachedRepository(ConfigRepository):
    """Reads each YAML file once per process: a sweep composes hundreds of configs from the same few files."""

    # Built-in presets come first on every search path and do not change while the program runs.
    _built_in: ClassVar[dict[str, ConfigResult]] = {}
    _read: dict[str, ConfigResult | None]

    def initialize_sources(self, config_search_path: ConfigSearchPath) -> None:
        super().initialize_sources(config_search_path)
        self._read = dict(self._built_in)

    def __deepcopy__(self, memo: dict[int, Any]) -> CachedRepository:
        """Hydra copies the repository for each composition, as hydra.searchpath may change the copy's sources.

        What was read is shared until then.
        """
        return copy.copy(self)

    def load_config(self, config_path: str) -> ConfigResult | None:
        if config_path not in self._read:
            try:
                self._read[config_path] = super().load_config(config_path)
            except UnicodeDecodeError as error:
                raise ValueError(f"{config_path}.yaml is no UTF-8 text: {error}") from None
        found = self._read[config_path]
        if found is None:
            return None
        if found.path == f"pkg://{PACKAGE}":
            self._built_in[config_path] = found
        fresh = copy.copy(found)
        fresh.config = copy.deepcopy(found.config)  # composing merges into and flags what it is given
        return fresh


class RecordingLoader(ConfigLoaderImpl):
    """Remembers which files the last composition was made of."""

    def __init__(self, config_search_path: ConfigSearchPath) -> None:
        super().__init__(config_search_path)
        self.repository = CachedRepository(config_search_path)
        self.composed_from: Callable[[], list[Layer]] = list

    def _compose_config_from_defaults_list(self, defaults: list[ResultDefault], repo: IConfigRepository) -> DictConfig:
        assert isinstance(repo, CachingConfigRepository)
        self.composed_from = functools.partial(_layers, tuple(defaults), repo.delegate)
        return super()._compose_config_from_defaults_list(defaults, repo)


class HydraLoader:
    """One search path: the built-in presets, then a folder of the user's, then what plugins registered."""

    def __init__(self, config_dir: Path | None, config_name: str = PRIMARY) -> None:
        """``config_dir`` exists. The caller has stored plugin presets in Hydra's ConfigStore already."""
        version.setbase(VERSION_BASE)
        search_path = create_config_search_path(f"pkg://{PACKAGE}")
        if config_dir is not None:
            search_path.prepend("command-line", f"file://{config_dir}", SearchPathQuery(provider="schema"))
        self._loader = RecordingLoader(search_path)
        self.hydra = Hydra("fsdp-launch", self._loader)
        self.config_name = config_name

    def groups(self, searchpath: Sequence[str]) -> dict[str, list[str]]:
        """Preset names of every group of ours and the user's. searchpath: overrides of ``hydra.searchpath``, if any."""
        _, repository = self._loader._parse_overrides_and_create_caching_repo(self.config_name, list(searchpath))
        names = [name for name in repository.get_group_options("", ObjectType.GROUP) if name != "hydra"]
        return {name: repository.get_group_options(name, ObjectType.CONFIG) for name in names}

    def is_built_in(self, name: str) -> bool:
        """Whether the package itself has such a preset (``model/gpt_tiny``) or primary config (``config``)."""
        return preset_path(name).is_file()

    def compose(self, overrides: Sequence[str]) -> tuple[DictConfig, Callable[[], list[Layer]]]:
        """The composed config, Hydra's own node included, and a way to ask for its files in the order of merging.

        Raises what Hydra raises.
        """
        config = self._loader.load_configuration(self.config_name, list(overrides), run_mode=RunMode.RUN)
        return config, self._loader.composed_from

    def show_info(self, what: str, overrides: Sequence[str]) -> None:
        self.hydra.show_info(what, config_name=self.config_name, overrides=list(overrides))

    def show_hydra_help(self, overrides: Sequence[str]) -> None:
        parser = get_args_parser()
        self.hydra.hydra_help(self.config_name, args_parser=parser, args=parser.parse_args(list(overrides)))

    def complete_shell(self, overrides: Sequence[str]) -> None:
        self.hydra.shell_completion(config_name=self.config_name, overrides=list(overrides))


def _layers(defaults: Sequence[ResultDefault], repository: IConfigRepository) -> list[Layer]:
    """Files of one composition, read again: composing has merged into what it was given."""
    layers = []
    for default in defaults:
        name = str(default.config_path)
        result = repository.load_config(name)
        if result is None or name.startswith("hydra/"):
            continue
        tree: Any = OmegaConf.to_container(result.config, resolve=False)
        for part in reversed((default.package or "").split(".")):
            tree = {part: tree} if part and part != "_global_" else tree
        layers.append(Layer(_where(result, name), tree))
    return layers


def store_presets(presets: Sequence[tuple[str, str, dict[str, Any], str]]) -> None:
    """Offer (group, name, tree, file) as presets, beside the files of the search path; earlier ones are forgotten."""
    store = ConfigStore.instance()
    for group, name in _stored:
        del store.repo[group][f"{name}.yaml"]
    _stored.clear()
    for group, name, tree, file in presets:
        store.store(group=group, name=name, node=tree, provider=f"plugin {file}")
        _stored.append((group, name))


def resolve_hydra_of(config: DictConfig) -> None:
    """Make ``${hydra:...}`` interpolations of this config work."""
    HydraConfig.instance().set_config(config)


def preset_path(name: str) -> Path:
    """File of a built-in preset, as in ``preset_path("model/gpt_tiny")``."""
    return Path(str(importlib.resources.files(PACKAGE).joinpath(f"{name}.yaml")))


def _where(result: ConfigResult, name: str) -> str:
    if result.path.startswith("pkg://"):
        return shown(preset_path(name))
    if result.path.startswith("file://"):
        path = Path(result.path.removeprefix("file://"), name)
        return shown(path if path.suffix else path.with_suffix(".yaml"))
    return result.provider
