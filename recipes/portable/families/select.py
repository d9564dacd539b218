"""The family of a model, by its config."""

from __future__ import annotations

from recipes.portable.families.family import Family
from recipes.portable.families.gpt2 import GPT2
from recipes.portable.families.own import Own
from recipes.portable.families.regnet import RegNet
from recipes.portable.families.t5 import T5
from recipes.schema.model import GPTConfig, ModelConfig, RegNetConfig, T5Config

_FAMILIES: dict[type[ModelConfig], type] = {GPTConfig: GPT2, T5Config: T5, RegNetConfig: RegNet}


def family_of(model: ModelConfig) -> Family:
    family: Family = _FAMILIES.get(type(model), Own)(model)
    return family
