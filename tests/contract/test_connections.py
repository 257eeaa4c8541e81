"""The contract of transports over all of them: how connections begin and end."""

from __future__ import annotations

import threading

import pytest
import torch

from kvpool.transport.registry import open_endpoint
from kvrelay.errors import ConfigError, PeerError
from tests.contract.transport_kit import ON_GPU, PATIENCE_S, MakeSide, held, pair, until


def test_both_sides_know_each_other(make_side: MakeSide) -> None:
    owner, writer, connection = pair(make_side)
    accepted = owner.connected.get(timeout=PATIENCE_S)
    assert connection.peer_address == owner.endpoint.address
    assert accepted.peer_address == writer.endpoint.address
    schemes = {side.endpoint.address.partition(":")[0] for side in (owner, writer)}
    assert len(schemes) == 1
    assert writer.connected.empty(), "on_connect is for connections that a peer opened"
    accepted.notify(b"to the writer")
    assert writer.next() == b"to the writer"


@pytest.mark.parametrize("rest", ["never-opened", "x" * 300])
def test_an_unknown_address_is_named(make_side: MakeSide, scheme: str, rest: str) -> None:
    address = f"{ON_GPU.get(scheme, scheme)}:{rest}"
    with pytest.raises(PeerError, match=address):
        make_side().endpoint.connect(address)


@pytest.mark.parametrize("closer", ["connector", "acceptor"])
def test_close_tells_the_other_side_once(make_side: MakeSide, closer: str) -> None:
    owner, writer, connection = pair(make_side)
    accepted = owner.connected.get(timeout=PATIENCE_S)
    region = owner.region(10)
    near, far = (connection, accepted) if closer == "connector" else (accepted, connection)
    here, there = (writer, owner) if closer == "connector" else (owner, writer)
    near.close()
    near.close()
    assert there.lost.get(timeout=PATIENCE_S) is far
    for gone in (near, far):
        with pytest.raises(PeerError):
            gone.notify(b"")
        with pytest.raises(PeerError):
            gone.window(region.name)
    here.endpoint.close()
    there.endpoint.close()
    assert here.lost.empty(), "on_lost is for the other side's end"
    assert there.lost.empty(), "on_lost came twice"


def test_what_was_sent_before_close_arrives(make_side: MakeSide) -> None:
    owner, _, connection = pair(make_side)
    owner.reading.clear()
    for i in range(3):
        connection.notify(bytes([i]) * 1000)
    owner.connected.get(timeout=PATIENCE_S).notify(b"never read by the one who closes")
    connection.close()
    owner.reading.set()
    assert [owner.next()[0] for _ in range(3)] == [0, 1, 2]
    owner.lost.get(timeout=PATIENCE_S)


def test_what_was_not_delivered_before_close_here_is_dropped(make_side: MakeSide) -> None:
    owner, _, connection = pair(make_side)
    accepted = owner.connected.get(timeout=PATIENCE_S)
    owner.reading.clear()
    for payload in (b"being delivered", b"waits", b"waits too"):
        connection.notify(payload)
    until(lambda: owner.waiting)
    accepted.close()
    owner.reading.set()
    owner.endpoint.close()
    assert owner.next() == b"being delivered"
    assert owner.messages.empty()


def test_a_callback_may_close(make_side: MakeSide) -> None:
    owner, writer, connection = pair(make_side)
    owner.on_message = lambda peer: peer.close()
    connection.notify(b"go away")
    assert writer.lost.get(timeout=PATIENCE_S) is connection
    again = writer.endpoint.connect(owner.endpoint.address)
    owner.on_message = lambda peer: owner.endpoint.close()
    again.notify(b"go away altogether")
    assert writer.lost.get(timeout=PATIENCE_S) is again


def test_a_restarted_worker_is_a_new_peer(make_side: MakeSide) -> None:
    owner, writer, connection = pair(make_side)
    old_region = owner.region(10)
    connection.write(old_region.name, 0, torch.ones(10, dtype=torch.uint8))
    owner.endpoint.close()
    assert writer.lost.get(timeout=PATIENCE_S) is connection
    with pytest.raises(PeerError):
        connection.write(old_region.name, 0, torch.ones(10, dtype=torch.uint8))
    with pytest.raises(PeerError, match=owner.endpoint.address):
        writer.endpoint.connect(owner.endpoint.address)
    reborn = make_side()
    new = writer.endpoint.connect(reborn.endpoint.address)
    with pytest.raises(PeerError):
        new.write(old_region.name, 0, torch.ones(10, dtype=torch.uint8))
    region = reborn.region(10)
    new.write(region.name, 0, torch.ones(10, dtype=torch.uint8))
    assert bool(region.memory.all())


@pytest.mark.parametrize("closer", [0, 1])
def test_close_with_work_in_flight(make_side: MakeSide, closer: int) -> None:
    owner, writer, connection = pair(make_side)
    region, stopped = owner.region(1 << 20), threading.Event()

    def work() -> None:
        data = torch.ones(1 << 20, dtype=torch.uint8)
        try:
            while True:
                connection.write(region.name, 0, data)
                connection.notify(bytes(50_000))
        except PeerError:
            stopped.set()

    thread = threading.Thread(target=work)
    thread.start()
    for _ in range(10):
        owner.next()
    (owner, writer)[closer].endpoint.close()
    assert stopped.wait(PATIENCE_S)
    thread.join()


def test_close_while_a_sender_waits(make_side: MakeSide) -> None:
    owner, writer = make_side(), make_side(send_timeout_s=3 * PATIENCE_S)
    connection = writer.endpoint.connect(owner.endpoint.address)
    owner.reading.clear()
    failed: list[PeerError] = []

    def send() -> None:
        try:
            while True:
                connection.notify(bytes(60_000))
        except PeerError as error:
            failed.append(error)

    thread = threading.Thread(target=send)
    thread.start()
    thread.join(timeout=0.3)
    assert thread.is_alive()
    connection.close()
    thread.join(PATIENCE_S)
    assert not thread.is_alive(), "close does not wait for the send timeout"
    assert "gone" in str(failed[0])
    assert writer.lost.empty()


def test_many_connections_come_and_go(make_side: MakeSide) -> None:
    owner, writer = make_side(), make_side()
    region = owner.region(1000)

    def come_and_go() -> None:
        connection = writer.endpoint.connect(owner.endpoint.address)
        connection.write(region.name, 0, torch.ones(1000, dtype=torch.uint8))
        connection.notify(b"done")
        owner.next()
        connection.close()
        owner.lost.get(timeout=PATIENCE_S)

    before = held()
    come_and_go()
    until(lambda: held()[0] == before[0])  # what the link holds for a peer once known may stay
    before = held()
    for _ in range(50):
        come_and_go()
    until(lambda: held() == before)


def test_the_registry_lists_what_exists(make_side: MakeSide) -> None:
    side = make_side()
    callbacks = side.endpoint._callbacks  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=r"'carrier-pigeon'; there are: loopback, shm"):
        open_endpoint("carrier-pigeon", "i", callbacks)  # type: ignore[arg-type]
