"""What is composed from good arguments: presets, overrides, the user's files, joined ranks, plugins, and back."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from launcher.check.reader import KINDS
from launcher.errors import ConfigErrors
from launcher.hydra_loader import preset_path
from launcher.plugins import unload_plugins
from launcher.resolved import from_yaml, to_yaml
from launcher.schema import Config
from recipes.schema.data import TextFilesConfig
from recipes.schema.derived import (
    divisors,
    micro_batch,
    num_micro_batches,
    replicate_groups,
    shard_groups,
    sharding_factor,
)
from recipes.schema.engine import ShardingConfig
from recipes.schema.model import DHENConfig, GPTConfig, T5Config
from recipes.schema.training import SGDConfig, TrainConfig
from tests.launcher.conftest import Command

ROOT = Path(__file__).parents[2]
PRESETS = sorted(path.relative_to(ROOT / "configs") for path in (ROOT / "configs").rglob("*.yaml"))
NEED_DATA = {"deepvit": "synthetic_images", "regnet": "synthetic_images", "dhen": "synthetic_clicks"}


def _group_and_name(preset: Path) -> tuple[str, str]:
    """``("experiment", "paper/fig7b")``; the primary config has no group."""
    first, _, rest = preset.with_suffix("").as_posix().partition("/")
    return (first, rest) if rest else ("", first)


def config_of(command: Command, *arguments: str) -> Config:
    """The config that these arguments would launch."""
    said = command(*arguments)
    assert said.code == 0, said.err
    assert said.launched is not None
    return said.launched[0]


def test_the_default_run(command: Command) -> None:
    config = config_of(command)
    assert isinstance(config.model, GPTConfig)
    assert (config.model.num_layers, config.model.hidden_size, config.model.num_heads) == (4, 128, 4)
    assert config.data.kind == "stdlib_text"
    assert (config.cluster.kind, config.cluster.num_nodes, config.cluster.nproc_per_node) == ("local", 1, 2)
    assert sharding_factor(config.sharding, 2, 2) == 2
    assert config.sharding.reshard_after_forward
    assert config.precision.param_dtype == "float32"
    assert config.logger.jsonl is not None
    assert config.logger.wandb is None


def test_what_the_process_side_gets(command: Command) -> None:
    said = command("model=t5_tiny", "train.steps=7", "logger=[jsonl,wandb]")
    assert said.launched is not None
    config, request = said.launched
    assert request.overrides == ("model=t5_tiny", "train.steps=7", "logger=[jsonl,wandb]")
    assert request.command[1:] == request.overrides
    assert request.choices["model"] == "t5_tiny"
    assert request.choices["logger"] == "jsonl,wandb"
    assert "experiment" not in request.choices
    assert yaml.safe_load(request.config_yaml)["train"]["steps"] == 7
    assert config.train.steps == 7


@pytest.mark.parametrize(
    ("arguments", "key", "value"),
    [
        (["train.steps=1e3"], "train.steps", 1000),
        (["train.steps=1_000"], "train.steps", 1000),
        (["+train.steps=5"], "train.steps", 5),
        (["++train.steps=5"], "train.steps", 5),
        (["train.steps=5", "train.steps=6"], "train.steps", 6),
        (["train.micro_batch=2"], "train.micro_batch", 2),
        (["train.clip_norm=null"], "train.clip_norm", None),
        (["train.profile_steps=[3,6]"], "train.profile_steps", [3, 6]),
        (["sharding.reshard_after_forward=off"], "sharding.reshard_after_forward", False),
        (["optimizer.lr=3e-4"], "optimizer.lr", 3e-4),
        (["run.name=1e3"], "run.name", "1e3"),
        (["run.name=007"], "run.name", "007"),
        (["run.name=a b"], "run.name", "a b"),
        (["run.name='a=b'"], "run.name", "a=b"),
        (["cluster.time_limit=24:00:00"], "cluster.time_limit", "1-00:00:00"),
        (["cluster.time_limit=90"], "cluster.time_limit", "00:01:30"),
        (["cluster.env.NCCL_DEBUG=INFO", "cluster.env.X=1"], "cluster.env", {"NCCL_DEBUG": "INFO", "X": "1"}),
        (["cluster.env={A:b}"], "cluster.env", {"A": "b"}),
        (["train.micro_batch=${train.log_every}", "train.log_every=4"], "train.micro_batch", 4),
        (["sharding=full_nraf"], "sharding.reshard_after_forward", False),
        (["rate_limiter=unlimited"], "rate_limiter.kind", "unlimited"),
        (["rate_limiter=adaptive"], "rate_limiter.kind", "adaptive"),
        (["+experiment=hybrid_two_hosts"], "sharding.factor", 2),
        (["experiment=hybrid_two_hosts", "sharding.factor=4"], "sharding.factor", 4),
        (["experiment=denoise_text", "model=gpt_tiny"], "model.kind", "gpt"),
        (["precision=fp16"], "precision.grad_scaler", True),
        (["data.tokenizer.kind=train", "data.tokenizer.vocab_size=1e3"], "data.tokenizer.vocab_size", 1000),
    ],
    ids=lambda case: " ".join(case) if isinstance(case, list) and case and isinstance(case[0], str) else None,
)
def test_overrides(command: Command, arguments: list[str], key: str, value: Any) -> None:
    node: Any = config_of(command, *arguments)
    for part in key.split("."):
        node = getattr(node, part)
    assert node == value
    assert type(node) is type(value)


def test_kinds_have_their_own_dataclass(command: Command, tmp_path: Path) -> None:
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "a.txt").write_text("some text")
    config = config_of(command, "model=t5_tiny", "data=text_files", "data.path=corpus", "optimizer=sgd")
    assert type(config.model) is T5Config
    assert type(config.data) is TextFilesConfig
    assert type(config.optimizer) is SGDConfig


def test_variables_of_the_environment(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEPS", "1e2")
    assert config_of(command, "train.steps=${oc.env:STEPS}").train.steps == 100


@pytest.mark.parametrize("preset", PRESETS, ids=str)
def test_every_preset_passes_the_check(command: Command, tmp_path: Path, preset: Path) -> None:
    """Alone, or with the data it needs; what a later version brings says so."""
    (tmp_path / "corpus" / "a").mkdir(parents=True)
    (tmp_path / "corpus" / "b").mkdir()
    (tmp_path / "corpus" / "a.txt").write_text("some text")
    group, name = _group_and_name(preset)
    arguments = ["action=check"] + ([f"{group}={name}"] if group else [])
    tree = yaml.safe_load((ROOT / "configs" / preset).read_text())
    if group == "model" and (data := NEED_DATA.get(tree["kind"])):
        arguments.append(f"data={data}")
    if name == "dhen_paper":
        arguments += ["data.num_dense=2048", "data.num_tables=600", "data.rows_per_table=10_000_000"]
    if group == "data":
        models = {"clicks": "dhen_tiny", "images": "regnet_tiny", "flights": "dhen_tiny", "criteo": "dhen_tiny"}
        arguments += [f"model={model}" for word, model in models.items() if word in name or name == "image_folder"][:1]
    if name == "image_folder":
        arguments[-1] = "model=regnet_tiny"
    if tree.get("path") == "???" or name == "gpt_125m_one_host":
        arguments.append("data.path=corpus")
    if group == "sharding" and name.startswith("hybrid"):
        arguments += ["cluster.nproc_per_node=4", "sharding.factor=2"]
    said = command(*arguments)
    assert said.code == 0, said.err
    assert said.out.endswith("ok\n")
    if group == "model":
        assert " parameters" in said.out


@pytest.mark.parametrize(
    "preset", [path for path in PRESETS if _group_and_name(path)[0] not in ("", "experiment", "cluster")], ids=str
)
def test_the_command_of_a_preset_uses_it(preset: Path) -> None:
    command = (ROOT / "configs" / preset).read_text().splitlines()[1]
    group = preset.parent.name
    assert f"{group}=" in command or f"{group}." in command or "experiment=" in command or group in ("sweep", "run")


def test_presets_of_ones_own(command: Command, tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    (mine / "model").mkdir(parents=True)
    (mine / "experiment").mkdir()
    (mine / "model" / "gpt_small.yaml").write_text("defaults: [gpt_tiny]\nnum_layers: 2\n")
    (mine / "experiment" / "quick.yaml").write_text(
        "# @package _global_\ndefaults:\n  - override /model: gpt_small\ntrain:\n  steps: 3\n"
    )
    config = config_of(command, "--config-dir", "mine", "experiment=quick")
    assert (config.model.num_layers, config.model.hidden_size, config.train.steps) == (2, 128, 3)
    (mine / "model" / "more").mkdir()
    (mine / "model" / "more" / "deep.yaml").write_text(
        "# @package model\n{kind: gpt, num_layers: 9, num_heads: 1, hidden_size: 8, max_seq_len: 64}\n"
    )
    assert config_of(command, "--config-dir", "mine", "model=more/deep").model.num_layers == 9
    assert "there is no config 'model/more/dee'" in command("--config-dir", "mine", "model=more/dee").err
    listed = command("--config-dir", "mine", "--help").out
    assert "gpt_small" in listed
    assert "quick" in listed


def test_a_primary_config_of_ones_own(command: Command, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "mine.yaml").write_text("defaults: [config, _self_]\ntrain:\n  steps: 4\n")
    config = config_of(command, "--config-dir=mine", "--config-name", "mine.yaml", "model=t5_tiny")
    assert (config.train.steps, config.model.kind) == (4, "t5")


def test_another_folder_by_hydras_search_path(command: Command, tmp_path: Path) -> None:
    (tmp_path / "mine" / "train").mkdir(parents=True)
    (tmp_path / "mine" / "train" / "short.yaml").write_text("steps: 2\nglobal_batch: 4\n")
    assert config_of(command, f"hydra.searchpath=[file://{tmp_path}/mine]", "train=short").train.steps == 2


def test_a_stored_config_can_be_run_again(command: Command, tmp_path: Path) -> None:
    """config.yaml of a run folder, under another name, is a primary config like any other."""
    said = command("model=t5_tiny", "sharding.factor=1", "logger=[jsonl,tensorboard]", "cluster.time_limit=60")
    assert said.launched is not None
    first, request = said.launched
    (tmp_path / "again.yaml").write_text(request.config_yaml)
    assert config_of(command, "--config-dir", ".", "--config-name", "again") == first
    changed = config_of(command, "--config-dir", ".", "--config-name", "again", "train.steps=9")
    assert changed.train.steps == 9


def test_ranks_that_exist_decide_the_world(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    config = config_of(command, "sharding=hybrid")
    assert (config.cluster.kind, config.cluster.num_nodes, config.cluster.nproc_per_node) == ("torchrun", 2, 4)
    assert sharding_factor(config.sharding, 8, 4) == 4
    assert config_of(command, "cluster.nproc_per_node=4").cluster.num_nodes == 2
    said = command("cluster.nproc_per_node=2")
    assert said.code == 2
    assert "the ranks that exist are others than asked for" in said.err
    said = command("sharding.factor=3")
    assert "cluster.nproc_per_node from environment: WORLD_SIZE=8 LOCAL_WORLD_SIZE=4" in said.err


def test_the_stored_config_reads_back_the_same(command: Command, tmp_path: Path) -> None:
    config = config_of(
        command, "model=dhen_tiny", "data=synthetic_clicks", "cluster.env.A=1", "run.name=1e3", "cluster.time_limit=60"
    )
    path = tmp_path / "config.yaml"
    path.write_text(to_yaml(config))
    assert from_yaml(path) == config
    assert isinstance(config.model, DHENConfig)
    # Every key of the schema is in the file, code is not.
    tree = yaml.safe_load(path.read_text())
    assert set(tree) == {field.name for field in dataclasses.fields(Config)} - {"plugins"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("train: {stepz: 1}\n", "train.stepz: there is no such key"),
        ("[1]\n", "no map of keys"),
        ("a: [\n", "cannot be read"),
        ("plugins: [evil.py]\n", "plugins are named on the command line only"),
    ],
)
def test_a_stored_config_is_checked_again(tmp_path: Path, text: str, expected: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    with pytest.raises(ConfigErrors, match=expected):
        from_yaml(path)
    with pytest.raises(ConfigErrors, match="cannot be read"):
        from_yaml(tmp_path / "nothing.yaml")


def test_the_config_can_be_shown(command: Command) -> None:
    shown = command("--cfg", "job", "train.micro_batch=${train.log_every}", "train.log_every=4")
    assert yaml.safe_load(shown.out)["train"]["micro_batch"] == "${train.log_every}"
    resolved = command("--cfg", "job", "--resolve", "train.micro_batch=${train.log_every}", "train.log_every=4")
    assert yaml.safe_load(resolved.out)["train"]["micro_batch"] == 4
    assert yaml.safe_load(resolved.out)["train"]["early_stop"] == {"patience": None, "min_delta": 0.0}
    part = command("--cfg", "job", "-p", "rate_limiter")
    assert yaml.safe_load(part.out) == {"kind": "fixed", "max_inflight": 2}
    one = command("--cfg", "job", "-p", "rate_limiter.max_inflight")
    assert one.out == "# @package rate_limiter.max_inflight\n2\n"
    wrong = command("--cfg", "job", "train.stepz=3")
    assert wrong.code == 2
    assert yaml.safe_load(wrong.out)["train"]["stepz"] == 3
    assert "did you mean train.steps?" in wrong.err
    assert command("--cfg", "job", "-p", "nothing").code == 2


@pytest.mark.parametrize("what", ["defaults", "defaults-tree", "config", "plugins", "searchpath"])
def test_hydra_tells_what_it_composed(tmp_path: Path, what: str) -> None:
    """As a process: Hydra sets logging up for it."""
    done = subprocess.run(
        [sys.executable, "-m", "launcher", "--info", what, "model=t5_tiny"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "PATH": ""},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert {"plugins": "BasicSweeper", "searchpath": "pkg://configs"}.get(what, "model") in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_the_example_plugin(command: Command, tmp_path: Path) -> None:
    (tmp_path / "my_model.py").write_text((ROOT / "examples" / "my_model.py").read_text())
    config = config_of(command, "plugins=[./my_model.py]", "model=my_model", "model.hidden_size=64")
    assert (config.model.kind, config.model.hidden_size) == ("my_model", 64)  # type: ignore[attr-defined]
    assert config.plugins == [str(tmp_path / "my_model.py")]
    shown = command("plugins=[./my_model.py]", "--cfg", "job", "--resolve", "-p", "plugins").out
    assert yaml.safe_load(shown) == config.plugins
    wrong = command("plugins=[./my_model.py]", "model=my_model", "model.hidden_sizes=64", "model.kernel_size=0")
    assert "did you mean model.hidden_size" in wrong.err
    assert "a whole number, at least 1 (tokens that one convolution sees, itself included)" in wrong.err
    checked = command("plugins=[./my_model.py]", "model=my_model", "action=check")
    assert "a plugin's: counted when it is built" in checked.out


def test_a_stored_config_of_a_plugin_needs_the_plugin(command: Command, tmp_path: Path) -> None:
    (tmp_path / "my_model.py").write_text((ROOT / "examples" / "my_model.py").read_text())
    said = command("plugins=[./my_model.py]", "model=my_model")
    assert said.launched is not None
    config, request = said.launched
    (tmp_path / "config.yaml").write_text(request.config_yaml)
    unload_plugins()
    with pytest.raises(ConfigErrors, match="there is no model kind of this name"):
        from_yaml(tmp_path / "config.yaml")
    assert from_yaml(tmp_path / "config.yaml", [tmp_path / "my_model.py"]).model.kind == config.model.kind


def test_a_plugins_own_checks_are_told(command: Command, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from dataclasses import dataclass, field\n"
        "from recipes.registry import register_model\n"
        "from recipes.schema.model import ModelConfig\n"
        "@dataclass\n"
        "class Inner:\n"
        "    depth: int = 1\n"
        "@dataclass\n"
        "class Mine(ModelConfig):\n"
        "    width: int = 7\n"
        "    names: list[str] = field(default_factory=list)\n"
        "    inner: Inner = field(default_factory=Inner)\n"
        "    def __post_init__(self):\n"
        "        if self.width % 2 == 0: raise ValueError('width must be odd')\n"
        "@register_model('mine', Mine, 'causal_lm')\n"
        "class Model:\n"
        "    build = staticmethod(lambda config, info: None)\n"
        "    unit_classes = staticmethod(lambda: ())\n"
    )
    config: Any = config_of(command, "plugins=[mine.py]", "model=mine", "model.inner.depth=3", "model.names=[a]")
    assert (config.model.width, config.model.inner.depth, config.model.names) == (7, 3, ["a"])
    said = command("plugins=[mine.py]", "model=mine", "model.width=8")
    assert said.code == 2
    assert "model: Mine refuses these values: width must be odd" in said.err
    assert (
        "model.inner.dept: there is no such key" in command("plugins=[mine.py]", "model=mine", "model.inner.dept=1").err
    )


def test_a_sweep_is_checked_as_a_table(command: Command) -> None:
    said = command("-m", "action=check", "cluster.nproc_per_node=4", "sharding.factor=1,2", "model=gpt_tiny,t5_tiny")
    assert said.code == 0, said.err
    rows = [line.split() for line in said.out.splitlines()]
    assert rows[0][:5] == ["job", "sharding.factor", "model", "W", "F"]
    assert [row[:5] for row in rows[1:5]] == [
        ["0", "1", "gpt_tiny", "4", "1"],
        ["1", "1", "t5_tiny", "4", "1"],
        ["2", "2", "gpt_tiny", "4", "2"],
        ["3", "2", "t5_tiny", "4", "2"],
    ]
    assert rows[-1] == ["ok:", "4", "jobs"]
    assert command("-m", "action=check", "sharding=glob(full*)").out.endswith("ok: 2 jobs\n")


def test_numbers_that_follow_from_the_config() -> None:
    assert shard_groups(4, 2) == [[0, 1], [2, 3]]
    assert replicate_groups(4, 2) == [[0, 2], [1, 3]]
    assert shard_groups(4, 4) == [[0, 1, 2, 3]]
    assert replicate_groups(4, 1) == [[0, 1, 2, 3]]
    assert [sharding_factor(ShardingConfig(default_factor=name), 8, 4) for name in ("world", "host", "one")] == [
        8,
        4,
        1,
    ]
    assert sharding_factor(ShardingConfig(factor=2), 8, 4) == 2
    assert divisors(12) == [1, 2, 3, 4, 6, 12]
    assert divisors(49) == [1, 7, 49]
    assert divisors(1) == [1]
    train = TrainConfig(steps=1, global_batch=24, micro_batch=3)
    assert (micro_batch(train, 4), num_micro_batches(train, 4)) == (3, 2)
    train = TrainConfig(steps=1, global_batch=24)
    assert (micro_batch(train, 4), num_micro_batches(train, 4)) == (6, 1)


def test_presets_lie_in_the_package() -> None:
    assert preset_path("model/gpt_tiny").is_file()


@pytest.mark.parametrize("group", ["model", "data", "optimizer"])
def test_every_kind_has_a_preset(group: str) -> None:
    kinds = {yaml.safe_load(file.read_text()).get("kind") for file in (ROOT / "configs" / group).glob("*.yaml")}
    ours = {name for name in KINDS[group].names() if KINDS[group].get(name).config.__module__.startswith("recipes.")}
    assert kinds == ours  # other tests may have registered kinds of their own
