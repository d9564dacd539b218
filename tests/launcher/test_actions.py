"""Actions on checkpoints and folders from the command line, up to where torch or ranks would come in."""

from __future__ import annotations

import dataclasses
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from launcher import compose
from launcher.actions.export import signals_unwind
from launcher.checked import checked
from launcher.resolved import to_tree
from recipes.checkpoint.checksum import checksum
from recipes.checkpoint.folder import COMPLETE, MANIFEST, marker_text
from recipes.checkpoint.manifest import FileRecord, Manifest, Piece, TensorSpec
from tests.launcher.conftest import Command


def checkpoint(run_dir: Path, *words: str, step: int = 7) -> Path:
    """A complete one without values, of a run of these words on two ranks."""
    config = to_tree(checked(compose.compose(words)))
    content = b"eight by"
    piece = (Piece("rank_00000.safetensors", "a", 0, 2),)
    manifest = Manifest(
        step=step,
        world_size=2,
        attempt=0,
        tensors={
            "token_embedding.weight": TensorSpec("model", "float32", (1, 2), None, piece),
            "head.weight": TensorSpec("model", "float32", (1, 2), None, piece),
            "optimizer/0/exp_avg/head.weight": TensorSpec("optimizer", "bfloat16", (3,), None, ()),
        },
        files={"rank_00000.safetensors": FileRecord(len(content), checksum(content))},
        optimizers=[],
        config=config,
        shared={},
        per_rank=[{}, {}],
    )
    folder = run_dir / "checkpoints" / f"step_{step:08d}"
    folder.mkdir(parents=True)
    (folder / "rank_00000.safetensors").write_bytes(content)
    (folder / MANIFEST).write_bytes(manifest.as_json())
    (folder / COMPLETE).write_text(marker_text(step, manifest.as_json(), None))
    return folder


def test_inspect_tells_everything_without_torch(command: Command, tmp_path: Path) -> None:
    checkpoint(tmp_path / "run", "model=gpt_tiny", "train.steps=9")
    newest = checkpoint(tmp_path / "run", "model=gpt_tiny", "train.steps=9", step=8)
    for word in ("run.dir=run", "checkpoint.resume=run", f"checkpoint.resume={newest}"):
        said = command("action=inspect", word)
        assert said.code == 0, said.err
        assert f"checkpoint  {newest}" in said.out
        assert "step        8" in said.out
        assert "model       1 tensors, 2 elements, 8 bytes" in said.out, "tied names count once"
        assert "optimizer   1 tensors, 3 elements, 6 bytes" in said.out
        assert "float32" in said.out
        assert "steps: 9" in said.out
    words = ["action=inspect", f"checkpoint.resume={newest}"]
    code = f"import sys; from launcher.cli import main; sys.exit(main({words!r}) or 'torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0


def test_inspect_compares_checksums_on_request(command: Command, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "run", "model=gpt_tiny")
    words = ("action=inspect", "run.dir=run", "inspect.verify=true")
    assert "checksum of rank_00000.safetensors: as written" in command(*words).out
    (folder / "rank_00000.safetensors").write_bytes(b"eight bi")
    said = command(*words)
    assert said.code == 2
    assert "rank_00000.safetensors: damaged" in said.err
    assert command("action=inspect", "run.dir=run").code == 0


def test_a_checkpoint_brings_its_model_data_and_precision(command: Command, tmp_path: Path) -> None:
    words = ("model=t5_tiny", "data.seq_len=48", "precision=bf16", "run.seed=5", "train.global_batch=6")
    folder = checkpoint(tmp_path / "run", *words)
    said = command("action=eval", "run.dir=run", "cluster.nproc_per_node=4", "train.eval_samples=33")
    assert said.code == 0, said.err
    assert said.launched is not None
    config, _ = said.launched
    assert config.model.kind == "t5"
    assert (config.data.seq_len, config.precision.param_dtype, config.run.seed) == (48, "bfloat16", 5)  # type: ignore[attr-defined]
    assert config.checkpoint.resume == str(folder)
    assert config.train.eval_samples == 33, "typed words win"
    assert config.train.micro_batch == 3, "forwards as large as the run's, six samples on two ranks"
    assert config.cluster.nproc_per_node == 4


def test_other_data_may_be_typed(command: Command, tmp_path: Path) -> None:
    checkpoint(tmp_path / "run", "model=gpt_tiny", "data.seq_len=48")
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("words")
    said = command("action=eval", "run.dir=run", "data=text_files", "data.path=text")
    assert said.launched is not None, said.err
    assert said.launched[0].data.kind == "text_files"


def test_a_typed_model_that_is_another_is_refused(command: Command, tmp_path: Path) -> None:
    checkpoint(tmp_path / "run", "model=gpt_tiny")
    said = command("action=generate", "run.dir=run", "model.hidden_size=64", "model.dropout=0.1")
    assert said.code == 2
    assert "1 problem" in said.err
    assert "model.hidden_size: the checkpoint holds another model" in said.err
    assert "128, as in the checkpoint" in said.err
    assert command("action=generate", "run.dir=run", "model=gpt_tiny").code == 0
    assert "model.kind" in command("action=generate", "run.dir=run", "model=t5_tiny").err


