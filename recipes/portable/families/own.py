"""Models that transformers does not have (DHEN, DeepViT, a plugin's): our names, and our own ``config.json``."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from recipes.portable.families.family import Family, Place, Shapes, SpecialIds
from recipes.schema.model import ModelConfig

MODEL_TYPE = "fsdp_launcher"


class Own(Family):
    """The folder starts another of our runs (``model.init_from``); transformers has no class for it."""

    note = "transformers has no class for this model: its folder has our names and our config, for model.init_from"

    def __init__(self, model: ModelConfig) -> None:
        self._model = model

    def place(self, name: str) -> Place:
        return Place(name)

    def config(self, shapes: Shapes, special: SpecialIds) -> dict[str, Any]:
        return {"model_type": MODEL_TYPE, "model": dataclasses.asdict(self._model) | {"init_from": None}}

    def differences(self, config: Mapping[str, Any]) -> list[tuple[str, object, object]]:
        kind = config.get("model_type", MODEL_TYPE)
        if kind != MODEL_TYPE:
            return [("model.kind", f"model_type {kind}", self._model.kind)]
        theirs = (config.get("model") or {}).get("kind", self._model.kind)
        return [] if theirs == self._model.kind else [("model.kind", theirs, self._model.kind)]
