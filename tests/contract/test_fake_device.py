"""The one-sided transports' way with a device's memory, without a device: a fake one whose memory
the host may not touch, so that any access of ours ends the process."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from kvpool.transport import registry
from kvpool.transport.peer.base import Read, RegionName, RegionWrite
from kvpool.transport.peer.exposure import Check
from kvpool.transport.rdma.agent import Operation, RegionPiece, RegionPlace
from kvpool.transport.rdma.slab_memory import SlabMemory
from kvrelay.errors import ConfigError, PeerError
from tests.contract import transport_kit
from tests.contract.transport_kit import Side, eventually_raises, pair

_NUMBER = 3


class _OnDevice(torch.Tensor):
    """Says that it lies on a device; its pages can't be read or written."""

    is_cuda = True  # type: ignore[assignment]
    is_cpu = False  # type: ignore[assignment]

    def get_device(self) -> int:
        return _NUMBER


@dataclass(slots=True)
class _FakeDevice:
    """Each allocation is mapped twice: without any access, and for the fake network."""

    seen: list[tuple[int, mmap.mmap]] = field(default_factory=list)
    settled: int = 0

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


@dataclass(frozen=True, slots=True, kw_only=True)
class _FakeSlabs(SlabMemory):
    fake: _FakeDevice

    def check(self) -> None:
        pass

    def allocate(self, nbytes: int) -> torch.Tensor:
        return self.fake.allocate(max(nbytes, 1))[:nbytes]

    def reaches(self, memory: torch.Tensor) -> bool:
        return True


class _FakeAgent:
    """Moves bytes within this process, between registered memory only."""

    def __init__(self, fake: _FakeDevice) -> None:
        self.fake = fake
        self.registered: list[torch.Tensor] = []
        self.registrations = 0

    def register(self, memory: torch.Tensor) -> None:
        self.registrations += 1
        self.registered.append(memory)

    def deregister(self, memory: torch.Tensor) -> None:
        self.registered = [one for one in self.registered if one is not memory]

    def key(self, memory: torch.Tensor) -> bytes:
        assert any(one is memory for one in self.registered)
        return b"key"

    def remote(self) -> _FakeAgent:
        return self

    def learn(self, region: RegionName, place: RegionPlace) -> None:
        assert place.device == _NUMBER

    def forget(self, region: RegionName) -> None: ...

    def transfer(self, operation: Operation, pieces: Sequence[RegionPiece], check: Check) -> None:
        for data, _, address in pieces:
            here, there = self.fake.reached(data.data_ptr()), self.fake.reached(address)
            target, source = (there, here) if operation is Operation.WRITE else (here, there)
            ctypes.memmove(target, source, data.nbytes)

    def rest(self) -> bool:
        return True

    def give_up(self) -> None: ...

    def close(self) -> None:
        assert not self.registered


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> _FakeDevice:
    device = _FakeDevice()
    made = monkeypatch.setattr
    made(registry, "NixlAgent", lambda incarnation, options: _FakeAgent(device))
    made(transport_kit, "slabs_of", lambda scheme: _FakeSlabs(fake=device))
    made("kvpool.transport.rdma.one_sided._settle", lambda tensors: _count(device))
    return device


def _count(device: _FakeDevice) -> None:
    device.settled += 1


@pytest.fixture
def sides(fake: _FakeDevice) -> Iterator[list[Side]]:
    found: list[Side] = []
    yield found
    for side in found:
        side.__exit__()


def _agent(side: Side) -> _FakeAgent:
    agent: _FakeAgent = side.endpoint._exposure._agent  # type: ignore[attr-defined]
    return agent


def _make(sides: list[Side]) -> Side:
    sides.append(Side("nixl"))
    return sides[-1]


def test_the_fake_device_may_not_be_accessed_by_the_host(fake: _FakeDevice) -> None:
    memory = fake.allocate(4096)
    fields = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    spans = [([int(end, 16) for end in span.split("-")], allowed) for span, allowed, *_ in fields]
    (found,) = (allowed for (a, b), allowed in spans if a <= memory.data_ptr() < b)
    assert found == "---s"


def test_registered_once_and_never_touched(fake: _FakeDevice, sides: list[Side]) -> None:
    owner, writer, connection = pair(lambda: _make(sides))
    there, here = owner.region(10_000), writer.region(10_000)
    before = [_agent(side).registrations for side in sides]
    for number in range(100):
        ctypes.memset(fake.reached(here.memory.data_ptr()), number, 10_000)
        halves = here.memory[:5000], here.memory[5000:]
        writes = [RegionWrite(there.name, 5000 * i, half) for i, half in enumerate(halves)]
        connection.write_many(writes)
        assert fake.bytes_of(there.memory) == bytes([number]) * 10_000
    ctypes.memset(fake.reached(there.memory.data_ptr()), 7, 10_000)
    connection.read_many([Read(there.name, 10, here.memory[:100])])
    assert fake.bytes_of(here.memory) == bytes([7]) * 100 + bytes([99]) * 9900
    assert [_agent(side).registrations for side in sides] == before
    assert writer.endpoint.staging_bytes == 0
    assert fake.settled == 101, "what the device still does is waited for before each batch"


def test_what_is_retired_is_reached_no_more(fake: _FakeDevice, sides: list[Side]) -> None:
    owner, writer, connection = pair(lambda: _make(sides))
    there, here = owner.region(100), writer.region(100)
    connection.write(there.name, 0, here.memory)
    owner.endpoint.deregister(there)
    eventually_raises(lambda: connection.write(there.name, 0, here.memory))
    writer.__exit__()
    with pytest.raises(PeerError):
        connection.write(there.name, 0, here.memory)
    again, other = _make(sides), owner.region(100)
    ctypes.memset(fake.reached(other.memory.data_ptr()), 1, 100)
    got = again.region(100)
    again.endpoint.connect(owner.endpoint.address).read(other.name, 0, got.memory)
    assert fake.bytes_of(got.memory) == bytes([1]) * 100


def test_memory_that_the_library_refuses_leaves_nothing_behind(
    fake: _FakeDevice, sides: list[Side], monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = _make(sides)
    refused = ConfigError("NIXL can't register 100 bytes of cuda:3")

    def register(memory: torch.Tensor) -> None:
        raise refused

    with monkeypatch.context() as patched:
        patched.setattr(_agent(owner), "register", register)
        with pytest.raises(ConfigError, match="can't register 100 bytes"):
            owner.region(100)
    assert not _agent(owner).registered
    assert owner.region(100).memory.numel() == 100
