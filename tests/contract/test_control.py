"""The contract of every transport with peers in other processes: strangers, killed and stopped
peers, refusals."""

from __future__ import annotations

import errno
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, Self

import pytest
import torch

from kvpool.transport.peer import control_wire
from kvpool.transport.peer.base import Region
from kvpool.transport.peer.control_wire import Packet
from kvpool.transport.peer.endpoint import PeerEndpoint
from kvrelay.errors import PeerError
from kvrelay.types import WIRE_VERSION
from tests.contract import shm_peer
from tests.contract.transport_kit import (
    PATIENCE_S,
    MakeSide,
    Side,
    pair,
    parameters,
    send_until_refused,
    until,
)

_ROOT = Path(__file__).parents[2]


@pytest.fixture(params=parameters("loopback"))
def scheme(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@contextmanager
def _writer(owner: Side, region: Region) -> Iterator[ForkServerProcess]:
    """Another process, in the middle of writing ones to the region, for ever."""
    with shm_peer.running("write-for-ever", owner.endpoint.address, region.name) as process:
        assert owner.next() == b"writing"
        yield process


def test_a_peer_killed_in_the_middle_of_a_write_is_lost_and_nothing_else(
    make_side: MakeSide,
) -> None:
    owner = make_side()
    region, spared = owner.region(16 << 20), owner.region(64)
    with _writer(owner, region) as process:
        connection = owner.connected.get(timeout=PATIENCE_S)
        process.kill()
        assert owner.lost.get(timeout=PATIENCE_S) is connection
    with pytest.raises(PeerError, match="gone"):
        connection.notify(b"are you there?")
    owner.endpoint.deregister(region)
    again = make_side().endpoint.connect(owner.endpoint.address)
    again.write(spared.name, 0, torch.ones(64, dtype=torch.uint8))
    assert bool(spared.memory.all())


def test_an_owner_killed_in_the_middle_of_a_write_is_lost(make_side: MakeSide) -> None:
    writer = make_side()
    with shm_peer.running("own-a-region", writer.endpoint.address) as process:
        connection = writer.connected.get(timeout=PATIENCE_S)
        name = shm_peer.region_told(writer.next())
        data = torch.ones(16 << 20, dtype=torch.uint8)
        connection.write(name, 0, data)
        process.kill()
        until(lambda: _fails(lambda: connection.write(name, 0, data)))
        assert writer.lost.get(timeout=PATIENCE_S) is connection
    assert writer.endpoint.register(10).memory.numel() == 10


def _fails(action: Callable[[], None]) -> bool:
    try:
        action()
    except PeerError:
        return True
    return False


def test_a_stopped_peer_holds_neither_the_sender_nor_the_close(make_side: MakeSide) -> None:
    owner = make_side(send_timeout_s=0.2)
    region = owner.region(1 << 20)
    with _writer(owner, region) as process:
        connection = owner.connected.get(timeout=PATIENCE_S)
        shm_peer.tell(process, signal.SIGSTOP)
        assert "read nothing" in send_until_refused(connection)[1]
        owner.endpoint.deregister(region)
        owner.endpoint.close()


def _dial(owner: Side) -> socket.socket:
    """Let in, and still without a purpose."""
    assert isinstance(owner.endpoint, PeerEndpoint)
    sock = owner.endpoint._rendezvous.dial(owner.endpoint.address)
    sock.settimeout(PATIENCE_S)
    return sock


def _hello(owner: Side, version: int = WIRE_VERSION) -> bytes:
    return version.to_bytes(2, "little") + f"other:one\n{owner.endpoint.address}".encode()


def test_another_wire_version_is_refused_with_a_reason(make_side: MakeSide) -> None:
    owner = make_side()
    with _dial(owner) as sock:
        control_wire.send(sock, Packet.HELLO, _hello(owner, WIRE_VERSION + 1))
        answer = control_wire.receive(sock)
        assert answer is not None and answer[0] is Packet.REFUSE
        assert f"wire version {WIRE_VERSION + 1}".encode() in answer[1]
        assert owner.connected.empty()


def test_another_worker_may_be_in_the_place_of_the_one_sought(make_side: MakeSide) -> None:
    owner = make_side()
    with _dial(owner) as sock:
        hello = _hello(owner).replace(b"\n", b"\nformer-")
        control_wire.send(sock, Packet.HELLO, hello)
        answer = control_wire.receive(sock)
        assert answer is not None and answer[0] is Packet.REFUSE
        address = owner.endpoint.address
        assert answer[1].decode() == f"former-{address} is gone; {address} is in its place"


@pytest.mark.parametrize(
    "garbage",
    [
        b"\xff\0\0\0\0",
        b"\x04\xff\xff\xff\xff",
        b"\x01",
        b"\x04\x01\0\0\0x",
        b"\x01\x03\0\0\0\0\0\xff",
        b"\x08\x04\0\0\0none",
    ],
)
def test_garbage_is_dropped_and_others_are_served(make_side: MakeSide, garbage: bytes) -> None:
    owner, _, connection = pair(make_side)
    with _dial(owner) as sock:
        sock.sendall(garbage)
        sock.shutdown(socket.SHUT_WR)
        answer = control_wire.receive(sock)
        assert answer is None or answer[0] is Packet.REFUSE
    connection.notify(b"hello")
    assert owner.next() == b"hello"
    assert owner.lost.empty()


def test_garbage_in_a_connection_ends_it(make_side: MakeSide) -> None:
    owner = make_side()
    with _dial(owner) as sock:
        control_wire.send(sock, Packet.HELLO, _hello(owner))
        answer = control_wire.receive(sock)
        assert answer is not None and answer[0] is Packet.WELCOME
        sock.sendall(b"\x63\0\0\0\0")
        assert owner.lost.get(timeout=PATIENCE_S) is owner.connected.get(timeout=PATIENCE_S)


def test_what_a_peer_sent_before_it_died_arrives(make_side: MakeSide) -> None:
    owner = make_side()
    with _dial(owner) as sock:
        owner.reading.clear()
        control_wire.send(sock, Packet.HELLO, _hello(owner))
        control_wire.receive(sock)
        for i in range(3):
            control_wire.send(sock, Packet.MESSAGE, bytes([i]))
        until(lambda: owner.waiting)
        sock.close()
        owner.reading.set()
        assert [owner.next() for _ in range(3)] == [b"\0", b"\1", b"\2"]
        owner.lost.get(timeout=PATIENCE_S)


def test_silent_strangers_do_not_hold_up_connect_or_close(make_side: MakeSide) -> None:
    owner, _, connection = pair(make_side)
    strangers = [_dial(owner) for _ in range(3)]
    connection.notify(b"hello")
    assert owner.next() == b"hello"
    owner.endpoint.close()
    for stranger in strangers:
        assert stranger.recv(10) == b""
        stranger.close()


def test_one_process_reaches_new_lives_of_a_worker(make_side: MakeSide) -> None:
    """Ten workers, one after the other, on one host."""
    writer = make_side()
    for value in range(1, 11):
        owner = make_side()
        connection = writer.endpoint.connect(owner.endpoint.address)
        region = owner.region(100_000)
        connection.write(region.name, 0, torch.full((100_000,), value, dtype=torch.uint8))
        assert bool((region.memory == value).all())
        owner.endpoint.close()
        assert writer.lost.get(timeout=PATIENCE_S) is connection


@pytest.mark.parametrize("at", ["introduce", "welcomed"])
def test_a_region_that_goes_while_two_shake_hands_is_told_of_afterwards(
    make_side: MakeSide, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    """By the one that is connected to before its welcome is sent, by the other once it is."""
    owner, other = make_side(), make_side()
    leaving = owner if at == "introduce" else other
    region = leaving.region(64)
    told: list[bytes] = []
    step: Callable[..., object] = getattr(control_wire, at)

    def retire_in(*arguments: object) -> None:
        if at == "welcomed" or Packet.WELCOME in arguments:
            leaving.endpoint.deregister(region)
        step(*arguments)

    def send(sock: socket.socket, packet: Packet, payload: bytes = b"") -> None:
        if packet is Packet.RETIRED:
            told.append(payload)
        plain_send(sock, packet, payload)

    plain_send = control_wire.send
    monkeypatch.setattr(control_wire, at, retire_in)
    monkeypatch.setattr(control_wire, "send", send)
    connection = other.endpoint.connect(owner.endpoint.address)
    until(lambda: told == [region.name.encode()])
    connection.notify(b"hello")
    assert owner.next() == b"hello"


# --- what a listener survives --------------------------------------------------------------------


class _FailingListener:
    """Accepts nobody for as long as there are errors."""

    def __init__(self, listener: socket.socket, *errors: int) -> None:
        self._listener = listener
        self.errors = [OSError(number, os.strerror(number)) for number in errors]

    def accept(self) -> tuple[socket.socket, object]:
        if self.errors:
            raise self.errors.pop()
        return self._listener.accept()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._listener, name)


@pytest.mark.parametrize("error", [errno.EMFILE, errno.ENFILE, errno.ECONNABORTED, errno.ENOMEM])
def test_an_owner_that_could_not_accept_a_peer_accepts_the_next(
    make_side: MakeSide,
    error: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It says so once, however often it fails in a row."""
    begin, listeners = PeerEndpoint.__init__, []

    def failing(self: PeerEndpoint, *args: Any) -> None:
        rendezvous = args[3]
        listeners.append(_FailingListener(rendezvous.listener, error, error, error))
        rendezvous.listener = listeners[-1]
        begin(self, *args)

    other = make_side()
    monkeypatch.setattr(PeerEndpoint, "__init__", failing)
    owner = make_side()
    other.endpoint.connect(owner.endpoint.address)
    assert owner.connected.get(timeout=PATIENCE_S)
    assert [one.errors for one in listeners] == [[]]
    assert caplog.text.count(f"can't accept a peer: [Errno {error}]") == 1


def test_an_owner_that_had_no_thread_for_a_peer_serves_the_next(
    make_side: MakeSide, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    other, owner = make_side(), make_side()
    begin, refused = threading.Thread.start, []

    def start(self: threading.Thread) -> None:
        if self.name.endswith(" serves") and not refused:
            refused.append(self)
            raise RuntimeError("can't start new thread")
        begin(self)

    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(PeerError):
        other.endpoint.connect(owner.endpoint.address)
    other.endpoint.connect(owner.endpoint.address)
    assert owner.connected.get(timeout=PATIENCE_S)
    assert len(refused) == 1
    assert "can't accept a peer: can't start new thread" in caplog.text
