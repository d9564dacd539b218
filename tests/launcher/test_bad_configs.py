"""What users get wrong: a clear message, exit code 2, no traceback, nothing started, no folder left behind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from launcher import cli
from tests.launcher.conftest import Command

# id -> (arguments, what the message must hold). {tmp} is the folder of the command.
UNKNOWN = {
    "misspelt key": (["train.stepz=3"], ["train.stepz: there is no such key", "did you mean train.steps?"]),
    "misspelt key, added": (["+train.stepz=3"], ["train.stepz", "did you mean train.steps?", "+train.stepz=3"]),
    "misspelt key, forced": (["++train.stepz=3"], ["train.stepz", "did you mean train.steps?", "++train.stepz=3"]),
    "key of another group": (["train.lr=1e-3"], ["did you mean optimizer.lr?"]),
    "misspelt group's name": (["modle=t5_tiny"], ["modle: there is no such key", "did you mean model=...?"]),
    "one of a list of files": (["plugins.0=./x.py"], ["one list of files", "plugins='[./x.py]'"]),
    "home in a list": (["plugins=[~/x.py]"], ["does not expand ~", 'plugins="[$HOME/x.py]"']),
    "misspelt group": (["shardin.factor=2"], ["did you mean sharding.factor"]),
    "unknown top level": (["+foo.bar.baz=1"], ["foo.bar.baz: there is no such key", "expected: one of action"]),
    "key of another kind": (["model.d_model=64"], ["for model kind gpt", "it belongs to t5"]),
    "key below a value": (["train.steps.more=3"], ["train.steps"]),
    "misspelt preset": (["model=gpt_tny"], ["there is no preset 'gpt_tny'", "did you mean model=gpt_tiny"]),
    "preset of another group": (["data=gpt_tiny"], ["there is no preset 'gpt_tiny'", "stdlib_text"]),
    "word of another tool": (["sharding=zero3"], ["did you mean sharding=full?"]),
    "limiter off": (["rate_limiter=off"], ["did you mean rate_limiter=unlimited?"]),
    "one bad of a list": (["logger=[jsonl,wandbb]"], ["there is no preset 'wandbb'", "logger=wandb"]),
    "number for a group": (["train=5"], ["there is no preset '5'", "train.KEY=5"]),
    "map for a group": (["train={steps:5}"], ["this is a group", "train.steps=VALUE"]),
    "unknown experiment": (["experiment=hybrid_two_host"], ["experiment=hybrid_two_hosts"]),
    "unknown kind": (["model.kind=gpd"], ["there is no model kind", "did you mean gpt?"]),
    "unknown action": (["action=chek"], ["did you mean check?"]),
    "logger key without the logger": (["logger.wandb.project=x"], ["not selected", "'logger=[jsonl,wandb]'"]),
}
TYPES = {
    "fraction for a count": (["train.steps=1.5"], ["a whole number", "it has a fraction"]),
    "word for a count": (
        ["train.steps=many"],
        ["train.steps", "a whole number, at least 1, at most 1e+12 (optimizer steps)"],
    ),
    "zero steps": (["train.steps=0"], ["a whole number, at least 1"]),
    "limiter of 0": (["rate_limiter.max_inflight=0"], ["at least 1", "rate_limiter=unlimited"]),
    "negative rate": (["optimizer.lr=-1e-3"], ["a number, above 0"]),
    "infinite rate": (["optimizer.lr=inf"], ["it is not finite"]),
    "number for a flag": (["sharding.reshard_after_forward=1"], ["true or false", "write true"]),
    "word for a flag": (["sharding.reshard_after_forward=perhaps"], ["true or false"]),
    "null for a count": (["train.steps=null"], ["null is not allowed here"]),
    "list for a count": (["train.steps=[1,2]"], ["train.steps", "a whole number"]),
    "value for a list": (["train.profile_steps=3"], ["'train.profile_steps=[3]'"]),
    "value for a list of names": (["optimizer.no_decay=bias"], ["a list, each text", "'optimizer.no_decay=[bias]'"]),
    "tuple for a list": (["optimizer.betas=(0.9,0.95)"], ["square brackets", "'optimizer.betas=[0.9,0.95]'"]),
    "tuple as text for a list": (['optimizer.betas="(0.9,0.95)"'], ["'optimizer.betas=[0.9,0.95]'"]),
    "steps without end": (["train.steps=1e30"], ["a whole number, at least 1, at most 1e+12"]),
    "value for keys": (["train.early_stop=3"], ["this is a group of keys", "train.early_stop.patience"]),
    "dtype by another name": (["precision.param_dtype=bf16"], ["did you mean bfloat16?"]),
    "dropout of 1": (["model.dropout=1"], ["below 1"]),
    "nothing after =": (["train.steps="], ["there is nothing after the =", "train.steps=VALUE"]),
    "missing value": (["data=text_files"], ["data.path: a value is needed", "data.path=VALUE"]),
    "hours as words": (["cluster.time_limit=tomorrow"], ["no time limit", "HH:MM:SS"]),
    "90 minutes of an hour": (["cluster.time_limit=1:90:00"], ["above 59"]),
}
FIELDS = {
    "F does not divide W": (["sharding.factor=3", "cluster.nproc_per_node=4"], ["F does not divide W = 4", "1, 2, 4"]),
    "F above W": (["sharding.factor=4"], ["F does not divide W = 2"]),
    "hybrid on one host": (["sharding=hybrid", "cluster.nproc_per_node=4"], ["needs F by name", "sharding.factor=2"]),
    "batch not shared": (
        ["train.global_batch=15"],
        ["a multiple of 2", "train.global_batch=14 or train.global_batch=16"],
    ),
    "micro-batches not shared": (["train.micro_batch=3", "train.global_batch=16"], ["3 x 2 = 6 does not divide 16"]),
    "fp16 without scaler": (["precision.param_dtype=float16"], ["loss scaler", "precision=fp16"]),
    "heads against width": (["model.num_heads=3"], ["the heads do not divide the width 128", "model.num_heads=2"]),
    "samples too long": (["data.seq_len=512"], ["128 positions", "model.max_seq_len=512"]),
    "vocabulary too small": (["model.vocab_size=100"], ["259 different tokens", "model.vocab_size=null"]),
    "more nodes than here": (["cluster.num_nodes=2"], ["more nodes than this machine", "torchrun --nnodes 2"]),
    "torchrun without ranks": (["cluster=torchrun"], ["RANK and WORLD_SIZE are not set", "cluster=local"]),
    "GPUs that are absent": (["cluster.device=cuda", "cluster.nproc_per_node=64"], ["64 GPUs are needed"]),
    "empty path": (["data=text_files", 'data.path=""'], ["data.path"]),
    "path that is not there": (["data=text_files", "data.path={tmp}/nowhere"], ["no such file or folder"]),
    "folder without text": (["data=text_files", "data.path={tmp}/empty"], ["no .txt, .md, .jsonl, .parquet files"]),
    "text for clicks": (
        ["model=dhen_tiny"],
        ["reads clicks, data kind stdlib_text gives text", "data=synthetic_clicks"],
    ),
    "clicks for text": (["data=synthetic_clicks"], ["reads text", "data=stdlib_text"]),
    "regnet groups": (["model=regnet_tiny", "data=synthetic_images", "model.groups_width=7"], ["does not divide"]),
    "regnet stages": (["model=regnet_tiny", "data=synthetic_images", "model.depths=[1,1]"], ["2 stages by depth"]),
    "patches": (
        ["model=deepvit_tiny", "data=synthetic_images", "model.patch_size=5"],
        ["do not tile", "image_size=35"],
    ),
    "image size": (["model=deepvit_tiny", "data=synthetic_images", "data.image_size=64"], ["32 pixels a side"]),
    "classes": (["model=regnet_tiny", "data=synthetic_images", "model.num_classes=3"], ["10 classes"]),
    "dhen module": (
        ["model=dhen_tiny", "data=synthetic_clicks", "model.modules=[dcn]"],
        ["unknown interaction modules"],
    ),
    "dhen columns": (["model=dhen_tiny", "data=synthetic_clicks", "model.num_dense=5"], ["13 dense features"]),
    "dhen tables": (["model=dhen_tiny", "data=synthetic_clicks", "model.num_tables=5"], ["go together"]),
    "spans too long": (["model=t5_tiny", "data.span_corruption.mean_span_length=200"], ["less than one span"]),
    "spans too dense": (["model=t5_tiny", "data.span_corruption.noise_density=0.9"], ["kept ones between"]),
    "tokenizer folder": (["data.tokenizer.kind=local"], ["data.tokenizer.path", "tokenizer.json"]),
    "nothing held out": (["data.eval_fraction=0"], ["nothing is held out", "train.eval_samples=0"]),
    "empty evaluations": (["train.eval_samples=0", "train.eval_every=5"], ["with 0 samples each"]),
    "early stop alone": (["train.early_stop.patience=3"], ["train.eval_every"]),
    "nesterov alone": (["optimizer=sgd", "optimizer.momentum=0", "optimizer.nesterov=true"], ["needs momentum"]),
    "three betas": (["optimizer.betas=[0.9,0.99,0.999]"], ["AdamW has two moments"]),
    "long warm-up": (["scheduler.warmup_steps=5000"], ["the run ends before the warm-up does"]),
    "profile backwards": (["train.profile_steps=[6,3]"], ["no span of steps", "first < last"]),
    "run name": (["run.name=a/b"], ["without '/'"]),
    "empty run folder": (["run.dir="], ["run.dir: the path is empty", "run.dir=PATH"]),
    "cache folder is a file": (["data.cache_dir={tmp}/file"], ["data.cache_dir: this is a file"]),
    "cache folder below a file": (["data.cache_dir={tmp}/file/x"], ["data.cache_dir", "is a file"]),
    "folder without a tokenizer": (
        ["data.tokenizer.kind=local", "data.tokenizer.path={tmp}/texts"],
        ["data.tokenizer.path: the folder holds no tokenizer", "save_pretrained"],
    ),
    "run folder is a file": (["run.dir={tmp}/file"], ["this is a file"]),
    "launcher's own variable": (["cluster.env.RANK=3"], ["the launcher sets this variable itself"]),
    "CPU wire on CUDA": (["cluster.device=cuda", "sharding.wire=shared_memory"], ["CPU ranks only"]),
}
SHELL = {
    "dashes": (["--train.steps=5"], ["without dashes", "train.steps=5"]),
    "dashes and space": (["--train.steps", "5"], ["without dashes", "train.steps=5"]),
    "unknown flag": (["--multi-run"], ["did you mean --multirun"]),
    "flag without value": (["--cfg"], ["--cfg needs a value", "job or hydra or all"]),
    "spaces around =": (["train.steps", "=", "5"], ["no spaces around the =", "train.steps=5"]),
    "space after =": (["train.steps=", "5"], ["no spaces around the =", "train.steps=5"]),
    "space before =": (["train.steps", "=5"], ["no spaces around the =", "train.steps=5"]),
    "two =": (["train.steps==5"], ["one = too many"]),
    "= in a value": (["run.name=a=b"], ["must be quoted for Hydra", "'run.name=\"a=b\"'"]),
    "list with a space": (["logger=[jsonl,", "wandb]"], ["took this apart", "'logger=[jsonl, wandb]'"]),
    "open bracket": (["logger=[jsonl"], ["a bracket is opened and not closed"]),
    "closed bracket": (["logger=jsonl]"], ["a bracket is closed and not opened"]),
    "tilde": (["data=text_files", "data.path=~/corpus"], ["did not expand ~", 'data.path="$HOME/corpus"']),
    "deleted key": (["~train.clip_norm"], ["removes it", "train.clip_norm=null"]),
    "expanded tilde": (["~/corpus"], ["removes it", "$HOME/corpus"]),
    "strange character": (["run.name=a#b"], ["the character '#' must be quoted", "'run.name=\"a#b\"'"]),
    "open quote": (["run.name='a"], ["a quote (') is opened"]),
    "comma": (["train.steps=1,2"], ["needs -m", "'train.steps=[1,2]'"]),
    "range": (["train.steps=range(1,3)"], ["needs -m"]),
    "preset without its group": (["gpt_1b"], ["an argument without =", "model=gpt_1b"]),
    "key without a value": (["train.steps"], ["an argument without =", "train.steps=VALUE"]),
    "action without its key": (["check"], ["action=check"]),
    "file by a glob": (["setup.py"], ["an argument without =", "quote the argument"]),
    "no key": (["=5"], ["there is no key in front of the ="]),
    "unresolvable": (["train.steps=${nowhere}"], ["the interpolation cannot be resolved"]),
    "unset variable": (["run.name=${oc.env:NO_SUCH_VARIABLE}"], ["the interpolation cannot be resolved"]),
    "config path": (["--config-path", "x"], ["--config-dir"]),
    "missing config dir": (["--config-dir", "{tmp}/nowhere"], ["there is no such folder"]),
    "missing primary config": (["--config-name", "mine"], ["there is no config 'mine'"]),
    "two commands": (["--cfg", "job", "--info"], ["do not go together"]),
    "resolve alone": (["--resolve"], ["--cfg job --resolve"]),
}
SLURM = {
    "SLURM's key elsewhere": (
        ["cluster.partition=a100"],
        ["only SLURM reads this", "cluster is local", "cluster=slurm"],
    ),
    "time limit in words on SLURM": (["cluster=slurm", "cluster.time_limit=soon"], ["soon", "24:00:00"]),
    "run folder of two lines on SLURM": (["cluster=slurm", "run.dir='a\nb'"], ["cannot hold a line break"]),
    "script of a local run": (["action=print_script"], ["only cluster=slurm has a script"]),
    "evaluating on SLURM": (["cluster=slurm", "action=tune"], ["cluster=slurm submits training"]),
    "unknown option of sbatch": (
        ["cluster=slurm", "cluster.sbatch.licences=x"],
        ["cluster.sbatch.licences: sbatch has no such option", "did you mean licenses?"],
    ),
    "option of sbatch with a key": (
        ["cluster=slurm", "cluster.sbatch.mem=4G"],
        ["has its own key", "decided by cluster.memory"],
    ),
    "option of srun that is ours": (
        ["cluster=slurm", 'cluster.srun_args=["--ntasks=3"]'],
        ["the launcher sets this option", "--ntasks=3"],
    ),
    "word for srun": (["cluster=slurm", "cluster.srun_args=[bind]"], ["this is no option", "--cpu-bind=cores"]),
    "memory in words": (["cluster=slurm", "cluster.memory=lots"], ["no amount of memory", "64G"]),
    "GPUs asked for twice": (
        ["cluster=slurm", "cluster.gres='gpu:8'", "cluster.gpus_per_node=8"],
        ["both gres and gpus_per_node"],
    ),
    "fewer GPUs than ranks": (["cluster=slurm", "cluster.gpus_per_node=2"], ["fewer GPUs than ranks", "at least"]),
    "mounts without a container": (["cluster=slurm", "cluster.container_mounts=[/data]"], ["no container"]),
    "no time to train": (
        ["cluster=slurm", "cluster.time_limit=00:03:00"],
        ["leaves no time to train", "at least 00:03:20", "cluster.grace_s"],
    ),
    "empty partition": (["cluster=slurm", "cluster.partition=''"], ["cluster.partition: there is nothing in it"]),
}
LATER = {
    "calibrate": (["action=calibrate", "calibrate.name=h200"], ["calibrate.name: a built-in profile has this name"]),
    "plan without a profile": (["action=plan"], ["hardware: this profile does not know", "hardware=a100_80gb"]),
    "a smaller card, by its memory alone": (
        ["action=plan", "hardware=a100_80gb", "hardware.memory_bytes=40_000_000_000"],
        ["hardware.usable_memory_bytes: more than hardware.memory_bytes", "hardware.usable_memory_bytes=null"],
    ),
    "resuming from nowhere": (["checkpoint.resume=/no/such/run"], ["checkpoint.resume", "is no folder"]),
    "no steps and no minutes": (["checkpoint.every=soon"], ["neither a number of steps nor minutes", "10min"]),
    "the best of nothing": (["checkpoint.keep_best=1", "train.eval_samples=0"], ["nothing is evaluated"]),
    "sweep folder": (["sweep.dir=x"], ["one run is no sweep", "-m"]),
    "bad job of a sweep": (["-m", "action=check", "sharding.factor=1,3"], ["F does not divide W = 2 (job 1 of 2)"]),
    "interval": (["-m", "action=check", "optimizer.lr=interval(1e-4,1e-3)"], ["cannot try every value of an interval"]),
    "hydra launcher": (["hydra/launcher=basic"], ["starts the jobs of a sweep itself", "leave it out"]),
    "hydra's folder": (["hydra.run.dir=x"], ["has no effect", "run.dir=PATH"]),
}
PLUGINS = {
    "no such plugin": (["plugins=[./nowhere.py]"], ["there is no such file", "plugins='[./my_model.py]'"]),
    "plugin is no list": (["plugins=./x.py"], ["this is no list of files", "plugins='[./x.py]'"]),
    "plugin is a folder": (["plugins=[{tmp}/empty]"], ["this is no Python file"]),
    "plugin raises": (["plugins=[{tmp}/raises.py]"], ["ZeroDivisionError", "line 2: x = 1 / 0"]),
    "plugin does not parse": (["plugins=[{tmp}/syntax.py]"], ["SyntaxError", "line 1: def f(:"]),
    "plugin misses a package": (
        ["plugins=[{tmp}/imports.py]"],
        ["ModuleNotFoundError", "line 1: import no_such_package"],
    ),
    "plugin registers nothing": (["plugins=[{tmp}/nothing.py]"], ["registers nothing", "@register_model"]),
    "plugin takes a name": (["plugins=[{tmp}/taken.py]"], ["already registered", "line 11"]),
    "plugin without build": (["plugins=[{tmp}/no_build.py]"], ["there is no build()"]),
    "plugin without dataclass": (["plugins=[{tmp}/no_dataclass.py]"], ["no dataclass under ModelConfig"]),
    "plugin with a strange field": (["plugins=[{tmp}/strange.py]"], ["YAML cannot give", "use int, float"]),
}
TYPES["beta of 1"] = (["optimizer.betas=[0.9,1]"], ["a list, each a number, at least 0, below 1"])
TYPES["empty stage"] = (
    ["model=regnet_tiny", "data=synthetic_images", "model.depths=[1,0,1,1]"],
    ["model.depths", "at least 1"],
)
TYPES["seed too long"] = (["run.seed=1e30"], ["run.seed", "below 9.22337e+18"])
UNKNOWN["keys below a list"] = (["optimizer.betas={a:1}"], ["optimizer.betas", "does not fit what is there"])
UNKNOWN["key with a slash"] = (["train/steps=3"], ["keys are joined by dots", "train.steps=3"])
UNKNOWN["key in capitals"] = (["TRAIN.STEPS=3"], ["did you mean train.steps?"])
UNKNOWN["null in a list of presets"] = (["logger=[null]"], ["there is no preset 'null'"])
TYPES["NUL in a text"] = (["run.dir='a\0b'"], ["NUL character"])
TYPES["bytes that are no text"] = (['run.dir="/tmp/\udcff"'], ["no UTF-8 text"])
TYPES["timeout of years"] = (["cluster.collective_timeout_s=1e300"], ["at most 1e+08"])
TYPES["timeout of nothing"] = (["cluster.collective_timeout_s=1e-9"], ["at least 1"])
TYPES["grace of years"] = (["cluster.grace_s=1e300"], ["at most 1e+08"])
TYPES["ranks without end"] = (["cluster.nproc_per_node=1e9"], ["at most 1024"])
TYPES["threads without end"] = (["cluster.cpu_threads_per_rank=1e6"], ["at most 1024"])
FIELDS["F without end"] = (["sharding.factor=1e15"], ["F does not divide W = 2", "sharding.factor=2"])
FIELDS["heads without end"] = (["model.num_heads=1e15"], ["do not divide the width 128", "model.num_heads=128"])
FIELDS["run name of two lines"] = (["run.name='a\nb'"], ["line breaks"])
SHELL["deleted group"] = (["~train"], ["else leave it out"])
SHELL["umlauts in values of a sweep"] = (["-m", "run.name=é,b"], ["must be quoted", '\'run.name="é","b"\''])
UNKNOWN["null for a group"] = (["train=null"], ["a group needs a preset, not null"])
UNKNOWN["group in another place"] = (["model@other=gpt_tiny"], ["@ puts a group into another place"])
UNKNOWN["hydra itself"] = (["hydra=3"], ["this has no effect"])
SHELL["home of nobody"] = (["--config-dir", "~no_such_user/x"], ["there is no such folder"])
SHELL["completion of nothing"] = (["--shell-completion"], ["install=bash"])
PLUGINS["plugin without units"] = (
    ["plugins=[{tmp}/good.py]", "model=my_model"],
    ["sharding.units", "does not name its blocks", "sharding.units=size"],
)
CASES = {**UNKNOWN, **TYPES, **FIELDS, **SHELL, **SLURM, **LATER, **PLUGINS}

HEAD = """\
from dataclasses import dataclass
from recipes.registry import register_model
from recipes.schema.model import ModelConfig


