"""Two hosts on one machine: network namespaces joined by a cable whose rate can be set and whose bytes are counted.

Needs root, Linux, iproute2 (``ip``, ``tc``) and util-linux (``unshare``, ``nsenter``, ``setpriv``). Nothing is added to
the machine's own network; the namespaces end with the process that made them.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

SBIN = "/usr/sbin:/sbin"
STORE_ADDRESS = "10.78.0.1"  # of the first host
HEADER_BYTES = 66  # of a TCP packet on Ethernet: 14 + 20 + 32, the time stamp option included
_TOOLS = ("ip", "tc", "unshare", "nsenter", "setpriv")


def why_not() -> str | None:
    """Why there can be no such hosts here; None if there can."""
    absent = [name for name in _TOOLS if shutil.which(name, path=_path()) is None]
    if absent:
        return f"not installed: {', '.join(absent)} (Debian: iproute2, util-linux)"
    probe = ["unshare", "--net", "ip", "link", "add", "cable0", "type", "veth"]
    done = subprocess.run(probe, env=_environment(), capture_output=True, text=True, check=False)
    return f"this user may not make network namespaces, root may: {done.stderr.strip()}" if done.returncode else None


@dataclass(frozen=True)
class Sent:
    """What has left an interface since it was made. A packet may be a large one that the card would cut up."""

    nbytes: int
    packets: int

    def since(self, before: Sent) -> Sent:
        return Sent(self.nbytes - before.nbytes, self.packets - before.packets)

    @property
    def payload(self) -> int:
        """Bytes without the headers of the packets."""
        return self.nbytes - HEADER_BYTES * self.packets


def sent_by_host(interface: str = "eth0") -> Sent:
    """Of the interface that the calling process sees: its host's."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name.strip() == interface:
            fields = rest.split()
            return Sent(int(fields[8]), int(fields[9]))
    raise RuntimeError(f"no interface {interface} in this network namespace")


class Hosts:
    """Two of them, 10.78.0.1 and 10.78.0.2, each with one interface ``eth0``."""

    def __init__(self) -> None:
        self._holders: list[subprocess.Popen[bytes]] = []
        try:
            self._make()
        except BaseException:
            self.close()
            raise

    def __len__(self) -> int:
        return 2

    def _make(self) -> None:
        own = os.readlink("/proc/self/ns/net")
        for _ in range(len(self)):
            hold = ["setpriv", "--pdeathsig", "KILL", "unshare", "--net", "sleep", "infinity"]
            holder = subprocess.Popen(hold, env=_environment(), stdin=subprocess.DEVNULL)
            self._holders.append(holder)
            end = time.monotonic() + 20
            while os.readlink(f"/proc/{holder.pid}/ns/net") == own:
                if time.monotonic() > end:
                    raise RuntimeError("the network namespace was not there after 20 s")
                time.sleep(0.01)
        other = str(self._holders[1].pid)
        self._on(0, "ip", "link", "add", "eth0", "type", "veth", "peer", "name", "eth0", "netns", other)
        for host in range(len(self)):
            self._on(host, "ip", "address", "add", f"10.78.0.{host + 1}/24", "dev", "eth0")
            for interface in ("lo", "eth0"):
                self._on(host, "ip", "link", "set", interface, "up")

    def set_rate(self, megabits: float | None) -> None:
        """Of what each host sends; None: as fast as memory."""
        for host in range(len(self)):
            if megabits is None:
                self._on(host, "tc", "qdisc", "del", "dev", "eth0", "root", may_fail=True)
            else:
                rate = ("tbf", "rate", f"{megabits:g}mbit", "burst", "256kb", "latency", "400ms")
                self._on(host, "tc", "qdisc", "replace", "dev", "eth0", "root", *rate)

    def entrance(self, host: int) -> list[str]:
        """The words before a command that is to run on the host."""
        nsenter = shutil.which("nsenter", path=_path())
        assert nsenter is not None
        return [nsenter, "-t", str(self._holders[host].pid), "--net"]

    def _on(self, host: int, *command: str, may_fail: bool = False) -> None:
        words = [*self.entrance(host), *command]
        done = subprocess.run(words, env=_environment(), capture_output=True, text=True, check=False)
        if done.returncode and not may_fail:
            raise RuntimeError(f"{' '.join(words)}: {done.stderr.strip()}")

    def close(self) -> None:
        for holder in self._holders:
            holder.kill()
        for holder in self._holders:
            holder.wait()
        self._holders.clear()

    def __enter__(self) -> Hosts:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _path() -> str:
    return f"{os.environ.get('PATH', '')}:{SBIN}"


def _environment() -> dict[str, str]:
    return {**os.environ, "PATH": _path()}
