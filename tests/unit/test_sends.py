"""Pieces that are sent from this worker's own memory: how much of it, and what runs meanwhile.

The connections are doubles that map nothing; memory and threads are real.
"""

from __future__ import annotations

import queue
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
import torch

from cluster.worker.mover import Mover
from cluster.worker.peers import PeerLinks
from kvpool.core.transfer.commands import SlabWritten, WriteSlab
from kvpool.memory.kv_memory import KvMemory
from kvpool.transport.endpoints import Endpoints, SharedRegion
from kvpool.transport.send_buffers import SEND_BUFFERS, SendBuffers
from kvrelay.errors import PeerError
from kvrelay.types import Incarnation
from tests.unit.loop_kit import peer_hello
from tests.unit.test_prefill_scheduler import write_of
from tests.unit.worker_kit import LAYOUT

SLAB_BYTES = 1024
PATIENCE_S = 20.0


class Gate:
    """Lets through as many as it is told to."""

    def __init__(self, let: int) -> None:
        self._let = threading.Semaphore(let)
        self.comes: queue.SimpleQueue[str] = queue.SimpleQueue()

    def open(self, times: int = 1) -> None:
        self._let.release(times)

    def wait(self, who: str) -> None:
        self.comes.put(who)
        assert self._let.acquire(timeout=PATIENCE_S)


class Unmapped:
    """A connection whose writes wait at a gate."""

    peer_address = "loopback:peer"

    def __init__(self, gate: Gate) -> None:
        self.gate = gate

    def window(self, region: str) -> None:
        return None

    def write(self, region: str, offset: int, source: torch.Tensor) -> None:
        self.gate.wait("write")


class Links:
    def __init__(self, endpoints: Endpoints) -> None:
        self.endpoints = endpoints
        self.connections: dict[Incarnation, Unmapped] = {}

    def line(self, peer: Incarnation) -> str:
        return peer

    def connection(self, peer: Incarnation) -> Unmapped:
        return self.connections[peer]

    def notify(self, peer: Incarnation, message: object) -> None:
        pass


class Memory(KvMemory):
    """A device's: what is queued there is done when the gate lets it through."""

    gate: Gate | None = None

    def mark(self) -> Callable[[], None]:
        gate = self.gate
        assert gate is not None
        gate.comes.put("queued")
        return lambda: gate.wait("waited for")


class Sender:
    def __init__(self, links: Links, memory: KvMemory, monkeypatch: pytest.MonkeyPatch) -> None:
        self.links = links
        self.outcomes: queue.SimpleQueue[object] = queue.SimpleQueue()
        self.mover = Mover(
            memory,
            links,  # type: ignore[arg-type]
            "5a" * 16,
            slabs=0,
            slab_bytes=SLAB_BYTES,
            post=self.outcomes.put,
            crashed=self.outcomes.put,
        )
        self.held: Counter[str] = Counter()
        self._count(monkeypatch)

    def _count(self, monkeypatch: pytest.MonkeyPatch) -> None:
        register, deregister = self.links.endpoints.register, self.links.endpoints.deregister

        def registers(nbytes: int) -> SharedRegion:
            self.held.update(("now", "ever"))
            return register(nbytes)

        def deregisters(region: SharedRegion) -> None:
            self.held.subtract(("now",))
            deregister(region)

        monkeypatch.setattr(self.links.endpoints, "register", registers)
        monkeypatch.setattr(self.links.endpoints, "deregister", deregisters)

    def peer(self, name: str, let: int = 0) -> Gate:
        gate = Gate(let)
        self.links.connections[Incarnation(name)] = Unmapped(gate)
        return gate

    def send(self, peer: str, name: str) -> WriteSlab:
        job = replace(write_of(name, 3), peer=Incarnation(peer))
        self.mover.put(job)
        return job

    def sent(self) -> str:
        outcome = self.outcomes.get(timeout=PATIENCE_S)
        assert isinstance(outcome, SlabWritten) and outcome.error is None, outcome
        return outcome.key.request_id


@pytest.fixture
def endpoints() -> Iterator[Endpoints]:
    links = PeerLinks(["loopback"], peer_hello("sender"), lambda event: None)
    yield links.endpoints
    links.close()