@dataclass
class MyConfig(ModelConfig):
    width: {type} = {default}


@register_model("{name}", {config}, task="causal_lm")
class MyModel:
    @staticmethod
    def {function}(config, info): ...
"""
GOOD = {"type": "int", "default": "8", "name": "my_model", "config": "MyConfig", "function": "build"}
FILES = {
    "raises.py": "# a comment\nx = 1 / 0\n",
    "syntax.py": "def f(:\n",
    "imports.py": "import no_such_package\n",
    "nothing.py": "x = 1\n",
    "taken.py": HEAD.format(**{**GOOD, "name": "gpt"}),
    "no_build.py": HEAD.format(**{**GOOD, "function": "make"}),
    "no_dataclass.py": HEAD.format(**{**GOOD, "config": "dict"}),
    "strange.py": HEAD.format(**{**GOOD, "type": "complex", "default": "1j"}),
    "good.py": HEAD.format(**GOOD),
    "file": "",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "empty").mkdir()
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("no tokenizer")
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.mark.parametrize(("arguments", "expected"), CASES.values(), ids=CASES)
def test_bad_config(command: Command, folder: Path, arguments: list[str], expected: list[str]) -> None:
    said = command(*(argument.replace("{tmp}", str(folder)) for argument in arguments))
    assert said.code == 2
    assert said.launched is None
    for fragment in expected:
        assert fragment in said.err, said.err
    assert "Traceback" not in said.err
    assert said.out == ""


def test_there_are_enough_of_them() -> None:
    assert len(CASES) >= 40


def test_everything_at_once(command: Command) -> None:
    """One start tells all of it, each with its source."""
    said = command(
        "model=gpt_tny",
        "train.stepz=3",
        "+optimizer.foo=1",
        "train.steps=many",
        "sharding.factor=3",
        "run.name=a=b",
        "rate_limiter=off",
        "cluster.time_limit=tomorrow",
    )
    assert said.code == 2
    assert said.err.startswith("8 problems in the config:")
    for argument in ("model=gpt_tny", "train.stepz=3", "+optimizer.foo=1", "train.steps=many", "sharding.factor=3"):
        assert f"command line: {argument}" in said.err


def test_a_problem_tells_nothing_that_follows_from_it(command: Command) -> None:
    """A model that is not there has no sizes to be wrong about, an unreadable value breaks no rule."""
    said = command("model=gpt_tny", "model.num_heads=3", "train.global_batch=x")
    assert said.err.startswith("2 problems in the config:")


def test_files_are_named(command: Command, tmp_path: Path) -> None:
    """What a file of the user's says wrong is told with that file; what a preset says, with the preset."""
    (tmp_path / "mine" / "train").mkdir(parents=True)
    (tmp_path / "mine" / "train" / "bad.yaml").write_text("steps: 10\nglobal_batch: 7\nstepz: 3\n")
    said = command("--config-dir", "mine", "train=bad", "optimizer.lr=0")
    assert "train.stepz: there is no such key\n   got:      3\n   from:     mine/train/bad.yaml" in said.err
    assert "from:     mine/train/bad.yaml; cluster.nproc_per_node from" in said.err
    assert "configs/cluster/local.yaml" in said.err
    assert "from:     command line: optimizer.lr=0" in said.err


