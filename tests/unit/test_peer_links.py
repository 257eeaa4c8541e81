"""A worker's links to others, over the loopback transport."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace

import pytest

from cluster.core.worker.events import DropPeer
from cluster.worker.peers import PeerLinks
from kvpool.core.layout.codec import Codec
from kvpool.core.layout.layout import KvLayout, LayerGroup, Plane
from kvpool.core.transfer.codec_choice import CodecOffer, CodecSpeed
from kvpool.core.transfer.commands import FromPeer, PeerLost, SendPeer
from kvpool.core.transfer.messages import Committed, PeerHello, PeerMessage, RenewLeases, SlabLent
from kvpool.core.transfer.pool_map import KvFacts
from kvpool.core.transfer.slabs import LeaseId, SlabId
from kvpool.memory.kv_memory import KvMemory
from kvpool.transport.peer.base import Connection, RegionName
from kvpool.wire.peer import encode
from kvrelay.errors import PeerError
from kvrelay.types import WIRE_VERSION, Incarnation, RequestKey

A, B = Incarnation("links-a"), Incarnation("links-b")
FACTS = KvFacts(dtype="float32", block_size=16, blocks=8, slab_bytes=1024)
RENEW = RenewLeases(keys=(RequestKey("r", 0),))
COMMITTED = Committed(key=RequestKey("r", 0))


class Side:
    def __init__(
        self,
        incarnation: Incarnation,
        *,
        fingerprint: str = "f00d",
        facts: KvFacts | None = None,
        memory: KvMemory | None = None,
    ) -> None:
        hello = PeerHello(
            wire_version=WIRE_VERSION,
            incarnation=incarnation,
            fingerprint=fingerprint,
            kv=facts or FACTS,
        )
        self.inbox: queue.SimpleQueue[FromPeer | PeerLost] = queue.SimpleQueue()
        self.hellos: queue.SimpleQueue[PeerHello] = queue.SimpleQueue()
        self.links = PeerLinks(["loopback"], hello, self._post, memory=memory)
        self.incarnation = incarnation

    def _post(self, event: FromPeer | PeerLost) -> None:
        if isinstance(event, FromPeer) and isinstance(event.message, PeerHello):
            assert event.message.incarnation == event.peer
            self.hellos.put(event.message)
        else:
            self.inbox.put(event)

    def send(self, peer: Side, message: PeerMessage, *, connect: bool = True) -> None:
        addresses = peer.links.endpoints.addresses if connect else ()
        self.links.send(SendPeer(peer=peer.incarnation, addresses=addresses, message=message))

    def next(self) -> FromPeer | PeerLost:
        return self.inbox.get(timeout=10)


@pytest.fixture
def sides() -> Iterator[tuple[Side, Side]]:
    with ExitStack() as stack:
        a, b = Side(A), Side(B)
        stack.callback(a.links.close)
        stack.callback(b.links.close)
        yield a, b


def connected(a: Side, b: Side) -> tuple[Side, Side]:
    a.send(b, RENEW)
    assert b.next() == FromPeer(peer=A, message=RENEW)
    b.send(a, COMMITTED, connect=False)
    assert a.next() == FromPeer(peer=B, message=COMMITTED)
    return a, b


def test_the_first_message_connects_and_answers_come_back(sides: tuple[Side, Side]) -> None:
    connected(*sides)


def test_each_hears_what_the_other_is_and_which_region_to_read() -> None:
    layout = KvLayout(
        groups=(LayerGroup(layers=(0,), planes=(Plane(name="k", heads=1, dim=4),)),),
        dtype="float32",
        block_size=16,
    )
    memory = KvMemory(layout, 8, "cpu")
    memory.flat.fill_(7)
    with ExitStack() as stack:
        a, b = Side(A, memory=memory), Side(B)
        stack.callback(a.links.close)
        stack.callback(b.links.close)
        connected(a, b)
        region = b.hellos.get(timeout=10).kv.region
        window = b.links.connection(A).window(RegionName(region))
        assert window is not None
        assert window.data_ptr() == memory.flat.data_ptr()
        assert a.hellos.get(timeout=10).kv == FACTS


def test_a_dropped_peer_is_lost_on_both_sides_and_connects_anew(
    sides: tuple[Side, Side],
) -> None:
    a, b = connected(*sides)
    a.links.drop(DropPeer(B, "a router has heard nothing from it"))
    assert a.next() == PeerLost(peer=B, reason="a router has heard nothing from it")
    assert isinstance(b.next(), PeerLost)
    connected(a, b)
    a.links.drop(DropPeer(Incarnation("stranger"), "silent"))
    assert a.next() == PeerLost(peer=Incarnation("stranger"), reason="silent")


@pytest.mark.parametrize("willing", [[], ["here"], ["there"]])
def test_another_dtype_is_refused_unless_both_allow_it(willing: list[str]) -> None:
    half = replace(FACTS, dtype="bfloat16", mixed_precision="there" in willing)
    with ExitStack() as stack:
        a = Side(A, facts=replace(FACTS, mixed_precision="here" in willing))
        other = Side(B, facts=half)
        stack.callback(a.links.close)
        stack.callback(other.links.close)
        a.send(other, RENEW)
        lost = a.next()
        assert isinstance(lost, PeerLost)
        assert lost.reason == (
            "worker links-b has KV in bfloat16, this one in float32: give both the same dtype, or "
            "set transfer.allow_mixed_precision: true on both to have it converted"
        )
        assert a.hellos.empty()
        assert isinstance(other.next(), PeerLost)


def test_another_dtype_is_welcome_where_both_allow_it() -> None:
    with ExitStack() as stack:
        a = Side(A, facts=replace(FACTS, mixed_precision=True))
        other = Side(B, facts=replace(FACTS, dtype="float16", mixed_precision=True))
        stack.callback(a.links.close)
        stack.callback(other.links.close)
        connected(a, other)
        assert a.hellos.get(timeout=10).kv.dtype == "float16"


def test_a_codec_that_was_not_offered_costs_the_connection() -> None:
    key = RequestKey("r", 0)
    lent = SlabLent(
        key=key, piece=0, slab_id=SlabId(0), region="", lease_id=LeaseId(1), codec=Codec.INT8
    )
    speed = CodecSpeed(codec=Codec.INT8, encode_per_s=1.0, decode_per_s=1.0)
    offers = replace(FACTS, offer=CodecOffer(speeds=(speed,)))
    with ExitStack() as stack:
        a, b = Side(A, facts=offers), Side(B)
        stack.callback(a.links.close)
        stack.callback(b.links.close)
        connected(a, b)
        a.links.connection(B).notify(encode(lent))
        lost = b.next()
        assert isinstance(lost, PeerLost)
        assert "asks for codec int8, which is not allowed here" in lost.reason
        assert isinstance(a.next(), PeerLost)
        connected(a, b)
        b.links.connection(A).notify(encode(lent))
        assert a.next() == FromPeer(peer=B, message=lent)


def test_an_answer_to_one_who_never_connected_goes_nowhere(sides: tuple[Side, Side]) -> None:
    """Reported as a loss, it would fail every other reservation for that peer."""
    a, b = sides
    a.send(b, COMMITTED, connect=False)
    assert a.inbox.empty()
    connected(a, b)


def test_a_peer_that_is_not_there_is_lost(sides: tuple[Side, Side]) -> None:
    a, _ = sides
    a.links.send(SendPeer(peer=Incarnation("x"), addresses=("loopback:nowhere",), message=RENEW))
    lost = a.next()
    assert isinstance(lost, PeerLost)
    assert lost.peer == "x"
    assert "loopback:nowhere" in lost.reason


def test_a_closed_peer_is_lost_once_and_forgotten(sides: tuple[Side, Side]) -> None:
    a, b = connected(*sides)
    b.links.close()
    assert isinstance(a.next(), PeerLost)
    with pytest.raises(PeerError, match="no connection to worker links-b"):
        a.links.notify(B, RENEW)
    assert not a.links._peer_of
    assert a.inbox.empty()


def test_after_a_failed_send_both_sides_start_over(
    sides: tuple[Side, Side], monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = connected(*sides)
    connection = a.links.connection(B)

    def stuck(_: Connection, payload: bytes) -> None:
        raise PeerError("it reads nothing")

    monkeypatch.setattr(type(connection), "notify", stuck)
    a.send(b, RENEW)
    monkeypatch.undo()
    assert a.next() == PeerLost(peer=B, reason="it reads nothing")
    assert isinstance(b.next(), PeerLost)
    connected(a, b)


def test_another_model_is_refused_on_both_sides(sides: tuple[Side, Side]) -> None:
    a, _ = sides
    other = Side(Incarnation("links-c"), fingerprint="beef")
    try:
        a.send(other, RENEW)
        lost = other.next()
        assert isinstance(lost, PeerLost)
        assert "has fingerprint f00d, this one beef" in lost.reason
        assert isinstance(a.next(), PeerLost)
        assert other.inbox.empty()
    finally:
        other.links.close()


def test_another_worker_in_its_place_is_refused(sides: tuple[Side, Side]) -> None:
    a, b = sides
    addresses = b.links.endpoints.addresses
    a.links.send(SendPeer(peer=Incarnation("before-b"), addresses=addresses, message=RENEW))
    assert a.next() == PeerLost(
        peer=Incarnation("before-b"), reason="worker before-b is gone; links-b is in its place"
    )


@pytest.mark.parametrize("payload", [b"\xff garbage", b""])
def test_garbage_costs_the_connection_and_no_more(sides: tuple[Side, Side], payload: bytes) -> None:
    a, b = connected(*sides)
    a.links.connection(B).notify(payload)
    lost = b.next()
    assert isinstance(lost, PeerLost)
    assert "a peer sent" in lost.reason
    assert isinstance(a.next(), PeerLost)
    connected(a, b)
