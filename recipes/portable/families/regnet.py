"""Our RegNet is transformers' own ``RegNetForImageClassification``: the same names and shapes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from recipes.portable.families.family import Family, Place, Shapes, SpecialIds, size_differences
from recipes.schema.model import RegNetConfig

_SIZES = {name: name for name in ("hidden_sizes", "depths", "groups_width", "layer_type", "embedding_size")}


class RegNet(Family):
    """See the module's docstring."""

    def __init__(self, model: RegNetConfig) -> None:
        self._model = model

    def place(self, name: str) -> Place:
        return Place(name)

    def config(self, shapes: Shapes, special: SpecialIds) -> dict[str, Any]:
        num_classes = shapes["classifier.1.weight"][0]
        return {
            "architectures": ["RegNetForImageClassification"],
            "model_type": "regnet",
            "num_channels": 3,
            **{name: getattr(self._model, name) for name in _SIZES},
            "id2label": {str(label): f"LABEL_{label}" for label in range(num_classes)},
            "label2id": {f"LABEL_{label}": label for label in range(num_classes)},
        }

    def differences(self, config: Mapping[str, Any]) -> list[tuple[str, object, object]]:
        kind = config.get("model_type", "regnet")
        if kind != "regnet":
            return [("model.kind", f"model_type {kind}", "regnet")]
        return size_differences(config, self._model, _SIZES)