def test_experiment_files_are_checked_too(command: Command, tmp_path: Path) -> None:
    (tmp_path / "mine" / "experiment").mkdir(parents=True)
    file = tmp_path / "mine" / "experiment" / "try.yaml"
    file.write_text("# @package _global_\ndefaults:\n  - override /model: t5_tiny\ntrain:\n  step: 3\nmodle: {a: 1}\n")
    said = command("--config-dir", "mine", "experiment=try")
    assert "train.step: there is no such key" in said.err
    assert "modle.a: there is no such key" in said.err
    assert said.err.count("from:     mine/experiment/try.yaml") == 2


def test_a_file_that_is_no_yaml(command: Command, tmp_path: Path) -> None:
    (tmp_path / "mine" / "train").mkdir(parents=True)
    (tmp_path / "mine" / "train" / "broken.yaml").write_text("steps: [1\n")
    said = command("--config-dir", "mine", "train=broken")
    assert said.code == 2
    assert "a YAML file cannot be read" in said.err
    assert "broken.yaml" in said.err


def test_presets_in_a_circle_and_files_that_are_no_text(command: Command, tmp_path: Path) -> None:
    (tmp_path / "mine" / "train").mkdir(parents=True)
    (tmp_path / "mine" / "train" / "hen.yaml").write_text("defaults: [egg]\n")
    (tmp_path / "mine" / "train" / "egg.yaml").write_text("defaults: [hen]\n")
    (tmp_path / "mine" / "train" / "photo.yaml").write_bytes(b"\xff\xd8\xff")
    said = command("--config-dir", "mine", "train=hen")
    assert (said.code, "include each other in a circle" in said.err) == (2, True)
    said = command("--config-dir", "mine", "train=photo")
    assert (said.code, "train/photo.yaml is no UTF-8 text" in said.err) == (2, True)


