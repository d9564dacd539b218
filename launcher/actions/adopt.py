"""What a checkpoint knows about itself need not be typed again: model, data and precision of the run that saved it.

``action=eval``, ``generate`` and ``export`` take these groups from the checkpoint's config; what is typed for the data,
for ``train`` or for the precision wins over it. Where and on how many ranks they run is the command line's alone.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from launcher.actions.which import chosen
from launcher.compose import Composed
from launcher.errors import ConfigErrors, Problem
from launcher.sources import Layer
from recipes.checkpoint.errors import CheckpointError
from recipes.checkpoint.manifest import MANIFEST, Manifest, read_manifest

ON_A_CHECKPOINT = ("eval", "generate", "export")
_FROM_MODEL_FOLDER = ("eval", "generate")  # model.init_from serves as well
_GROUPS = ("model", "data", "train", "precision")
_RUN_KEYS = ("seed", "deterministic")
# Of a model these may be typed: they change nothing of what was saved.
_FREE = ("dropout", "kernels", "use_cache", "provenance", "init_from")


def adopt(composed: Composed) -> Composed:
    """The config as the action wants it: ``checkpoint.resume`` names the one checkpoint that was chosen.

    Raises:
        ConfigErrors: there is no such checkpoint, or the typed model is another than the checkpoint's.
    """
    tree = composed.tree
    resume, run_dir = _value(tree, "checkpoint", "resume"), _value(tree, "run", "dir")
    if tree.get("action") not in ON_A_CHECKPOINT or composed.problems or not isinstance(resume, str):
        return composed  # the checker has its say
    init_from = _value(tree, "model", "init_from")
    if tree["action"] in _FROM_MODEL_FOLDER and init_from is not None and resume in ("auto", "never"):
        return composed
    found = chosen(resume, run_dir if isinstance(run_dir, str) else None)
    try:
        manifest = read_manifest(found.path)
    except CheckpointError as error:
        raise ConfigErrors([Problem(str(error), "checkpoint.resume", resume)]) from None
    problems = list(_other_model(composed, manifest.config))
    if problems:
        raise ConfigErrors(problems)
    adopted = _merged(composed, manifest)
    adopted["checkpoint"]["resume"] = str(found.path)
    layer = Layer(str(found.path / MANIFEST), {name: manifest.config.get(name, {}) for name in _GROUPS})
    return replace(composed, tree=adopted, as_composed=adopted, sources=composed.sources.under(layer))


def _merged(composed: Composed, manifest: Manifest) -> dict[str, Any]:
    tree, saved = copy.deepcopy(composed.tree), copy.deepcopy(manifest.config)
    for group in _GROUPS:
        if group in saved and not (group != "model" and _is_group_typed(composed, group)):
            tree[group] = saved[group] | {name: tree[group][name] for name in _typed_keys(composed, group, tree[group])}
    for name in _RUN_KEYS:
        if not composed.sources.is_typed(f"run.{name}"):
            tree["run"][name] = saved["run"][name]
    tree["model"]["init_from"] = None
    train = tree["train"]
    if train.get("micro_batch") is None:  # forwards of the size that the run had, on any number of ranks
        train["micro_batch"] = max(1, int(train["global_batch"]) // manifest.world_size)
    return tree


def _other_model(composed: Composed, saved: dict[str, Any]) -> Iterator[Problem]:
    """Typed keys of the model that say something else than the checkpoint."""
    ours, theirs = composed.tree["model"], saved.get("model", {})
    typed = list(ours) if _is_group_typed(composed, "model") else _typed_keys(composed, "model", ours)
    for name in typed:
        if name not in _FREE and ours[name] != theirs.get(name):
            yield Problem(
                "the checkpoint holds another model",
                f"model.{name}",
                str(ours[name]),
                composed.sources.of(f"model.{name}"),
                f"{theirs.get(name)}, as in the checkpoint",
                "leave the model out: the checkpoint knows it; or name another checkpoint",
            )


def _is_group_typed(composed: Composed, group: str) -> bool:
    """``data=flights``, in contrast to ``data.seq_len=64``."""
    return any(word.partition("=")[0].lstrip("+") == group for word in composed.overrides)


def _typed_keys(composed: Composed, group: str, tree: dict[str, Any]) -> list[str]:
    """Names directly below ``group`` that an argument sets, or sets something below."""
    return [name for name in tree if composed.sources.is_typed(f"{group}.{name}")]


def _value(tree: dict[str, Any], group: str, name: str) -> Any:
    return tree[group].get(name) if isinstance(tree.get(group), dict) else None