def incomplete(folder: Path) -> None:
    (folder / COMPLETE).unlink()


def changed(folder: Path) -> None:
    (folder / MANIFEST).write_text("{}")


@pytest.mark.parametrize("action", ["inspect", "eval", "generate", "export"])
@pytest.mark.parametrize("damage", [incomplete, changed])
def test_an_incomplete_checkpoint_is_refused(action: str, damage: Any, command: Command, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "run", "model=gpt_tiny")
    damage(folder)
    for word, told in ((f"checkpoint.resume={folder}", str(folder)), ("run.dir=run", "no complete checkpoint")):
        said = command(f"action={action}", word, "export.dir=out")
        assert (said.code, said.launched) == (2, None)
        assert told in said.err
        assert "checkpoint.resume=PATH" in said.err
        assert "Traceback" not in said.err


@pytest.mark.parametrize("action", ["inspect", "eval", "generate", "export"])
def test_an_action_on_nothing_says_what_to_name(action: str, command: Command) -> None:
    for words in ((), ("run.dir=nowhere",), ("checkpoint.resume=nowhere",)):
        said = command(f"action={action}", *words, "export.dir=out")
        assert said.code == 2
        assert "checkpoint.resume=PATH names a checkpoint" in said.err


def test_export_writes_into_new_folders_only(command: Command, tmp_path: Path) -> None:
    checkpoint(tmp_path / "run", "model=gpt_tiny")
    assert "export.dir=PATH" in command("action=export", "run.dir=run").err
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "something").touch()
    said = command("action=export", "run.dir=run", "export.dir=full")
    assert said.code == 2
    assert "this folder holds something already" in said.err


def test_generate_needs_a_language_model_and_eval_needs_samples(command: Command, tmp_path: Path) -> None:
    checkpoint(tmp_path / "run", "model=dhen_tiny", "data=synthetic_clicks")
    assert "the model 'dhen' writes no text" in command("action=generate", "run.dir=run").err
    assert "an evaluation of no samples" in command("action=eval", "run.dir=run", "train.eval_samples=0").err


def model_folder(folder: Path, config: dict[str, Any]) -> Path:
    folder.mkdir()
    header = json.dumps({}).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_a_model_folder_is_looked_at_before_anything_starts(command: Command, tmp_path: Path) -> None:
    model_folder(tmp_path / "gpt2", {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "tie_word_embeddings": True})
    said = command("model=gpt_tiny", "model.init_from=gpt2")
    assert said.code == 2
    for remedy in ("model.hidden_size=768", "model.num_layers=12", "model.tie_head=true"):
        assert remedy in said.err
    fitting = ("model.hidden_size=768", "model.num_layers=12", "model.tie_head=true")
    assert command("model=gpt_tiny", "model.init_from=gpt2", *fitting).code == 0
    assert "model.kind" in command("model=t5_tiny", "model.init_from=gpt2").err


def test_a_missing_or_pickled_model_folder_is_refused(command: Command, tmp_path: Path) -> None:
    said = command("model.init_from=nowhere/at_all")
    assert said.code == 2
    assert "model.init_from: no such folder" in said.err
    assert "Nothing is downloaded" in said.err
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "pytorch_model.bin").write_bytes(b"\x80")
    assert "a pickle, which is never loaded" in command("model.init_from=old").err


def test_a_model_folder_serves_instead_of_a_checkpoint(command: Command, tmp_path: Path) -> None:
    model_folder(tmp_path / "gpt2", {"model_type": "gpt2", "tie_word_embeddings": False})
    said = command("action=generate", "model.init_from=gpt2", "generate.prompt=def")
    assert said.launched is not None, said.err
    assert said.launched[0].model.init_from == "gpt2"


def test_the_config_of_a_use_can_be_shown(command: Command, tmp_path: Path) -> None:
    checkpoint(tmp_path / "run", "model=t5_tiny")
    said = command("action=generate", "run.dir=run", "--cfg", "job", "--package", "model")
    assert said.code == 0, said.err
    assert "kind: t5" in said.out


def test_every_field_of_a_manifest_is_told_or_left_out_on_purpose() -> None:
    told = {"step", "world_size", "attempt", "tensors", "files", "config", "eval_loss"}
    inner = {"optimizers", "shared", "per_rank", "extra", "version"}  # of interest to loading only
    assert {field.name for field in dataclasses.fields(Manifest)} == told | inner


def test_a_newer_checkpoint_that_is_incomplete_is_told(command: Command, tmp_path: Path) -> None:
    newest = checkpoint(tmp_path / "run", "model=gpt_tiny")
    incomplete(newest.rename(newest.with_name("step_99999999")))
    checkpoint(tmp_path / "run", "model=gpt_tiny")
    said = command("action=inspect", "run.dir=run")
    assert said.code == 0
    assert "checkpoint passed over: " in said.err and "step_99999999" in said.err


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_unwinds_an_export(signum: signal.Signals) -> None:
    """The half-written folder is cleared away by a ``finally``, which the default action would not run."""
    before = signal.getsignal(signum)
    with pytest.raises(SystemExit) as stop, signals_unwind():
        signal.raise_signal(signum)
    assert stop.value.code == 128 + signum
    assert signal.getsignal(signum) is before