def test_a_file_with_a_built_in_name_is_refused(command: Command, tmp_path: Path) -> None:
    """Hydra would use the built-in one without a word."""
    (tmp_path / "mine" / "model").mkdir(parents=True)
    (tmp_path / "mine" / "model" / "gpt_tiny.yaml").write_text("kind: gpt\n")
    (tmp_path / "mine" / "config.yaml").write_text("defaults: []\n")
    said = command("--config-dir", "mine")
    assert said.code == 2
    assert "'model/gpt_tiny' is the name of a built-in preset" in said.err
    assert "--config-name NAME" in said.err


def test_plugins_in_a_config_file_are_refused(command: Command, tmp_path: Path) -> None:
    (tmp_path / "mine" / "experiment").mkdir(parents=True)
    (tmp_path / "evil.py").write_text("open('executed', 'w')\n")
    (tmp_path / "mine" / "experiment" / "evil.yaml").write_text("# @package _global_\nplugins: [./evil.py]\n")
    said = command("--config-dir", "mine", "experiment=evil")
    assert said.code == 2
    assert "plugins are named on the command line only" in said.err
    assert not (tmp_path / "executed").exists()


def test_one_rank_of_a_host_speaks(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(cli, "let_the_first_rank_speak", lambda: None)
    silent = command("train.stepz=3")
    monkeypatch.setenv("LOCAL_RANK", "0")
    spoken = command("train.stepz=3")
    assert (silent.code, silent.err) == (2, "")
    assert "train.steps?" in spoken.err


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [(["train.stepz=3"], "did you mean train.steps?"), (["--train.steps=5"], "without dashes")],
    ids=["key", "flag"],
)
def test_the_program_itself(tmp_path: Path, arguments: list[str], expected: str) -> None:
    """The same as a process: exit code, both streams, nothing left behind."""
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    environment["PYTHONPATH"] = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-m", "launcher", *arguments],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 2
    assert expected in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    assert list(tmp_path.iterdir()) == []
