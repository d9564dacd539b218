"""Rules about a model's own sizes, and about the sizes that model and data must share."""

from __future__ import annotations

from collections.abc import Iterator

from launcher.check.about import About
from launcher.check.rules.rule import Rules
from launcher.errors import Problem
from launcher.schema import Config
from recipes.registry import MODELS
from recipes.schema.data import TextDataConfig
from recipes.schema.derived import divisors
from recipes.schema.model import DeepViTConfig, DHENConfig, GPTConfig, RegNetConfig
from recipes.sizes import ExpectedFacts, expected_facts, longest_sequence

RULES = Rules()
INTERACTIONS = ("advanced_dlrm", "dcn_low_rank")


@RULES.reading("model")
def gpt(config: Config, about: About) -> Iterator[Problem]:
    model = config.model
    if isinstance(model, GPTConfig) and model.hidden_size % model.num_heads:
        below = max(heads for heads in divisors(model.hidden_size) if heads < model.num_heads)
        above = -(-model.hidden_size // model.num_heads) * model.num_heads
        yield about.problem(
            "model.num_heads",
            f"the heads do not divide the width {model.hidden_size}",
            got=model.num_heads,
            expected="a divisor of model.hidden_size",
            remedy=f"model.num_heads={below}, or model.hidden_size={above}",
            also=("model.hidden_size",),
        )


@RULES.reading("model")
def dhen(config: Config, about: About) -> Iterator[Problem]:
    model = config.model
    if not isinstance(model, DHENConfig):
        return
    unknown = [name for name in model.modules if name not in INTERACTIONS]
    if unknown or not 1 <= len(model.modules) <= model.num_tokens:
        yield about.problem(
            "model.modules",
            f"unknown interaction modules: {', '.join(unknown)}" if unknown else "each module gives at least one token",
            got=model.modules,
            expected=f"1 to model.num_tokens = {model.num_tokens} names, each of {', '.join(INTERACTIONS)}",
            remedy="'model.modules=[advanced_dlrm,dcn_low_rank]'",
        )
    if (model.num_tables is None) != (model.rows_per_table is None):
        yield about.problem(
            "model.num_tables",
            "model.num_tables and model.rows_per_table go together",
            got=model.num_tables if model.num_tables is not None else "null",
            remedy="set both, or neither",
            also=("model.rows_per_table",),
        )
    elif model.table_rows is not None and model.num_tables is not None:
        yield about.problem(
            "model.table_rows",
            "the tables are said twice",
            got=model.table_rows,
            expected="model.table_rows, or model.num_tables with model.rows_per_table",
            remedy="set the others to null",
            also=("model.num_tables", "model.rows_per_table"),
        )


@RULES.reading("model")
def regnet(config: Config, about: About) -> Iterator[Problem]:
    model = config.model
    if not isinstance(model, RegNetConfig):
        return
    if len(model.depths) != len(model.hidden_sizes) or not model.depths:
        yield about.problem(
            "model.depths",
            f"{len(model.depths)} stages by depth, {len(model.hidden_sizes)} by channels",
            got=model.depths,
            expected="as many numbers as model.hidden_sizes has, at least one",
            remedy="'model.depths=[1,1,1,1]' with four hidden_sizes",
            also=("model.hidden_sizes",),
        )
    uneven = [channels for channels in model.hidden_sizes if channels % model.groups_width]
    if uneven:
        yield about.problem(
            "model.groups_width",
            f"a group's width does not divide the channels {', '.join(map(str, uneven))}",
            got=model.groups_width,
            expected="a divisor of each of model.hidden_sizes",
            remedy="change model.groups_width or model.hidden_sizes",
            also=("model.hidden_sizes",),
        )


@RULES.reading("model")
def deepvit(config: Config, about: About) -> Iterator[Problem]:
    model = config.model
    if isinstance(model, DeepViTConfig) and model.image_size % model.patch_size:
        yield about.problem(
            "model.patch_size",
            f"the patches do not tile an image of {model.image_size} pixels",
            got=model.patch_size,
            expected="a divisor of model.image_size",
            remedy=f"model.image_size={-(-model.image_size // model.patch_size) * model.patch_size}",
            also=("model.image_size",),
        )


@RULES.reading("model", "sharding.units")
def plugin_units(config: Config, about: About) -> Iterator[Problem]:
    """A plugin's model need not name its blocks; then units must be found in another way."""
    entry = MODELS[config.model.kind]
    if entry.functions is not None and config.sharding.units == "blocks" and "unit_classes" not in entry.functions:
        yield about.problem(
            "sharding.units",
            f"the model '{entry.name}' does not name its blocks",
            got="blocks",
            expected="size or root, or a static function unit_classes() of the model that returns the blocks' classes",
            remedy="sharding.units=size sharding.min_unit_numel=100_000",
        )


@RULES.reading("model", "data")
def sequence_length(config: Config, about: About) -> Iterator[Problem]:
    longest = longest_sequence(config.model)
    if not isinstance(config.data, TextDataConfig) or config.data.seq_len is None or longest is None:
        return
    if config.data.seq_len > longest:
        yield about.problem(
            "data.seq_len",
            f"samples are longer than the model's {longest} positions",
            got=config.data.seq_len,
            expected=f"at most model.max_seq_len = {longest}",
            remedy=f"data.seq_len={longest}, or model.max_seq_len={config.data.seq_len}",
            also=("model.max_seq_len",),
        )


@RULES.reading("model", "data")
def vocabulary(config: Config, about: About) -> Iterator[Problem]:
    facts = _facts(config)
    size = getattr(config.model, "vocab_size", None)
    if size is not None and facts.vocab_size is not None and size < facts.vocab_size:
        yield about.problem(
            "model.vocab_size",
            f"the tokenizer gives {facts.vocab_size} different tokens",
            got=size,
            expected=f"at least {facts.vocab_size}, or null for the tokenizer's",
            remedy="model.vocab_size=null",
            also=("data.tokenizer.kind", "data.tokenizer.vocab_size"),
        )


@RULES.reading("model", "data")
def click_features(config: Config, about: About) -> Iterator[Problem]:
    """The model's columns and tables against the data's, where both are numbers in the config."""
    model, facts = config.model, _facts(config)
    if not isinstance(model, DHENConfig) or facts.table_rows is None:
        return
    if model.num_dense is not None and model.num_dense != facts.num_dense:
        yield about.problem(
            "model.num_dense",
            f"the data has {facts.num_dense} dense features",
            got=model.num_dense,
            remedy="model.num_dense=null takes the data's",
            also=("data.num_dense",),
        )
    if model.table_rows is not None:
        key, rows = "model.table_rows", tuple(model.table_rows)
    elif model.num_tables is not None and model.rows_per_table is not None:
        key, rows = "model.num_tables", (model.rows_per_table,) * model.num_tables
    else:
        return
    if len(rows) != len(facts.table_rows):
        yield about.problem(
            key,
            f"{len(rows)} embedding tables for {len(facts.table_rows)} categorical features",
            got=len(rows),
            remedy=f"{key}=null takes the data's",
            also=("data.num_tables",),
        )
    elif any(have < need for have, need in zip(rows, facts.table_rows, strict=True)):
        yield about.problem(
            key,
            f"tables are shorter than the {max(facts.table_rows)} values of the data's features",
            got=min(rows),
            remedy=f"{key}=null takes the data's",
            also=("data.rows_per_table",),
        )


@RULES.reading("model", "data")
def images(config: Config, about: About) -> Iterator[Problem]:
    facts = _facts(config)
    wanted = getattr(config.model, "image_size", None)
    classes = getattr(config.model, "num_classes", None)
    if isinstance(config.model, DeepViTConfig) and facts.image_size not in (None, wanted):
        yield about.problem(
            "data.image_size",
            f"the model takes images of {wanted} pixels a side",
            got=facts.image_size,
            remedy="data.image_size=null takes the model's",
            also=("model.image_size",),
        )
    if classes is not None and facts.num_classes is not None and classes < facts.num_classes:
        yield about.problem(
            "model.num_classes",
            f"the data has {facts.num_classes} classes",
            got=classes,
            expected=f"at least {facts.num_classes}, or null for the data's",
            remedy="model.num_classes=null",
            also=("data.num_classes",),
        )


def _facts(config: Config) -> ExpectedFacts:
    return expected_facts(config.model, config.data)
