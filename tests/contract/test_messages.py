"""The contract of transports over all of them: messages and back-pressure."""

from __future__ import annotations

import threading

import pytest

from kvpool.transport.peer.base import MAX_MESSAGE_BYTES, Connection
from tests.contract.transport_kit import MakeSide, pair, run_all, send_until_refused


def test_messages_are_whole_up_to_the_limit(make_side: MakeSide) -> None:
    owner, _, connection = pair(make_side)
    for size in (0, 1, 1000, MAX_MESSAGE_BYTES - 1, MAX_MESSAGE_BYTES, 0):
        payload = bytes(i % 251 for i in range(size))
        connection.notify(payload)
        assert owner.next() == payload
    with pytest.raises(AssertionError):
        connection.notify(bytes(MAX_MESSAGE_BYTES + 1))


def test_messages_keep_their_order_under_load(make_side: MakeSide) -> None:
    owner, _, connection = pair(make_side)
    for i in range(5000):
        connection.notify(i.to_bytes(4, "little") + bytes(i % 997))
    for i in range(5000):
        assert owner.next() == i.to_bytes(4, "little") + bytes(i % 997)


def test_streams_do_not_mix(make_side: MakeSide) -> None:
    """Several threads on each of several connections: each thread's messages keep their order."""
    owner = make_side()
    connections = [make_side().endpoint.connect(owner.endpoint.address) for _ in range(3)]

    def stream(connection: Connection, tag: int) -> None:
        for i in range(300):
            connection.notify(bytes([tag]) + i.to_bytes(4, "little") + bytes([tag]) * 500)

    tags = range(2 * len(connections))
    run_all([lambda tag=t: stream(connections[tag % 3], tag) for t in tags])  # type: ignore[misc]
    seen: dict[int, list[int]] = {tag: [] for tag in tags}
    for _ in range(300 * len(seen)):
        message = owner.next()
        assert message[5:] == message[:1] * 500
        seen[message[0]].append(int.from_bytes(message[1:5], "little"))
    assert all(order == list(range(300)) for order in seen.values())


def test_a_callback_never_runs_on_the_callers_stack(make_side: MakeSide) -> None:
    owner, writer, connection = pair(make_side)
    owner.on_message = lambda peer: peer.notify(b"answer")
    connection.notify(b"question")
    assert writer.next() == b"answer"
    assert threading.get_ident() not in owner.threads | writer.threads


def test_a_peer_that_does_not_read_slows_the_sender_down(make_side: MakeSide) -> None:
    """Bounded memory: after some messages notify waits, then raises; those taken all arrive."""
    owner, writer = make_side(), make_side(send_timeout_s=0.3)
    connection = writer.endpoint.connect(owner.endpoint.address)
    owner.reading.clear()
    sent, reason = send_until_refused(connection)
    assert "has read nothing for 0.3 s" in reason
    assert 1 <= sent * 60_000 <= 16 * 2**20
    owner.reading.set()
    assert [owner.next()[:4] for _ in range(sent)] == [i.to_bytes(4, "little") for i in range(sent)]
    connection.notify(b"and on it goes")
    assert owner.next() == b"and on it goes"


def test_a_waiting_sender_goes_on_when_the_peer_reads(make_side: MakeSide) -> None:
    owner, _, connection = pair(make_side)
    owner.reading.clear()
    sent = threading.Semaphore(0)

    def send() -> None:
        for i in range(500):
            connection.notify(i.to_bytes(4, "little") + bytes(60_000))
            sent.release()

    thread = threading.Thread(target=send)
    thread.start()
    while sent.acquire(timeout=0.3):
        pass
    assert thread.is_alive(), "500 messages of 60 kB were taken though no one reads"
    owner.reading.set()
    for i in range(500):
        assert owner.next()[:4] == i.to_bytes(4, "little")
    thread.join()
