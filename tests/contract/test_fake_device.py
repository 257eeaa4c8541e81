"""The one-sided transports' way with a device's memory, without a device: see fake_device.py."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from kvpool.transport.peer.base import Connection, Read, RegionName, RegionWrite
from kvrelay.errors import ConfigError, PeerError
from tests.contract.fake_device import FakeDevice, agent_of, another_process, install
from tests.contract.transport_kit import PATIENCE_S, Side, eventually_raises, pair, until


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    device = FakeDevice()
    install(device, monkeypatch.setattr)
    return device


@pytest.fixture
def sides(fake: FakeDevice) -> Iterator[list[Side]]:
    found: list[Side] = []
    yield found
    for side in found:
        side.__exit__()


@pytest.fixture(params=["nixl", "ucx"])
def make(request: pytest.FixtureRequest, sides: list[Side]) -> Callable[[], Side]:
    def made() -> Side:
        sides.append(Side(request.param))
        return sides[-1]

    return made


def test_the_fake_device_may_not_be_accessed_by_the_host(fake: FakeDevice) -> None:
    memory = fake.allocate(4096)
    fields = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    spans = [([int(end, 16) for end in span.split("-")], allowed) for span, allowed, *_ in fields]
    (found,) = (allowed for (a, b), allowed in spans if a <= memory.data_ptr() < b)
    assert found == "---s"


def test_registered_once_and_never_touched(fake: FakeDevice, make: Callable[[], Side]) -> None:
    owner, writer, connection = pair(make)
    there, here = owner.region(10_000), writer.region(10_000)
    before = [agent_of(side).registrations for side in (owner, writer)]
    for number in range(100):
        ctypes.memset(fake.reached(here.memory.data_ptr()), number, 10_000)
        halves = here.memory[:5000], here.memory[5000:]
        writes = [RegionWrite(there.name, 5000 * i, half) for i, half in enumerate(halves)]
        connection.write_many(writes)
        assert fake.bytes_of(there.memory) == bytes([number]) * 10_000
    ctypes.memset(fake.reached(there.memory.data_ptr()), 7, 10_000)
    connection.read_many([Read(there.name, 10, here.memory[:100])])
    assert fake.bytes_of(here.memory) == bytes([7]) * 100 + bytes([99]) * 9900
    assert [agent_of(side).registrations for side in (owner, writer)] == before
    assert writer.endpoint.staging_bytes == 0
    told = "what the device still does is waited for before each batch"
    assert fake.log == ["settled", "transferred"] * 101, told


def test_what_is_retired_is_reached_no_more(fake: FakeDevice, make: Callable[[], Side]) -> None:
    owner, writer, connection = pair(make)
    there, here = owner.region(100), writer.region(100)
    connection.write(there.name, 0, here.memory)
    owner.endpoint.deregister(there)
    eventually_raises(lambda: connection.write(there.name, 0, here.memory))
    writer.__exit__()
    with pytest.raises(PeerError):
        connection.write(there.name, 0, here.memory)
    again, other = make(), owner.region(100)
    ctypes.memset(fake.reached(other.memory.data_ptr()), 1, 100)
    got = again.region(100)
    again.endpoint.connect(owner.endpoint.address).read(other.name, 0, got.memory)
    assert fake.bytes_of(got.memory) == bytes([1]) * 100


def test_memory_that_the_library_refuses_leaves_nothing_behind(
    make: Callable[[], Side], monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = make()
    refused = ConfigError("NIXL can't register 100 bytes of cuda:3")

    def register(memory: torch.Tensor) -> None:
        raise refused

    with monkeypatch.context() as patched:
        patched.setattr(agent_of(owner), "register", register)
        with pytest.raises(ConfigError, match="can't register 100 bytes"):
            owner.region(100)
    assert not agent_of(owner).registered
    assert owner.region(100).memory.numel() == 100


class Writing:
    """A write to a peer's region, on a thread of its own, over a network that stalls."""

    def __init__(self, writer: Side, connection: Connection, region: RegionName) -> None:
        self.agent, self.failure = agent_of(writer), ""
        self._source, self._target = writer.region(100), (connection, region)
        self.source = self._source.memory
        self.agent.passes.clear()
        self.thread = threading.Thread(target=self._write)
        self.thread.start()
        assert self.agent.begun.wait(PATIENCE_S)

    def _write(self) -> None:
        connection, region = self._target
        try:
            connection.write(region, 0, self.source)
        except PeerError as error:
            self.failure = str(error)


def test_a_region_is_kept_until_a_write_to_it_has_ended(
    fake: FakeDevice, make: Callable[[], Side], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is retired while the write runs, whose bytes still come into it."""
    owner, writer, connection = pair(make)
    there, peer, asked = owner.region(100), connection._peer, threading.Event()  # type: ignore[attr-defined]
    retire = peer.retire
    monkeypatch.setattr(peer, "retire", lambda name: (asked.set(), retire(name)))
    writing = Writing(writer, connection, there.name)
    ctypes.memset(fake.reached(writing.source.data_ptr()), 5, 100)
    owner.endpoint.deregister(there)
    assert asked.wait(PATIENCE_S)
    connection.notify(b"the peer still writes")
    assert owner.next() == b"the peer still writes"
    assert agent_of(owner).holds(there.memory)
    writing.agent.passes.set()
    writing.thread.join()
    assert not writing.failure
    assert fake.bytes_of(there.memory) == bytes([5]) * 100
    until(lambda: not agent_of(owner).holds(there.memory))
    with pytest.raises(PeerError):
        connection.write(there.name, 0, writing.source)


def test_a_write_ends_with_the_peer_that_is_killed(
    fake: FakeDevice, make: Callable[[], Side]
) -> None:
    writer = make()
    with another_process(writer.endpoint.address) as process:
        connection = writer.connected.get(timeout=PATIENCE_S)
        writing = Writing(writer, connection, RegionName(writer.next().decode()))
        process.kill()
        writing.thread.join(PATIENCE_S)
    assert writing.failure == f"{connection.peer_address} is gone"
    assert writer.lost.get(timeout=PATIENCE_S) is connection


def test_memory_is_freed_when_its_writer_is_killed(
    fake: FakeDevice, make: Callable[[], Side]
) -> None:
    """Not before: it was in the middle of a write."""
    owner = make()
    there = owner.region(100)
    with another_process(owner.endpoint.address, there.name) as process:
        connection = owner.connected.get(timeout=PATIENCE_S)
        owner.next()
        owner.endpoint.deregister(there)
        assert agent_of(owner).holds(there.memory)
        process.kill()
        until(lambda: not agent_of(owner).holds(there.memory))
    assert owner.lost.get(timeout=PATIENCE_S) is connection
