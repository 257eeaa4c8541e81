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

_NETWORK = "10.213.{}"
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
    """A network namespace behind a veth pair: its processes share no memory with the others."""

    name: str
    link: str
    near: str
    far: str
    is_lossy_possible: bool = False
    why_not_lossy: str = ""
    _rules: list[list[str]] = field(default_factory=list)

    def swallow(self, far_ports: Sequence[int], near_ports: Sequence[int]) -> None:
        """Drops what goes there, to or from these ports."""
        ports = [("dport", port) for port in far_ports] + [("sport", p) for p in near_ports]
        for side, port in ports:
            rule = ["to", self.far, "ipproto", "tcp", side, str(port), "blackhole"]
            _run("ip", "rule", "add", *rule)
            self._rules.append(rule)

    def lose(self) -> None:
        _run("tc", "qdisc", "add", "dev", self.link, "root", *_LOSSY)

    def heal(self) -> None:
        for rule in self._rules:
            with suppress(NotPermitted):
                _run("ip", "rule", "del", *rule)
        self._rules.clear()
        with suppress(NotPermitted):
            _run("tc", "qdisc", "del", "dev", self.link, "root")


_LOSSY = ("netem", "loss", "3%", "delay", "2ms", "1ms")


@contextmanager
def second_host() -> Iterator[SecondHost]:
    """Raises NotPermitted."""
    mark = uuid4().hex[:6]
    network = _NETWORK.format(int(mark, 16) % 256)
    name, link, peer = f"kvchaos-{mark}", f"kvc{mark}n", f"kvc{mark}f"
    host = SecondHost(name=name, link=link, near=f"{network}.1", far=f"{network}.2")
    _run("ip", "netns", "add", name)
    try:
        _run("ip", "link", "add", link, "type", "veth", "peer", "name", peer)
        _run("ip", "link", "set", peer, "netns", name)
        _run("ip", "addr", "add", f"{host.near}/24", "dev", link)
        _run("ip", "link", "set", link, "up")
        inside = ("ip", "-n", name)
        _run(*inside, "addr", "add", f"{host.far}/24", "dev", peer)
        _run(*inside, "link", "set", peer, "up")
        _run(*inside, "link", "set", "lo", "up")
        _try_lossy(host)
        yield host
    finally:
        host.heal()
        for command in (("ip", "link", "del", link), ("ip", "netns", "del", name)):
            with suppress(NotPermitted):
                _run(*command)


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
