"""What the launcher decides before it starts anything: environments of ranks, devices, run folder, artefacts."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from contextlib import closing
from datetime import datetime
from pathlib import Path

import pytest
import yaml

from launcher import failure, launch, oom_kills, provenance, run_folder
from launcher.announce import headline
from launcher.device import choose_device, torch_cuda_version
from launcher.environment import JoinedRanks
from launcher.errors import ConfigErrors
from launcher.failure import Failure
from launcher.rank_plan import rank_commands
from launcher.request import LaunchRequest
from launcher.schema import ClusterConfig, Config
from launcher.status_pipe import StatusReader, StatusWriter
from recipes.data.errors import DataError


def plan(
    base: dict[str, str] | None = None, num_cores: int = 8, deterministic: bool = False, **cluster: object
) -> list:
    return rank_commands(
        Path("/runs/one"),
        ["my_model.py"],
        ClusterConfig(**cluster),  # type: ignore[arg-type]
        attempt=3,
        ends_at=12.5,
        device="cpu",
        listen_fd=9,
        port=4321,
        num_cores=num_cores,
        base=base or {"PATH": "/bin"},
        is_deterministic=deterministic,
        is_interactive=True,
    )


def test_every_rank_knows_its_place_and_where_to_meet() -> None:
    ranks = plan(nproc_per_node=3)
    assert [command.rank for command in ranks] == [0, 1, 2]
    assert [command.env["RANK"] for command in ranks] == ["0", "1", "2"]
    assert [command.env["LOCAL_RANK"] for command in ranks] == ["0", "1", "2"]
    for command in ranks:
        assert command.env["PATH"] == "/bin"
        assert command.env["WORLD_SIZE"] == command.env["LOCAL_WORLD_SIZE"] == "3"
        assert (command.env["MASTER_ADDR"], command.env["MASTER_PORT"]) == ("127.0.0.1", "4321")
        assert command.log_path == Path(f"/runs/one/logs/rank_{command.rank}.log")
        assert command.argv[command.argv.index("--ends-at") + 1] == "12.5"
        assert command.argv[command.argv.index("--plugin") + 1] == str(Path("my_model.py").absolute())


def test_only_rank_0_serves_and_shows() -> None:
    first, second = plan(nproc_per_node=2)
    assert first.inherit == (9,)
    assert {"--listen-fd", "9", "--interactive"} <= set(first.argv)
    assert second.inherit == ()
    assert not {"--listen-fd", "--interactive"} & set(second.argv)


def test_one_rank_alone_serves_nobody() -> None:
    (alone,) = plan(nproc_per_node=1)
    assert alone.inherit == ()
    assert "--listen-fd" not in alone.argv


@pytest.mark.parametrize(
    ("base", "cluster", "threads"),
    [
        ({}, {"nproc_per_node": 2}, "4"),
        ({}, {"nproc_per_node": 3}, "2"),
        ({}, {"nproc_per_node": 16}, "1"),
        ({"OMP_NUM_THREADS": "7"}, {"nproc_per_node": 2}, "7"),
        ({"OMP_NUM_THREADS": "7"}, {"nproc_per_node": 2, "cpu_threads_per_rank": 3}, "3"),
        ({}, {"nproc_per_node": 2, "env": {"OMP_NUM_THREADS": "5"}}, "5"),
    ],
    ids=["divided", "rounded-down", "at-least-one", "users", "config-over-users", "env-over-all"],
)
def test_threads_of_a_rank(base: dict[str, str], cluster: dict[str, object], threads: str) -> None:
    assert {command.env["OMP_NUM_THREADS"] for command in plan({"PATH": "/bin", **base}, **cluster)} == {threads}


def test_cluster_env_reaches_every_rank_and_sockets_stay_on_loopback() -> None:
    ranks = plan(nproc_per_node=2, env={"NCCL_DEBUG": "INFO", "NCCL_SOCKET_IFNAME": "eth7"})
    assert {command.env["NCCL_DEBUG"] for command in ranks} == {"INFO"}
    assert {command.env["NCCL_SOCKET_IFNAME"] for command in ranks} == {"eth7"}
    assert ranks[0].env["GLOO_SOCKET_IFNAME"].startswith("lo")


def test_deterministic_runs_tell_cublas_in_time() -> None:
    assert plan(deterministic=True)[0].env["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert "CUBLAS_WORKSPACE_CONFIG" not in plan()[0].env


@pytest.mark.parametrize(
    ("wanted", "num_ranks", "num_gpus", "torch_cuda", "device", "says"),
    [
        ("auto", 2, 0, None, "cpu", None),
        ("auto", 2, 2, "12.8", "cuda", None),
        ("auto", 2, 8, "12.8", "cuda", None),
        ("auto", 2, 1, "12.8", "cpu", "2 ranks and 1 GPUs"),
        ("auto", 2, 2, None, "cpu", "without CUDA"),
        ("cpu", 2, 8, "12.8", "cpu", None),
        ("cuda", 2, 2, "12.8", "cuda", None),
    ],
)
def test_device(
    wanted: str, num_ranks: int, num_gpus: int, torch_cuda: str | None, device: str, says: str | None
) -> None:
    chosen, line = choose_device(wanted, num_ranks, num_gpus, torch_cuda)
    assert chosen == device
    assert (line is None) if says is None else (says in (line or ""))


@pytest.mark.parametrize(("num_gpus", "torch_cuda"), [(1, "12.8"), (0, "12.8"), (2, None)])
def test_cuda_by_name_is_never_replaced(num_gpus: int, torch_cuda: str | None) -> None:
    with pytest.raises(ValueError, match="2 ranks|without CUDA"):
        choose_device("cuda", 2, num_gpus, torch_cuda)


def test_the_cuda_version_is_read_without_importing_torch() -> None:
    code = (
        "import sys; from launcher.device import torch_cuda_version as v; print(v()); assert 'torch' not in sys.modules"
    )
    import_free = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    import torch

    assert import_free.stdout.strip() == str(torch.version.cuda) == str(torch_cuda_version())


def test_the_port_of_a_run_cannot_be_taken_between_choosing_and_using_it() -> None:
    with closing(launch.listening_socket()) as held, socket.socket() as thief:
        assert held.getsockname()[0] == "127.0.0.1"
        with pytest.raises(OSError, match="in use"):
            thief.bind(held.getsockname())


def test_headline() -> None:
    text = headline(Path("/elsewhere/runs/x"), JoinedRanks(0, 8, 0, 4), "cuda", "joined")
    assert text == "run folder: /elsewhere/runs/x\n8 ranks joined on 2 hosts, one GPU each (nccl)"
    assert headline(Path.cwd() / "runs", JoinedRanks(0, 1, 0, 1), "cpu", "started").startswith(
        "run folder: runs\n1 rank "
    )


# The run folder


def test_two_runs_in_the_same_second_have_two_folders(tmp_path: Path) -> None:
    now = datetime(2026, 3, 4, 5, 6, 7)
    folders = [run_folder.create("gpt tiny/x", tmp_path, now) for _ in range(50)]
    assert len(set(folders)) == 50
    assert all(re.fullmatch(r"2026-03-04_05-06-07-gpt_tiny_x-[0-9a-f]{4}", folder.name) for folder in folders)
    assert all((folder / "logs").is_dir() for folder in folders)


def test_a_taken_name_is_never_shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = iter(["aaaa", "aaaa", "bbbb"])
    monkeypatch.setattr(run_folder.secrets, "token_hex", lambda count: next(words))
    now = datetime(2026, 1, 1)
    assert [run_folder.create("x", tmp_path, now).name[-4:] for _ in range(2)] == ["aaaa", "bbbb"]


def test_a_named_folder_is_made_or_continued(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "run"
    run_folder.open_named(folder)
    (folder / "config.yaml").write_text("action: train")
    assert run_folder.open_named(folder) == folder


@pytest.mark.parametrize("kind", ["file", "other-things"])
def test_a_folder_that_is_no_run_is_refused(tmp_path: Path, kind: str) -> None:
    target = tmp_path / "thing"
    if kind == "file":
        target.write_text("")
    else:
        target.mkdir()
        (target / "thesis.tex").write_text("")
    with pytest.raises(ConfigErrors, match=r"run\.dir"):
        run_folder.open_named(target)


def test_a_place_that_cannot_hold_a_run_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the file system says becomes the user's message: a file where ``runs`` should be, no space."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").write_text("")
    with pytest.raises(ConfigErrors, match=r"run\.dir: the folder cannot be used: File exists"):
        run_folder.decide(Config(), LaunchRequest("", choices={"model": "gpt_tiny"}))
    config = Config()
    config.run.dir = "runs/mine"
    with pytest.raises(ConfigErrors, match=r"run\.dir: the folder cannot be used: Not a directory"):
        run_folder.decide(config, LaunchRequest(""))
    with pytest.raises(ConfigErrors, match="No space left on device"), run_folder.usable(tmp_path):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_long_name_is_cut_in_the_folders_name(tmp_path: Path) -> None:
    assert len(run_folder.create("x" * 300, tmp_path).name) < 255


def test_a_folder_in_use_is_refused_and_free_again_afterwards(tmp_path: Path) -> None:
    with run_folder.Lock(tmp_path), pytest.raises(ConfigErrors, match="in use"), run_folder.Lock(tmp_path):
        pass
    with run_folder.Lock(tmp_path):
        pass


def test_the_name_of_a_new_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = Config()
    config.model.kind = "gpt"
    assert "-gpt-" in run_folder.decide(config, LaunchRequest("")).name
    assert "-gpt_tiny-" in run_folder.decide(config, LaunchRequest("", choices={"model": "gpt_tiny"})).name
    config.run.name = "mine"
    folder = run_folder.decide(config, LaunchRequest("", choices={"model": "gpt_tiny"}))
    assert "-mine-" in folder.name
    assert folder.parent == tmp_path / "runs"


# Artefacts


REQUEST = LaunchRequest(
    config_yaml="run:\n  seed: 3\ncluster:\n  env:\n    WANDB_API_KEY: topsecret\n    NCCL_DEBUG: INFO\n",
    overrides=("run.seed=3", "cluster.env.WANDB_API_KEY=topsecret", "cluster.env={MY_TOKEN: topsecret, A: b}"),
    command=("fsdp-launch", "run.seed=3", "cluster.env.WANDB_API_KEY=topsecret"),
)


def test_artefacts_tell_everything_but_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_SECRET_TOKEN", "topsecret")
    monkeypatch.setenv("HOME_ADDRESS", "topsecret")
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    plugin = tmp_path / "my_model.py"
    plugin.write_text("# mine")
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    provenance.write(run_dir, REQUEST, [str(plugin)])
    assert yaml.safe_load((run_dir / "config.yaml").read_text()) == {
        "run": {"seed": 3},
        "cluster": {"env": {"WANDB_API_KEY": "<hidden>", "NCCL_DEBUG": "INFO"}},
    }
    assert yaml.safe_load((run_dir / "overrides.yaml").read_text()) == [
        "run.seed=3",
        "cluster.env.WANDB_API_KEY=<hidden>",
        "cluster.env={MY_TOKEN: <hidden>, A: b}",
    ]
    assert (run_dir / "command.txt").read_text().splitlines()[1].startswith("fsdp-launch run.seed=3 ")
    assert any(line.startswith("torch==") for line in (run_dir / "packages.txt").read_text().splitlines())
    told = json.loads((run_dir / "environment.json").read_text())
    assert told["variables"]["NCCL_DEBUG"] == "WARN"
    assert told["cores"] >= 1
    assert (run_dir / "plugins" / "my_model.py").read_text() == "# mine"
    assert (run_dir / "revision.txt").read_text().strip()
    for file in run_dir.rglob("*"):
        assert file.is_dir() or "topsecret" not in file.read_text(), file


def test_a_config_without_secrets_is_kept_byte_by_byte() -> None:
    text = "run:\n    seed: 3 # mine\ncluster: {env: {}}\n"
    assert provenance.without_secrets(text) == text


def test_artefacts_of_an_earlier_start_are_kept(tmp_path: Path) -> None:
    for seed in range(3):
        provenance.write(tmp_path, LaunchRequest(f"run: {{seed: {seed}}}"), [])
    assert (tmp_path / "config.yaml").read_text() == "run: {seed: 2}"
    assert [(tmp_path / "earlier" / str(n) / "config.yaml").read_text() for n in range(2)] == [
        "run: {seed: 0}",
        "run: {seed: 1}",
    ]


def test_values_that_look_like_secrets_are_hidden_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = "hf_" + "Abc123Def456Ghi789Jkl012"
    monkeypatch.setenv("NCCL_NOTE", secret)
    words = (f"cluster.env.NOTE={secret}", f"logger.wandb.notes={secret}")
    request = LaunchRequest(f"cluster:\n  env:\n    NOTE: {secret}\n", words, ("fsdp-launch", *words))
    provenance.write(tmp_path, request, [])
    assert "logger.wandb.notes=<hidden>" in (tmp_path / "overrides.yaml").read_text()
    for file in tmp_path.rglob("*"):
        assert secret not in file.read_text(), file


def _full_disk(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_start_that_cannot_be_written_down_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(provenance, "packages", _full_disk)
    config = Config()
    with pytest.raises(ConfigErrors, match="No space left on device"):
        launch.launch(config, LaunchRequest("{}", choices={"model": "gpt_tiny"}), environ={})
    assert list((tmp_path / "runs").iterdir()) == []


def test_a_start_that_cannot_be_written_down_leaves_the_earlier_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    provenance.write(tmp_path, LaunchRequest("run: {seed: 1}"), [])
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    monkeypatch.setattr(provenance, "packages", _full_disk)
    with pytest.raises(OSError, match="No space left"):
        provenance.write(tmp_path, LaunchRequest("run: {seed: 2}"), [])
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()} == before
    assert list((tmp_path / "earlier").iterdir()) == []


def test_the_diff_of_a_checkout_hides_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkout, run_dir = tmp_path / "checkout", tmp_path / "run"
    (checkout / "launcher").mkdir(parents=True)
    run_dir.mkdir()
    git = ["git", "-C", str(checkout), "-c", "user.name=x", "-c", "user.email=x@example.com"]
    for name in ("code.py", "prod.env"):
        (checkout / name).write_text("")
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "add", "."], check=True)
    subprocess.run([*git, "commit", "-qm", "one"], check=True)
    (checkout / "code.py").write_text('steps = 3\napi_key = "abcdefgh12345"\n')
    (checkout / "prod.env").write_text("PASSWORD=hunter2hunter2\n")
    monkeypatch.setattr(provenance.launcher, "__file__", str(checkout / "launcher" / "__init__.py"))
    provenance.write(run_dir, LaunchRequest("{}"), [])
    diff = (run_dir / "diff.patch").read_text()
    assert "+steps = 3" in diff
    assert '+api_key = "<hidden>"' in diff
    assert "hunter2" not in diff
    assert re.fullmatch(
        r"[0-9a-f]{40} with uncommitted changes \(diff\.patch\)\n", (run_dir / "revision.txt").read_text()
    )


# Failures


def test_the_cause_comes_before_its_consequences() -> None:
    lost = Failure(0, "lost", 1, time_s=1.0, kind="lost_peer")
    late = Failure(1, "late", 1, time_s=3.0)
    early = Failure(2, "early", 1, time_s=2.0)
    killed = Failure(3, "killed", 1, time_s=4.0, kind="vanished")
    assert failure.first([lost, late, early, killed]) is killed
    assert failure.first([lost, late, early]) is early
    assert failure.first([lost]) is lost


@pytest.mark.parametrize(
    ("error", "exit_code", "kind"),
    [
        (ValueError("no"), 1, "raised"),
        (MemoryError(), 6, "raised"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"), 6, "raised"),
        (RuntimeError("[pair.cc:538] Connection closed by peer [127.0.0.1]:2"), 1, "lost_peer"),
        (RuntimeError("rank 0 waited for rank 1 in vain: its process has died\n  unit: a"), 1, "lost_peer"),
        (SystemExit(0), 1, "raised"),
    ],
    ids=["value", "memory", "allocator", "lost", "shared memory", "exit"],
)
def test_exceptions_as_records(error: BaseException, exit_code: int, kind: str) -> None:
    record = failure.from_exception(4, error, "Traceback")
    assert (record.rank, record.exit_code, record.kind) == (4, exit_code, kind)


def test_a_users_mistake_is_told_without_a_traceback(tmp_path: Path) -> None:
    record = failure.from_exception(2, DataError("corpus/a.jsonl:2: not JSON"), "Traceback ...")
    assert (record.exit_code, record.traceback) == (1, "Traceback ...")  # which goes into the rank's log
    told = failure.describe(record, 4, tmp_path / "rank_2.log")
    assert told == (
        f"corpus/a.jsonl:2: not JSON\n\nfound by rank 2 of 4; traceback in its log: {tmp_path / 'rank_2.log'}"
    )


def test_a_cause_inside_an_error_of_ours_counts() -> None:
    try:
        try:
            raise RuntimeError("Connection reset by peer")
        except RuntimeError as inner:
            raise ValueError("unit block_3: gather failed") from inner
    except ValueError as outer:
        assert failure.from_exception(0, outer, "").is_lost_peer


def test_the_kernels_killer_is_told_apart() -> None:
    assert failure.from_exit(0, -9, is_out_of_memory_kill=True).exit_code == 6
    assert failure.from_exit(0, -9, is_out_of_memory_kill=False).exit_code == 1
    assert failure.from_exit(0, -11, is_out_of_memory_kill=True).exit_code == 1


def test_out_of_memory_kills_are_counted(tmp_path: Path) -> None:
    (tmp_path / "cgroup").write_text("0::/a/b\n")
    (tmp_path / "a" / "b").mkdir(parents=True)
    assert oom_kills.count(tmp_path, tmp_path / "cgroup") == 0
    (tmp_path / "a" / "b" / "memory.events").write_text("low 0\noom 4\noom_kill 3\n")
    assert oom_kills.count(tmp_path, tmp_path / "cgroup") == 3


def test_what_people_read(tmp_path: Path) -> None:
    log = tmp_path / "rank_1.log"
    log.write_text("".join(f"line {n}\n" for n in range(100)))
    raised = failure.describe(Failure(1, "ValueError: no", 1, 0.0, traceback="Traceback\n  x\nValueError: no"), 4, log)
    assert raised.splitlines()[0] == "rank 1 of 4 failed: ValueError: no"
    assert "    Traceback" in raised
    assert f"log: {log}" in raised
    assert raised.endswith("the other 3 ranks were ended.")
    killed = failure.describe(Failure(1, "was killed by SIGKILL", 1, 0.0, "vanished", hint="try less"), 2, log)
    assert killed.splitlines()[0] == "rank 1 of 2 was killed by SIGKILL"
    assert "    line 99" in killed
    assert "line 80" not in killed
    assert "try less" in killed
    assert killed.endswith("the other rank was ended.")


def test_a_status_survives_the_pipe_whatever_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    reader = StatusReader()
    assert reader.latest() is None
    record = Failure(2, "ValueError: " + "x" * 9_000, 1, time.time(), traceback="\u20ac" * 300_000 + "the end")
    StatusWriter(os.dup(reader.child_fd)).failed(record)
    status = reader.latest()
    assert status is not None and status.failure is not None
    assert status.failure.what.startswith("ValueError: x")
    assert status.failure.traceback.endswith("the end")
    reader.started()
    reader.close()
    assert reader.latest() == status


def test_a_rank_without_a_launcher_has_nobody_to_tell() -> None:
    writer = StatusWriter.from_environment()
    assert not writer.is_connected
    writer.done()


def test_artefacts_are_kept_beside_those_that_are_left_of_earlier_starts(tmp_path: Path) -> None:
    for seed in range(3):
        provenance.write(tmp_path, LaunchRequest(f"run: {{seed: {seed}}}"), [])
    shutil.rmtree(tmp_path / "earlier" / "0")  # somebody made room
    provenance.write(tmp_path, LaunchRequest("run: {seed: 3}"), [])
    assert sorted(path.name for path in (tmp_path / "earlier").iterdir()) == ["1", "2"]
    provenance.write(tmp_path, LaunchRequest("run: {seed: 4}"), [])
    assert (tmp_path / "earlier" / "3" / "config.yaml").read_text() == "run: {seed: 3}"


@pytest.mark.parametrize("left", [["logs"], ["logs", ".lock"], ["logs", ".lock", "earlier", "checkpoints"]])
def test_a_start_that_was_killed_before_its_config_was_there_can_be_made_again(tmp_path: Path, left: list[str]) -> None:
    for name in left:
        (tmp_path / name).touch() if name == ".lock" else (tmp_path / name).mkdir()
    assert run_folder.open_named(tmp_path) == tmp_path
