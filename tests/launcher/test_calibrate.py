"""``action=calibrate`` from the command line to a profile that a plan takes."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from launcher import cli
from tests.launcher.conftest import Command
from tests.launcher.programs import Program


def test_a_measured_profile_plans(
    program: Program, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gpt = ("model=gpt_tiny", "model.num_layers=1", "data.seq_len=32")
    mine = program.folder / "mine"
    words = ("action=calibrate", *gpt, "calibrate.seconds=1", "calibrate.name=here", f"calibrate.dir={mine}")
    code, out, err = program.run(*words)
    assert code == 0, out + err
    assert f"to use it: fsdp-launch --config-dir {mine} hardware=here" in out
    written = yaml.safe_load((mine / "hardware" / "here.yaml").read_text())
    assert written["device"] == "cpu"
    assert written["cross_host_bytes_per_s"] is None
    for key in ("peak_flops_float32", "memory_bytes_per_s", "intra_host_bytes_per_s", "launch_s"):
        assert written[key] > 0, key
    for key in ("compute_efficiency", "memory_efficiency"):
        assert 0 < written[key] <= 1, key
    monkeypatch.chdir(program.folder)
    capsys.readouterr()
    assert cli.main(["--config-dir", str(mine), "action=plan", "hardware=here", *gpt]) == 0
    said = capsys.readouterr().out
    assert "W = 2: 1 x 2 of here" in said
    assert "tokens/s" in said
    assert cli.main(["--config-dir", str(mine), "action=plan", "hardware=here", *gpt, "cluster.num_nodes=2"]) == 2
    assert "does not know hardware.cross_host_bytes_per_s" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("calibrate.name=h200", "a built-in profile has this name"),
        ("calibrate.name=a/b", "a preset cannot be named like this"),
        ("calibrate.dir=mine", "mine/hardware/measured.yaml is there already"),
    ],
)
def test_names_that_would_be_lost(command: Command, tmp_path: Path, word: str, says: str) -> None:
    (tmp_path / "mine" / "hardware").mkdir(parents=True)
    (tmp_path / "mine" / "hardware" / "measured.yaml").write_text("name: measured\n")
    said = command("action=calibrate", word)
    assert said.code == 2
    assert says in said.err
