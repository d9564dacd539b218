"""A SLURM cluster on one machine, for tests: a login node and two nodes, each with a network, host name and hosts file.

    python -m tests.slurm.testbed FOLDER        starts one and keeps it up until Ctrl-C; FOLDER/run CMD runs CMD on it

The daemons are Debian's (slurmctld, slurmd, munge) and children of this process: they end with it. Nothing is added to
the machine's own network or files. The file system and the processes are shared by all nodes, cores and GPUs are made
up, there are no control groups and no accounting. Needs root and Linux namespaces.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

NODES = ("node1", "node2")
MARK = "FSDP_TESTBED"
SBIN = "/usr/sbin:/sbin"
READY_S = 20
BACK_S = 120  # a node that was down is asked to register again with every 20th or so of SLURM's looks at it
_DAEMONS = ("slurmctld", "slurmd", "munged", "sbatch", "ip", "nsenter", "setpriv")
_ADDRESSES = {"login": "10.77.0.254", "node1": "10.77.0.1", "node2": "10.77.0.2"}
CONFIG = """\
ClusterName=testbed
SlurmctldHost=login(10.77.0.254)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.sock,cred_expire=3
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
MailProg=/bin/true
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
# A lost node counts as down, a killed job is gone and a requeued one starts again within seconds, not minutes.
JobRequeue=1
ReturnToService=2
SlurmdTimeout=10
KillWait=5
MinJobAge=600
MessageTimeout=5
SchedulerParameters=batch_sched_delay=0,bf_interval=1,sched_interval=2
# A job in "urgent" throws those in "short" out: they get the signal they asked for, 30 s, and the queue again.
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
GresTypes=gpu
NodeName=node[1-2] Port=6818 Sockets=1 CoresPerSocket=4 ThreadsPerCore=1 RealMemory=4000 Gres=gpu:2
PartitionName=short Nodes=ALL Default=YES DefaultTime=5 MaxTime=30 PriorityTier=1 GraceTime=30
PartitionName=urgent Nodes=ALL DefaultTime=5 MaxTime=30 PriorityTier=10 PreemptMode=OFF
"""


def missing() -> str | None:
    """Why there can be no cluster here; None if there can."""
    path = f"{os.environ.get('PATH', '')}:{SBIN}"
    absent = [name for name in _DAEMONS if shutil.which(name, path=path) is None]
    if absent:
        return f"not installed: {', '.join(absent)} (Debian: slurmctld slurmd slurm-client munge iproute2 util-linux)"
    probe = subprocess.run(
        ["unshare", "--net", "--uts", "--mount", "ip", "link", "add", "type", "veth"], capture_output=True, check=False
    )
    return "this user may not make network namespaces (root may)" if probe.returncode else None


class Testbed:
    """A running cluster. folder: everything it makes; its path may hold letters, digits and ``._-/``."""

    __test__ = False

    def __init__(self, folder: Path) -> None:
        self.folder = folder.absolute()
        self._children: dict[str, subprocess.Popen[bytes]] = {}
        self._holders: dict[str, int] = {}
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "state").mkdir()
        try:
            self._start()
        except BaseException:
            self.stop()
            raise

    def _start(self) -> None:
        hosts = ["127.0.0.1 localhost", *(f"{address} {name}" for name, address in _ADDRESSES.items())]
        (self.folder / "hosts").write_text("\n".join(hosts) + "\n")
        (self.folder / "slurm.conf").write_text(CONFIG.format(folder=self.folder))
        gpus = f"NodeName=node[1-2] Name=gpu File={self.folder}/gpu[0-1]\n"
        (self.folder / "gres.conf").write_text(gpus)
        for index in range(2):
            (self.folder / f"gpu{index}").symlink_to("/dev/null")
        self._make_network()
        self._start_munge()
        self.start_controller()
        for node in NODES:
            self.start_node(node)
        self._write_run()
        self.wait_for_nodes()

    # --- the network: a namespace for each machine, joined by a bridge in that of the login node ---

    def _make_network(self) -> None:
        for name in ("login", *NODES):
            hold = ["unshare", "--net", "--uts", "--mount", "sleep", "infinity"]
            child = self._spawn(name, hold)
            self._holders[name] = child.pid
            _until(lambda pid=child.pid: psutil.Process(pid).name() == "sleep", f"the namespaces of {name}")
            commands = f"hostname {name}; ip link set lo up; mount --bind {self.folder}/hosts /etc/hosts"
            self.on(name, "sh", "-ec", commands)
        self.on(
            "login",
            "sh",
            "-ec",
            "ip link add br0 type bridge; ip address add 10.77.0.254/24 dev br0; ip link set br0 up",
        )
        for number, node in enumerate(NODES):
            pid = str(self._holders[node])
            self.on("login", "ip", "link", "add", f"veth{number}", "type", "veth", "peer", "name", "eth0", "netns", pid)
            self.on("login", "ip", "link", "set", f"veth{number}", "master", "br0", "up")
            self.on(node, "sh", "-ec", f"ip address add {_ADDRESSES[node]}/24 dev eth0; ip link set eth0 up")

    def cable(self, node: str, state: str) -> None:
        """state: ``down`` pulls it (what runs there lives on, cut off), ``up`` puts it back."""
        self.on(node, "ip", "link", "set", "eth0", state)

    # --- the daemons ---

    def _start_munge(self) -> None:
        key = self.folder / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o600)
        words = [
            f"--{name}={self.folder}/munge.{name.partition('-')[0]}" for name in ("key-file", "pid-file", "log-file")
        ]
        words += [f"--seed-file={self.folder}/munge.seed", f"--socket={self.folder}/munge.sock", "--num-threads=2"]
        self._spawn("munged", ["munged", "--foreground", "--force", *words])
        _until((self.folder / "munge.sock").exists, "munge")

    def start_controller(self) -> None:
        self._spawn("slurmctld", self._inside("login", "slurmctld", "-D"))

    def start_node(self, node: str) -> None:
        self._spawn(f"slurmd-{node}", self._inside(node, "slurmd", "-D", "-N", node))

    def kill_node(self, node: str) -> None:
        """SIGKILL for the node's daemon; its tasks live on, and SLURM counts it as down after some 10 s."""
        self._children[f"slurmd-{node}"].kill()
        self._children.pop(f"slurmd-{node}").wait()

    def kill_processes_of(self, node: str) -> None:
        """What a power cut does: the daemon and everything that it started there."""
        self.kill_node(node)
        network = os.readlink(f"/proc/{self._holders[node]}/ns/net")
        for process in self._marked():
            try:
                if process.pid != self._holders[node] and os.readlink(f"/proc/{process.pid}/ns/net") == network:
                    process.kill()
            except (psutil.NoSuchProcess, FileNotFoundError):
                continue

    def wait_for_nodes(self) -> None:
        """Until both are up and idle, after the start or after one was lost."""
        words = ("sinfo", "-h", "-N", "-p", "short", "-t", "idle", "-o", "%N")
        _until(lambda: self.run(*words).split() == [*NODES], "nodes", BACK_S)

    def stop(self) -> None:
        """Ends every process of the cluster; the files (logs) stay."""
        for name in reversed(self._children):
            self._children[name].kill()
        for child in self._children.values():
            child.wait()
        for process in self._marked():  # steps live on without their daemon
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue

    def _marked(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            try:
                if process.pid != os.getpid() and process.environ().get(MARK) == str(self.folder):
                    found.append(process)
            except (psutil.AccessDenied, psutil.NoSuchProcess, psutil.ZombieProcess):
                continue
        return found

    # --- using it ---

    @property
    def environ(self) -> dict[str, str]:
        path = f"{os.environ.get('PATH', '')}:{SBIN}"
        return {**os.environ, "PATH": path, "SLURM_CONF": f"{self.folder}/slurm.conf", MARK: str(self.folder)}

    def on(self, where: str, *command: str) -> str:
        """Standard output of a command that must succeed, run on ``login`` or a node."""
        done = subprocess.run(
            self._inside(where, *command), env=self.environ, capture_output=True, text=True, check=False, timeout=60
        )
        assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
        return done.stdout

    def run(self, *command: str) -> str:
        return self.on("login", *command)

    def start(self, *command: str, cwd: Path, environ: dict[str, str] | None = None) -> subprocess.Popen[str]:
        """A process on the login node, its output piped."""
        return subprocess.Popen(
            self._inside("login", *command, cwd=str(cwd)),
            env={**self.environ, **(environ or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def _inside(self, where: str, *command: str, cwd: str = "/") -> list[str]:
        return ["nsenter", "-t", str(self._holders[where]), "--net", "--uts", "--mount", f"--wdns={cwd}", *command]

    def _spawn(self, name: str, command: list[str]) -> subprocess.Popen[bytes]:
        with (self.folder / f"{name}.log").open("ab") as log:
            child = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", *command],
                env=self.environ,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C in a terminal is for the tests
            )
        self._children[name] = child
        return child

    def _write_run(self) -> None:
        script = self.folder / "run"
        words = " ".join(self._inside("login", cwd='"$PWD"'))
        script.write_text(
            f'#!/bin/sh\nexport PATH="$PATH:{SBIN}" SLURM_CONF={self.folder}/slurm.conf\nexec {words} "$@"\n'
        )
        script.chmod(0o755)


def _until(condition: object, what: str, limit_s: float = READY_S) -> None:
    end = time.monotonic() + limit_s
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < end, f"{what}: not ready after {limit_s:g} s"
        time.sleep(0.02)


def main() -> None:
    why = missing()
    if why is not None:
        sys.exit(why)
    testbed = Testbed(Path(sys.argv[1]))
    print(f"up: {testbed.folder}/run COMMAND; Ctrl-C ends it", flush=True)
    try:
        signal.pause()
    except KeyboardInterrupt:
        pass
    finally:
        testbed.stop()


if __name__ == "__main__":
    main()