@pytest.fixture
def sender(endpoints: Endpoints, monkeypatch: pytest.MonkeyPatch) -> Iterator[Sender]:
    made = Sender(Links(endpoints), KvMemory(LAYOUT, 8, "cpu"), monkeypatch)
    yield made
    made.mover.close()


def test_two_pieces_of_a_connection_have_memory_at_once(sender: Sender) -> None:
    """One is sent while the next is gathered; the third waits."""
    gate = sender.peer("slow")
    for name in ("a", "b", "c", "d"):
        sender.send("slow", name)
    gate.comes.get(timeout=PATIENCE_S)
    sender.peer("other", let=1)
    sender.send("other", "e")
    assert sender.sent() == "e", "its own line goes on"
    gate.open(4)
    assert [sender.sent() for _ in range(4)] == ["a", "b", "c", "d"]
    assert sender.held["now"] == 3, "two of the slow one, and one of the other"


def test_nothing_is_registered_for_a_transfer(sender: Sender) -> None:
    sender.peer("peer", let=100)
    for number in range(100):
        sender.send("peer", str(number))
    assert [sender.sent() for _ in range(100)] == [*map(str, range(100))]
    assert sender.held["ever"] <= 2


def test_peers_that_hang_leave_each_other_peer_its_memory(sender: Sender) -> None:
    """Two have two each, which is all that there is for a second one."""
    for peer in ("p", "q", "r"):
        gate = sender.peer(peer)
        sender.send(peer, "first")
        gate.comes.get(timeout=PATIENCE_S)
        sender.send(peer, "second")
    sender.peer("well", let=9)
    for number in range(9):
        sender.send("well", str(number))
    assert [sender.sent() for _ in range(9)] == [*map(str, range(9))]
    assert sender.held["ever"] == SEND_BUFFERS + 2, "one for each of the others"
    for connection in sender.links.connections.values():
        connection.gate.open(2)
    assert {sender.sent() for _ in range(6)} == {"first", "second"}


def test_a_larger_slab_gets_larger_memory(sender: Sender) -> None:
    buffers = SendBuffers(sender.links.endpoints, SLAB_BYTES)
    connection: Any = Unmapped(Gate(0))
    small = buffers.take(connection, 100)
    assert small.memory.numel() == SLAB_BYTES
    buffers.give_back(connection, small)
    large = buffers.take(connection, 4 * SLAB_BYTES)
    assert large.memory.numel() == 4 * SLAB_BYTES and sender.held["now"] == 1
    buffers.close()
    buffers.give_back(connection, large)
    assert sender.held["now"] == 0


def test_who_waits_for_memory_does_not_hold_up_the_end(endpoints: Endpoints) -> None:
    buffers = SendBuffers(endpoints, SLAB_BYTES)
    connection: Any = Unmapped(Gate(0))
    taken = [buffers.take(connection, 100) for _ in range(2)]
    with ThreadPoolExecutor(1) as pool:
        third = pool.submit(buffers.take, connection, 100)
        with suppress(TimeoutError):
            third.result(timeout=0.1)
        assert not third.done()
        buffers.close()
        with pytest.raises(PeerError, match="this worker closes its links"):
            third.result(timeout=PATIENCE_S)
    for buffer in taken:
        buffers.give_back(connection, buffer)


def test_a_gather_is_queued_behind_the_one_before(
    endpoints: Endpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only who sends a piece waits for its gather, and sends nothing before."""
    memory = Memory(LAYOUT, 8, "cpu")
    memory.gate = device = Gate(0)
    sender = Sender(Links(endpoints), memory, monkeypatch)
    gate = sender.peer("peer", let=2)
    sender.send("peer", "a")
    sender.send("peer", "b")
    assert sorted(device.comes.get(timeout=PATIENCE_S) for _ in range(3)) == [
        "queued",
        "queued",
        "waited for",
    ]
    assert gate.comes.empty(), "nothing is sent that is not there"
    device.open()
    assert gate.comes.get(timeout=PATIENCE_S) == "write"
    device.open()
    assert [sender.sent(), sender.sent()] == ["a", "b"]
    sender.mover.close()
