"""What the loop's thread calls returns at once, whatever a peer does. Over real sockets."""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace

import pytest

from cluster.worker import peers
from cluster.worker.mover import Mover
from cluster.worker.peers import PeerLinks
from engine.core.step import KvMove
from kvpool.core.transfer.commands import FromPeer, LinkMeasured, PeerLost, SendPeer, SlabWritten
from kvpool.core.transfer.messages import PeerHello, RenewLeases
from kvpool.memory.kv_memory import KvMemory
from kvpool.transport.peer.base import Connection
from kvrelay.errors import PeerError
from kvrelay.types import Incarnation, RequestKey
from tests.unit.loop_kit import (
    KNOWN,
    Waited,
    deaf_listener,
    in_time,
    never_waits,
    other_process,
    peer_hello,
)
from tests.unit.test_prefill_scheduler import write_of
from tests.unit.worker_kit import LAYOUT, D, P

pytestmark = pytest.mark.processes
SCHEMES = ("shm", "nixl", "ucx")


def renew(name: str, copies: int = 1) -> RenewLeases:
    return RenewLeases(keys=(RequestKey(name, 0),) * copies)


class Side:
    def __init__(self, scheme: str) -> None:
        self.inbox: queue.SimpleQueue[FromPeer | PeerLost | LinkMeasured] = queue.SimpleQueue()
        hello = peer_hello("side")
        self.incarnation = hello.incarnation
        self.links = PeerLinks([scheme], hello, self.inbox.put, options=KNOWN)

    def heard(self, kind: type) -> FromPeer | PeerLost | LinkMeasured:
        while True:
            event = self.inbox.get(timeout=20)
            if isinstance(event, FromPeer) and isinstance(event.message, PeerHello):
                continue
            if isinstance(event, kind):
                return event

    def greets(self, peer: Incarnation, *addresses: str) -> Callable[[], None]:
        command = SendPeer(peer=peer, addresses=addresses, message=renew("r", 200))
        return lambda: self.links.send(command)


@pytest.fixture
def side() -> Iterator[Callable[[str], Side]]:
    with ExitStack() as stack:

        def make(scheme: str) -> Side:
            made = Side(scheme)
            stack.callback(made.links.close)
            return made

        yield make


def test_the_guard_notices_a_sleep_a_wait_and_a_socket() -> None:
    with socket.socket(socket.AF_UNIX) as unconnected:
        for waits in (
            lambda: time.sleep(0),
            lambda: threading.Event().wait(0.001),
            lambda: unconnected.getsockname(),
        ):
            with pytest.raises(Waited), never_waits():
                waits()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_peer_that_never_answers_holds_up_neither_the_loop_nor_another(
    side: Callable[[str], Side], scheme: str
) -> None:
    a, b = side(scheme), side(scheme)
    with deaf_listener(scheme) as (name, address):
        in_time(a.greets(name, address))
        in_time(a.greets(b.incarnation, *b.links.endpoints.addresses))
        heard = b.heard(FromPeer)
        assert isinstance(heard, FromPeer) and heard.peer == a.incarnation
        assert a.inbox.qsize() <= 1, "the deaf one is still being dialled"
    lost = a.heard(PeerLost)
    assert isinstance(lost, PeerLost) and lost.peer == name


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_stopped_peer_is_lost_when_it_has_not_taken_so_many_messages(
    side: Callable[[str], Side], scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long before its socket's patience ends."""
    monkeypatch.setattr(peers, "MOST_WAITING", 200)
    a, b = side(scheme), side(scheme)
    with other_process(scheme) as stopped:
        greet = a.greets(stopped.incarnation, *stopped.addresses)
        greet()
        said = a.inbox.get(timeout=20)
        assert isinstance(said, FromPeer) and said.peer == stopped.incarnation
        stopped.stop()
        while a.inbox.empty():
            in_time(greet)
        lost = a.heard(PeerLost)
        assert isinstance(lost, PeerLost) and lost.peer == stopped.incarnation
        assert "has not taken 200 messages" in lost.reason
        in_time(a.greets(b.incarnation, *b.links.endpoints.addresses))
        assert isinstance(b.heard(FromPeer), FromPeer)
        in_time(a.links.states)


class Hanging:
    """Connections: those to P hang until `ends` is set, and then fail."""

    def __init__(self, links: PeerLinks) -> None:
        self.ends = threading.Event()
        self.endpoints = links.endpoints
        self.asked: list[Incarnation] = []

    def line(self, peer: Incarnation) -> str:
        return peer

    def connection(self, peer: Incarnation) -> Connection:
        self.asked.append(peer)
        if peer == P:
            self.ends.wait()
        raise PeerError(f"{peer} is gone")


def test_a_copy_that_hangs_holds_up_neither_the_loop_nor_those_of_another_peer() -> None:
    outcomes: queue.SimpleQueue[object] = queue.SimpleQueue()
    links = PeerLinks(["loopback"], peer_hello("mover"), lambda event: None)
    hanging = Hanging(links)
    mover = Mover(
        KvMemory(LAYOUT, 8, "cpu"),
        hanging,  # type: ignore[arg-type]
        "5a" * 16,
        slabs=1,
        slab_bytes=1024,
        post=outcomes.put,
        crashed=outcomes.put,
    )
    hangs, moves = writes("hangs", P), writes("moves", D)
    in_time(lambda: mover.put(hangs))
    in_time(lambda: mover.put(moves))
    done = outcomes.get(timeout=20)
    assert isinstance(done, SlabWritten) and done.key.request_id == "moves"
    hanging.ends.set()
    done = outcomes.get(timeout=20)
    while isinstance(done, SlabWritten) and done.key.request_id == "moves":
        done = outcomes.get(timeout=20)
    assert isinstance(done, SlabWritten) and done.key.request_id == "hangs"
    mover.close()
    links.close()


def writes(name: str, peer: Incarnation) -> KvMove:
    return replace(write_of(name, 3), peer=peer)
