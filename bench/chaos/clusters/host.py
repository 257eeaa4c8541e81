"""What this machine permits: a second host as a network namespace, a disk that fills, a limit."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from uuid import uuid4

import psutil

_SUBNET = "10.213.{}"
DISK_MIB = 384
_CGROUPS = Path("/sys/fs/cgroup")


class NotPermitted(Exception):
    """Says why."""


def _run(*command: str) -> None:
    """Raises NotPermitted."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotPermitted(f"{command[0]}: {error}") from None
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise NotPermitted(f"{' '.join(command[:5])}: {said[0] if said else done.returncode}")


@dataclass(slots=True, kw_only=True)
class SecondHost:
    """A network namespace, reached over another one that is the network between the two hosts. Its
    processes share no memory with the others."""

    name: str
    network: str
    near: str
    far: str
    is_lossy_possible: bool = False
    why_not_lossy: str = ""
    _rules: list[list[str]] = field(default_factory=list)

    def swallow(self, far_ports: Sequence[int], near_ports: Sequence[int]) -> None:
        """Drops what is sent to or from these ports, and tells nobody."""
        for host, ports in ((self.far, far_ports), (self.near, near_ports)):
            for port in ports:
                self._drop("to", host, "dport", port)
                self._drop("from", host, "sport", port)

    def _drop(self, direction: str, host: str, side: str, port: int) -> None:
        rule = [direction, host, "ipproto", "tcp", side, str(port), "blackhole"]
        _run("ip", "-n", self.network, "rule", "add", *rule)
        self._rules.append(rule)

    def lose(self) -> None:
        _run("tc", "-n", self.network, "qdisc", "add", "dev", _TO_FAR, "root", *_LOSSY)

    def heal(self) -> None:
        for rule in self._rules:
            with suppress(NotPermitted):
                _run("ip", "-n", self.network, "rule", "del", *rule)
        self._rules.clear()
        with suppress(NotPermitted):
            _run("tc", "-n", self.network, "qdisc", "del", "dev", _TO_FAR, "root")


_LOSSY = ("netem", "loss", "3%", "delay", "2ms", "1ms")
_TO_NEAR, _TO_FAR = "near", "far"
"""Links of the namespace between the hosts."""


@contextmanager
def second_host() -> Iterator[SecondHost]:
    """Raises NotPermitted."""
    mark = uuid4().hex[:6]
    subnet = _SUBNET.format(int(mark, 16) % 256)
    host = SecondHost(
        name=f"kvchaos-{mark}", network=f"kvnet-{mark}", near=f"{subnet}.1", far=f"{subnet}.6"
    )
    link = f"kvc{mark}"
    try:
        for namespace in (host.name, host.network):
            _run("ip", "netns", "add", namespace)
        _connect(host, link, subnet)
        _try_lossy(host)
        yield host
    finally:
        for namespace in (host.name, host.network):
            with suppress(NotPermitted):
                _run("ip", "netns", "del", namespace)
        with suppress(NotPermitted):
            _run("ip", "link", "del", link)


def _connect(host: SecondHost, link: str, subnet: str) -> None:
    """near .1 - .2 network .5 - .6 far"""
    between, inside = ("ip", "-n", host.network), ("ip", "-n", host.name)
    _run("ip", "link", "add", link, "type", "veth", "peer", "name", _TO_NEAR, "netns", host.network)
    _run(*between, "link", "add", _TO_FAR, "type", "veth", "peer", "name", link, "netns", host.name)
    ends = ((("ip",), link, 1), (between, _TO_NEAR, 2), (between, _TO_FAR, 5), (inside, link, 6))
    for command, device, number in ends:
        _run(*command, "addr", "add", f"{subnet}.{number}/30", "dev", device)
        _run(*command, "link", "set", device, "up")
    _run(*inside, "link", "set", "lo", "up")
    _run("ip", "route", "add", f"{subnet}.4/30", "via", f"{subnet}.2")
    _run(*inside, "route", "add", "default", "via", f"{subnet}.5")
    forward = "echo 1 > /proc/sys/net/ipv4/ip_forward"
    _run("ip", "netns", "exec", host.network, "sh", "-c", forward)


def _try_lossy(host: SecondHost) -> None:
    try:
        host.lose()
        host.is_lossy_possible = True
    except NotPermitted as error:
        host.why_not_lossy = str(error)
    host.heal()


def listening_ports(pid: int) -> set[int]:
    with suppress(psutil.Error):
        links = psutil.Process(pid).net_connections("tcp")
        return {one.laddr.port for one in links if one.status == psutil.CONN_LISTEN}
    return set()


@dataclass(frozen=True, slots=True, kw_only=True)
class SmallDisk:
    """A file system of its own, for the disk tier."""

    folder: Path

    def fill(self) -> None:
        with suppress(OSError), (self.folder / "filler").open("wb") as file:
            while True:
                file.write(bytes(2**20))
                file.flush()

    def free(self) -> None:
        (self.folder / "filler").unlink(missing_ok=True)


@contextmanager
def small_disk(folder: Path) -> Iterator[SmallDisk]:
    """Raises NotPermitted."""
    folder.mkdir()
    _run("mount", "-t", "tmpfs", "-o", f"size={DISK_MIB}m", "tmpfs", str(folder))
    try:
        yield SmallDisk(folder=folder)
    finally:
        _run("umount", "--lazy", str(folder))


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryGroup:
    """A cgroup, of version 1 or 2."""

    folder: Path

    @property
    def _limit(self) -> Path:
        old = self.folder / "memory.limit_in_bytes"
        return old if old.exists() else self.folder / "memory.max"

    def take(self, pid: int) -> None:
        (self.folder / "cgroup.procs").write_text(str(pid))

    def limit(self, limit_bytes: int) -> None:
        with suppress(OSError):
            self._limit.write_text(str(limit_bytes))

    def lift(self) -> None:
        with suppress(OSError):
            self._limit.write_text("-1" if self._limit.name == "memory.limit_in_bytes" else "max")


@contextmanager
def memory_group() -> Iterator[MemoryGroup]:
    """Raises NotPermitted."""
    old = _CGROUPS / "memory"
    folder = (old if old.is_dir() else _CGROUPS) / f"kvchaos-{uuid4().hex[:6]}"
    group = MemoryGroup(folder=folder)
    try:
        folder.mkdir()
        if not group._limit.exists():
            raise OSError(f"{folder} has no memory limit")
    except OSError as error:
        with suppress(OSError):
            folder.rmdir()
        raise NotPermitted(str(error)) from None
    try:
        yield group
    finally:
        for pid in (folder / "cgroup.procs").read_text().split():
            with suppress(OSError):
                (folder.parent / "cgroup.procs").write_text(pid)
        with suppress(OSError):
            os.rmdir(folder)
