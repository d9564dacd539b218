"""Hangs of whole runs: told by rank, unit and phase, ended with code 5, nobody left behind."""

from __future__ import annotations

import pytest

from tests.launcher.programs import Program, torchrun

# The second forward is a step's: start-up is over. Between these limits and the tests' own lies a minute and more.
IN_BLOCK = ("model.in_block=true", "model.num_layers=2", "model.at_rank=1", "cluster.collective_timeout_s=4")


@pytest.mark.parametrize(
    ("how", "state"), [("stop", "stopped"), pytest.param("sleep", "sleeping", marks=pytest.mark.full)]
)
def test_a_rank_that_hangs_is_named_with_unit_and_phase(program: Program, how: str, state: str) -> None:
    code, out, err = program.run(f"model.how={how}", *IN_BLOCK)
    assert code == 5, out + err
    assert "the run hangs: no rank has made progress for" in err
    assert "rank 1 never entered " in err
    assert "step 2); rank 0 waits for it" in err
    row = next(line for line in err.splitlines() if line.startswith("rank 1  "))
    assert state in row
    assert row.endswith("training, step 2: in the forward of blocks.1")
    assert "Traceback" not in err
    (run_dir,) = program.run_dirs()
    log = (run_dir / "logs" / "rank_0.log").read_text()
    assert "most recent call first" in log  # Python's stacks
    if how == "sleep":
        assert "_misbehave" in (run_dir / "logs" / "rank_1.log").read_text()


@pytest.mark.full
def test_under_torchrun_a_surviving_rank_tells_it(program: Program) -> None:
    code, out, err = program.run("model.how=stop", *IN_BLOCK, before=torchrun("--standalone", "--nproc-per-node", "2"))
    assert code == 1, out + err
    assert err.count("the run hangs: no rank has made progress for") == 1
    assert "rank 1 never entered " in err
    (run_dir,) = program.run_dirs()
    assert "rank 1  stopped" in (run_dir / "hang.txt").read_text()


@pytest.mark.full
def test_a_hang_is_started_again_where_restarts_are_allowed(program: Program) -> None:
    code, out, err = program.run("model.how=stop", *IN_BLOCK, "cluster.max_restarts=1")
    assert code == 5, out + err
    assert err.count("the run hangs") == 2
    assert err.count("starting the ranks again") == 1
