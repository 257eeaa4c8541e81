"""A device without a device: memory that the host may not touch, so that any access of ours ends
the process, and a network that reaches it."""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from multiprocessing.connection import Connection as Pipe
from multiprocessing.context import ForkServerProcess

import torch

from kvpool.transport import endpoints, gpudirect, link_kind, registry
from kvpool.transport.peer.base import RegionName
from kvpool.transport.peer.exposure import Check
from kvpool.transport.rdma import one_sided
from kvpool.transport.rdma.agent import HOST, Operation, RegionPiece, RegionPlace
from kvpool.transport.rdma.slab_memory import SlabMemory
from kvrelay.errors import ConfigError, PeerError
from tests.contract import transport_kit
from tests.contract.transport_kit import PATIENCE_S, Side
from tests.forks import forks

NUMBER = 3
"""Of the device."""
_DEVICE_KEY = b"of the device"


class _OnDevice(torch.Tensor):
    """Says that it lies on a device; its pages can't be read or written."""

    is_cuda = True  # type: ignore[assignment]
    is_cpu = False  # type: ignore[assignment]

    def get_device(self) -> int:
        return NUMBER

    def __repr__(self) -> str:  # type: ignore[override]
        return f"<{self.numel()} bytes of the fake device>"


@dataclass(slots=True)
class FakeDevice:
    """Each allocation is mapped twice: without any access, and for the fake network. `refusal`: why
    that takes none of it. `log`: what was done, in order."""

    seen: list[tuple[int, mmap.mmap]] = field(default_factory=list)
    refusal: str = ""
    log: list[str] = field(default_factory=list)

    def allocate(self, nbytes: int) -> torch.Tensor:
        fd = os.memfd_create("fake-device")
        try:
            os.ftruncate(fd, nbytes)
            hidden, shown = mmap.mmap(fd, nbytes), mmap.mmap(fd, nbytes)
        finally:
            os.close(fd)
        tensor = torch.frombuffer(hidden, dtype=torch.uint8).as_subclass(_OnDevice)
        assert not ctypes.CDLL(None).mprotect(ctypes.c_void_p(tensor.data_ptr()), nbytes, 0)
        self.seen.append((tensor.data_ptr(), shown))
        return tensor

    def reached(self, address: int) -> int:
        """Where the fake network finds these bytes."""
        for start, shown in self.seen:
            if start <= address < start + len(shown):
                return ctypes.addressof(ctypes.c_char.from_buffer(shown)) + address - start
        return address

    def bytes_of(self, tensor: torch.Tensor) -> bytes:
        return ctypes.string_at(self.reached(tensor.data_ptr()), tensor.numel())

    def settle(self, tensors: object) -> None:
        self.log.append("settled")


@dataclass(frozen=True, slots=True, kw_only=True)
class _FakeSlabs(SlabMemory):
    fake: FakeDevice

    def check(self) -> None:
        pass

    def allocate(self, nbytes: int) -> torch.Tensor:
        return self.fake.allocate(max(nbytes, 1))[:nbytes]

    def reaches(self, memory: torch.Tensor) -> bool:
        return True


class FakeAgent:
    """Moves bytes within this process, between registered memory only. While `passes` is cleared
    the network stalls."""

    def __init__(self, fake: FakeDevice) -> None:
        self.fake = fake
        self.registered: list[torch.Tensor] = []
        self.registrations = 0
        self.begun = threading.Event()
        self.passes = threading.Event()
        self.passes.set()
        self.gives_up = False

    def register(self, memory: torch.Tensor) -> None:
        if memory.is_cuda and self.fake.refusal:
            raise ConfigError(self.fake.refusal)
        self.registrations += 1
        self.registered.append(memory)

    def deregister(self, memory: torch.Tensor) -> None:
        self.registered = [one for one in self.registered if one is not memory]

    def holds(self, memory: torch.Tensor) -> bool:
        return any(one is memory for one in self.registered)

    def key(self, memory: torch.Tensor) -> bytes:
        assert self.holds(memory)
        return _DEVICE_KEY if memory.is_cuda else b"of the host"

    def remote(self) -> FakeAgent:
        return self

    def learn(self, region: RegionName, place: RegionPlace) -> None:
        assert place.device == (NUMBER if place.key == _DEVICE_KEY else HOST)

    def forget(self, region: RegionName) -> None: ...

    def transfer(self, operation: Operation, pieces: Sequence[RegionPiece], check: Check) -> None:
        self.begun.set()
        while not self.passes.wait(0.005):
            check()
        if self.gives_up:
            raise PeerError("this end closes")
        self.fake.log.append("transferred")
        for data, _, address in pieces:
            here, there = self.fake.reached(data.data_ptr()), self.fake.reached(address)
            target, source = (there, here) if operation is Operation.WRITE else (here, there)
            ctypes.memmove(target, source, data.nbytes)

    def rest(self) -> bool:
        return True

    def give_up(self) -> None:
        self.gives_up = True
        self.passes.set()

    def close(self) -> None:
        assert not self.registered


def install_network(device: FakeDevice, put: Callable[[object, str, object], None]) -> None:
    """nixl and ucx move bytes over the fake network from now on. `put` sets an attribute."""
    put(registry, "NixlAgent", lambda incarnation, options: FakeAgent(device))
    put(registry, "UcxAgent", lambda options, slabs: FakeAgent(device))
    put(one_sided, "_settle", device.settle)


def reaches_devices(
    put: Callable[[object, str, object], None],
    *,
    no_rdma: str | None = None,
    no_module: str | None = None,
) -> None:
    """What UCX and the system say of RDMA and of GPUs' memory from now on. What was tried before is
    forgotten. `put` sets an attribute."""
    put(link_kind, "rdma_obstacle", lambda scheme, ucx: no_rdma)
    put(link_kind, "cuda_obstacle", lambda scheme, ucx: None)
    put(gpudirect, "no_gpudirect", lambda device: no_module)
    put(endpoints, "_refusal", cache(endpoints._refusal.__wrapped__))


def install(device: FakeDevice, put: Callable[[object, str, object], None]) -> None:
    """The slabs of a test's sides lie on the device, too."""
    install_network(device, put)
    put(transport_kit, "slabs_of", lambda scheme: _FakeSlabs(fake=device))


def agent_of(side: Side) -> FakeAgent:
    agent: FakeAgent = side.endpoint._exposure._agent  # type: ignore[attr-defined]
    return agent


@contextmanager
def another_process(address: str, region: str = "") -> Iterator[ForkServerProcess]:
    """A peer with a device of its own. It tells the name of its region, with `region` once it is in
    the middle of a write to that. Killed in the end."""
    ours, theirs = forks().Pipe()
    process = forks().Process(target=_be_a_peer, args=(address, region, theirs))
    process.start()
    theirs.close()
    try:
        yield process
    finally:
        process.kill()
        process.join(PATIENCE_S)
        process.close()
        ours.close()


def _be_a_peer(address: str, region: str, end: Pipe) -> None:
    install(FakeDevice(), setattr)
    with Side(address.partition(":")[0]) as side:
        connection, own = side.endpoint.connect(address), side.region(100)
        if region:
            agent_of(side).passes.clear()
            write = (RegionName(region), 0, own.memory)
            threading.Thread(target=connection.write, args=write, daemon=True).start()
            agent_of(side).begun.wait()
        connection.notify(own.name.encode())
        end.poll(None)
