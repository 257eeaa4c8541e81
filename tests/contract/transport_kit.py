"""One side of a transport under test, and what a process holds before and after."""

from __future__ import annotations

import os
import queue
import threading
import time
import uuid
from collections.abc import Callable
from typing import Any, Self

import pytest
import torch

from kvpool.transport.mapped import memfd
from kvpool.transport.peer.base import SEND_TIMEOUT_S, Callbacks, Connection, Region, RegionName
from kvpool.transport.rdma.slab_memory import SlabMemory, SlabPlace
from kvpool.transport.rdma.ucx_options import UcxOptions
from kvpool.transport.registry import open_endpoint, schemes
from kvrelay.errors import ConfigError, PeerError
from kvrelay.types import Incarnation

PATIENCE_S = 20.0
ON_GPU = {"nixl-gpu": "nixl", "ucx-gpu": "ucx"}
"""# case |-> the transport, whose regions are then memory of a device"""
SECRET = b"known"


class Side:
    """An endpoint whose callbacks queue; `reading` cleared makes it a peer that does not read."""

    def __init__(
        self,
        scheme: str,
        *,
        send_timeout_s: float = SEND_TIMEOUT_S,
        secret: bytes = SECRET,
        ucx: UcxOptions | None = None,
        device: str = "cuda",
    ) -> None:
        self.connected: queue.Queue[Connection] = queue.Queue()
        self.messages: queue.Queue[bytes] = queue.Queue()
        self.lost: queue.Queue[Connection] = queue.Queue()
        self.reading = threading.Event()
        self.reading.set()
        self.waiting = False
        self.threads: set[int] = set()
        self.on_message: Callable[[Connection], None] = lambda connection: None
        self.endpoint = open_endpoint(
            ON_GPU.get(scheme, scheme),
            Incarnation(uuid.uuid4().hex),
            Callbacks(
                on_connect=self.connected.put, on_message=self._receive, on_lost=self.lost.put
            ),
            send_timeout_s=send_timeout_s,
            secret=secret,
            ucx=ucx,
            slabs=slabs_of(scheme),
            device=device,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.reading.set()
        self.endpoint.close()

    def region(self, nbytes: int) -> Region:
        return self.endpoint.register(nbytes)

    def next(self) -> bytes:
        return self.messages.get(timeout=PATIENCE_S)

    def _receive(self, connection: Connection, payload: bytes) -> None:
        self.waiting = True
        self.reading.wait()
        self.waiting = False
        self.threads.add(threading.get_ident())
        self.messages.put(payload)
        self.on_message(connection)


def slabs_of(scheme: str) -> SlabMemory:
    if scheme in ON_GPU:
        return SlabMemory(place=SlabPlace.DEVICE, device="cuda:0")
    return SlabMemory()


MakeSide = Callable[..., Side]


def parameters(*left_out: str) -> list[Any]:
    """Every scheme of the registry but these; those for devices where there is one."""
    marks = {name: [pytest.mark.gpu] for name in ("cuda_ipc", *ON_GPU)}
    names = (scheme for scheme in (*schemes(), *ON_GPU) if scheme not in left_out)
    return [pytest.param(name, marks=marks.get(name, [])) for name in names]


def load(scheme: str) -> None:
    """Opens an endpoint once, where the scheme's extra is installed."""
    try:
        Side(scheme).endpoint.close()
    except ConfigError as error:
        if "needs its extra" not in str(error):
            raise


def shareable(scheme: str, nbytes: int) -> torch.Tensor:
    """Memory that an endpoint of this scheme can adopt."""
    if scheme == "cuda_ipc" or scheme in ON_GPU:
        return torch.zeros(nbytes, dtype=torch.uint8, device="cuda")
    return memfd.allocate(nbytes)


def held() -> tuple[int, int, int]:
    """Threads, descriptors and mappings of regions that this process has."""
    with open("/proc/self/maps") as maps:
        mapped = sum("/memfd:kvrelay-" in line for line in maps)
    return threading.active_count(), len(os.listdir("/proc/self/fd")), mapped


def no_more_than(before: tuple[int, int, int]) -> bool:
    """Are `held` now; what earlier tests held may have gone since."""
    return all(now <= then for now, then in zip(held(), before, strict=True))


def is_mapped(name: RegionName) -> bool:
    with open("/proc/self/maps") as maps:
        return any(f"/memfd:{name} " in line for line in maps)


def send_until_refused(connection: Connection) -> tuple[int, str]:
    """60 kB messages, numbered from 0, until notify raises: how many were taken, and why."""
    for sent in range(10_000):
        try:
            connection.notify(sent.to_bytes(4, "little") + bytes(60_000))
        except PeerError as error:
            return sent, str(error)
    raise AssertionError("600 MB were taken though no one reads")


def until(condition: Callable[[], bool]) -> None:
    """Returns as soon as the condition holds; fails when it does not within PATIENCE_S."""
    deadline_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline_s, "the condition did not come true"
        time.sleep(0.002)


def pair(make_side: MakeSide) -> tuple[Side, Side, Connection]:
    owner, writer = make_side(), make_side()
    return owner, writer, writer.endpoint.connect(owner.endpoint.address)


def eventually_raises(action: Callable[[], object]) -> None:
    """A peer's end is known after a moment at most."""

    def raises() -> bool:
        try:
            action()
        except PeerError:
            return True
        return False

    until(raises)


def run_all(work: list[Callable[[], None]]) -> None:
    threads = [threading.Thread(target=run) for run in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def mapped_inode(pid: int | str, region: RegionName) -> int | None:
    """The inode under which process `pid` has the region mapped, from /proc; None if it has not."""
    wanted = f"/memfd:{region}"
    with open(f"/proc/{pid}/maps") as maps:
        for line in maps:
            # address perms offset device inode path
            fields = line.split(maxsplit=5)
            if len(fields) == 6 and fields[5].split(" (deleted)")[0].strip() == wanted:
                return int(fields[4])
    return None
