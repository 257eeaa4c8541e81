"""Every message survives its bytes; whatever else arrives is a PeerError."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from kvpool.core.layout.codec import Codec
from kvpool.core.layout.layout import DTYPE_BYTES
from kvpool.core.transfer.codec_choice import CodecOffer, CodecSpeed
from kvpool.core.transfer.messages import (
    CancelTransfer,
    Commit,
    Committed,
    KvDigest,
    LinkProbed,
    PeerHello,
    PeerMessage,
    PieceComputed,
    PiecesAhead,
    PiecesAwaited,
    PiecesRead,
    Ping,
    PlaneDigest,
    Pong,
    RenewLeases,
    SlabFilled,
    SlabLent,
    TransferCancelled,
)
from kvpool.core.transfer.piece import Piece, PieceBlocks
from kvpool.core.transfer.pool_map import KvFacts
from kvpool.core.transfer.write import TokenSpan
from kvpool.transport.peer.base import MAX_MESSAGE_BYTES
from kvpool.wire import peer as peer_wire
from kvrelay import commands_wire, reports_wire
from kvrelay.errors import PeerError
from kvrelay.messages import (
    Abort,
    Counters,
    Generate,
    Lifetime,
    LinkState,
    Prefill,
    PromptLogprobs,
    Released,
    RequestFailed,
    Reserve,
    Reserved,
    ReserveRefused,
    Stop,
    TierLoad,
    Tokens,
    ToWorker,
    WorkerEvent,
    WorkerHello,
)
from kvrelay.types import (
    WIRE_VERSION,
    FinishReason,
    Incarnation,
    PromptLogprob,
    RequestKey,
    RequestSpec,
    Role,
    Sampling,
    TokenLogprobs,
)
from kvrelay.v1 import peer_pb2
from kvrelay.v1 import worker_pb2 as pb
from router.live.dispatcher import MAX_REQUEST_ID_BYTES
from tests.unit.router_kit import hello

uint32 = st.integers(0, 2**32 - 1)
uint64 = st.integers(0, 2**64 - 1)
small = st.integers(0, 1000)
finite = st.floats(allow_nan=False, allow_infinity=False)
single = st.floats(width=32, allow_nan=False)  # logprobs are fp32
text = st.text(max_size=40)
ids = st.lists(uint32, max_size=20).map(tuple)
keys = st.builds(RequestKey, text, uint32)
samplings = st.builds(
    Sampling,
    max_tokens=uint32,
    seed=uint64,
    temperature=finite,
    top_p=finite,
    top_k=st.integers(0, 2**31 - 1),
    min_p=finite,
    frequency_penalty=finite,
    presence_penalty=finite,
    repetition_penalty=finite,
    min_tokens=uint32,
    stop_token_ids=ids,
    n=uint32,
    logprobs=st.none() | uint32,
    prompt_logprobs=st.none() | uint32,
    logit_bias=st.dictionaries(uint32, finite, max_size=5).map(lambda d: tuple(sorted(d.items()))),
)
perhaps_seconds = st.none() | st.floats(min_value=0, max_value=1e6)
specs = st.builds(
    RequestSpec,
    key=keys,
    prompt_ids=ids,
    sampling=samplings,
    tenant=text,
    qos_tier=text,
    tpot_s=perhaps_seconds,
    emitted_ids=ids,
)
to_worker = st.one_of(
    st.builds(Reserve, spec=specs, source=st.none() | text, counted=st.none() | small),
    st.builds(
        Prefill,
        spec=specs,
        target_addresses=st.lists(text).map(tuple),
        target=st.none() | text,
        within_s=perhaps_seconds,
    ),
    st.builds(Generate, spec=specs, within_s=perhaps_seconds),
    st.builds(Abort, key=keys),
    st.builds(Stop, key=keys, choice=uint32, valid_tokens=uint32),
)
logprobs = st.builds(
    TokenLogprobs, uint32, single, st.lists(st.tuples(uint32, single), max_size=3).map(tuple)
)
at_s = st.floats(0, 1e6)


def prompt_logprobs(top: int) -> st.SearchStrategy[WorkerEvent]:
    """Of one event, so all entries have equally many alternatives."""
    best = st.lists(st.tuples(uint32, single), min_size=top, max_size=top).map(tuple)
    entries = st.lists(st.builds(PromptLogprob, uint32, single, uint32, best), max_size=5)
    return st.builds(
        PromptLogprobs, key=keys, at_s=at_s, first_position=uint32, entries=entries.map(tuple)
    )


worker_events = st.one_of(
    st.builds(Reserved, key=keys, at_s=at_s),
    st.builds(ReserveRefused, key=keys, at_s=at_s, reason=text),
    st.builds(Lifetime, key=keys, at_s=at_s, name=text, tokens=uint32),
    st.builds(
        Tokens,
        key=keys,
        at_s=at_s,
        choice=uint32,
        first_index=uint32,
        token_ids=ids,
        logprobs=st.lists(logprobs, max_size=3).map(tuple),
        finish_reason=st.none() | st.sampled_from(FinishReason),
        stop_token_id=st.none() | uint32,
        stood_back_s=st.floats(0, 1e6),
    ),
    st.integers(0, 3).flatmap(prompt_logprobs),
    st.builds(RequestFailed, key=keys, at_s=at_s, reason=text, message=text),
    st.builds(Released, key=keys, at_s=at_s),
)
spans = st.builds(TokenSpan, start=uint64, tokens=uint64, next_position=uint64)
piece_blocks = st.builds(
    PieceBlocks,
    group=uint32,
    first=uint32,
    runs=st.lists(st.tuples(uint32, uint32), max_size=5).map(tuple),
)
speeds = st.floats(min_value=0, exclude_min=True, allow_infinity=False)
kv_facts = st.builds(
    KvFacts,
    dtype=st.sampled_from([*DTYPE_BYTES]),
    block_size=uint32,
    blocks=uint32,
    slab_bytes=uint64,
    region=text,
    offer=st.builds(
        CodecOffer,
        speeds=st.lists(
            st.builds(
                CodecSpeed,
                codec=st.sampled_from(Codec),
                encode_per_s=speeds,
                decode_per_s=speeds,
            ),
            max_size=3,
        ).map(tuple),
        only_if_faster=st.booleans(),
    ),
    mixed_precision=st.booleans(),
)
singles = st.lists(single, max_size=5).map(tuple)
plane_digests = st.builds(PlaneDigest, norms=singles, sums=singles)
digests = st.builds(KvDigest, start=uint32, planes=st.lists(plane_digests, max_size=3).map(tuple))
peer_messages = st.one_of(
    st.builds(
        PeerHello,
        wire_version=uint32,
        incarnation=text,
        fingerprint=text,
        kv=kv_facts,
        name=text,
        probe_region=text,
    ),
    st.builds(
        PiecesAhead,
        key=keys,
        number=uint32,
        piece=st.builds(Piece, span=spans, index=uint32),
        held=st.lists(piece_blocks, max_size=3).map(tuple),
        count=uint32,
    ),
    *(
        st.builds(kind, key=keys, pieces=st.lists(uint32, max_size=3).map(tuple))
        for kind in (PiecesAwaited, PiecesRead)
    ),
    st.builds(PieceComputed, key=keys, piece=uint32),
    st.builds(
        SlabLent,
        key=keys,
        piece=uint32,
        slab_id=uint32,
        region=text,
        lease_id=uint64,
        codec=st.sampled_from(Codec),
    ),
    st.builds(SlabFilled, key=keys, piece=uint32, slab_id=uint32, lease_id=uint64),
    st.builds(
        Commit,
        key=keys,
        pieces=uint32,
        first_token_ids=ids,
        finished_choices=ids,
        digest=st.none() | digests,
    ),
    st.builds(Committed, key=keys),
    st.builds(CancelTransfer, key=keys, reason=text),
    st.builds(TransferCancelled, key=keys, reason=text),
    st.builds(RenewLeases, keys=st.lists(keys, max_size=5).map(tuple)),
    st.sampled_from([Ping(), Pong(), LinkProbed()]),
)


@given(to_worker)
def test_router_messages(message: ToWorker) -> None:
    payload = commands_wire.encode_to_worker(message).SerializeToString()
    assert commands_wire.decode_to_worker(pb.ToWorker.FromString(payload)) == message


@given(worker_events, st.floats(0, 1e6), st.floats(0, 1e6))
def test_worker_events_keep_their_age(event: WorkerEvent, sent_s: float, read_s: float) -> None:
    payload = reports_wire.encode_event(event, sent_s).SerializeToString()
    arrived = reports_wire.decode_event(pb.Event.FromString(payload), read_s)
    assert arrived.at_s == pytest.approx(read_s - (sent_s - event.at_s), abs=1e-6)
    assert replace(arrived, at_s=event.at_s) == event


@given(peer_messages)
def test_peer_messages(message: PeerMessage) -> None:
    assert peer_wire.decode(peer_wire.encode(message)) == message


@pytest.mark.parametrize("role", Role)
def test_worker_hello(role: Role) -> None:
    ours = hello("w", role)
    assert reports_wire.decode_hello(reports_wire.encode_hello(ours)) == ours
    assert all(getattr(ours, name) for name in WorkerHello.__dataclass_fields__)  # none is empty


def test_a_batch_carries_counters() -> None:
    others = ("links", "tiers", "draining")
    names = [name for name in Counters.__dataclass_fields__ if name not in others]
    link = LinkState(peer=Incarnation("d"), transport="shm", bytes_per_s=1e10, latency_s=1e-5)
    load = TierLoad(tier="premium", running=3, waiting=2)
    counters = Counters(
        **{name: i + 1 for i, name in enumerate(names)},
        links=(link,),
        tiers=(load,),
        draining=True,
    )
    event = Released(key=RequestKey("r", 1), at_s=3)
    batch = reports_wire.encode_batch([event], counters, 4)
    assert reports_wire.decode_counters(batch.counters) == counters
    assert [reports_wire.decode_event(e, 4) for e in batch.events] == [event]


def test_a_commit_carries_a_digest() -> None:
    digest = KvDigest(start=3, planes=(PlaneDigest(norms=(2.5,), sums=(1.5, 1.25, 0.5, -1.0)),))
    commit = Commit(key=RequestKey("r", 1), pieces=2, first_token_ids=(7,), digest=digest)
    assert peer_wire.decode(peer_wire.encode(commit)) == commit


@given(st.binary(max_size=200))
def test_garbage_from_a_peer_is_a_peer_error_or_a_message(payload: bytes) -> None:
    try:
        message = peer_wire.decode(payload)
    except PeerError as error:
        assert "peer sent" in str(error)  # noqa: PT017
    else:
        assert peer_wire.decode(peer_wire.encode(message)) == message


@given(st.binary(max_size=200))
def test_garbage_between_router_and_worker_is_a_peer_error_or_a_message(payload: bytes) -> None:
    for kind, read in (
        (pb.ToWorker, commands_wire.decode_to_worker),
        (pb.Event, lambda event: reports_wire.decode_event(event, 0.0)),
        (pb.WorkerHello, reports_wire.decode_hello),
    ):
        try:
            message = kind.FromString(payload)
        except DecodeError:
            continue  # gRPC ends the stream
        try:
            read(message)
        except PeerError as error:
            assert str(error)  # noqa: PT017


def test_prompt_logprobs_of_unequal_lengths_are_refused() -> None:
    told = pb.PromptLogprobs(token_ids=[1, 2], logprobs=[-1.0, -2.0], ranks=[1, 1], top=1)
    event = pb.Event(prompt_logprobs=told)
    with pytest.raises(PeerError, match="unequal lengths"):
        reports_wire.decode_event(event, 0.0)


def test_what_another_version_sends_is_refused() -> None:
    greeting = reports_wire.encode_hello(hello("w", Role.BOTH))
    greeting.wire_version = WIRE_VERSION + 1
    told = f"wire version {WIRE_VERSION + 1}, this router {WIRE_VERSION}"
    with pytest.raises(PeerError, match=told):
        reports_wire.decode_hello(greeting)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": "int4"}, "KV of dtype 'int4'"),
        ({"ranks": 0}, "KV of no rank"),
        ({"codecs": [peer_pb2.CodecSpeed(codec=9)]}, "codec 9"),
        ({"codecs": [peer_pb2.CodecSpeed(codec=1, encode_per_s=1)]}, "speed of 0 per second"),
    ],
)
def test_facts_that_can_not_be_used_are_refused(changes: dict[str, Any], message: str) -> None:
    facts = peer_pb2.KvFacts(**({"dtype": "float32", "ranks": 1} | changes))
    payload = peer_pb2.PeerMessage(hello=peer_pb2.PeerHello(kv=facts)).SerializeToString()
    with pytest.raises(PeerError, match=message):
        peer_wire.decode(payload)


def test_step_times_that_no_step_takes_are_refused() -> None:
    greeting = reports_wire.encode_hello(hello("w", Role.BOTH))
    greeting.step_times.prefill_token_s = -1
    with pytest.raises(PeerError, match="worker w sent step_times with prefill_token_s: a number"):
        reports_wire.decode_hello(greeting)


def test_unknown_names_are_refused() -> None:
    greeting = reports_wire.encode_hello(hello("w", Role.BOTH))
    greeting.role = "oracle"
    with pytest.raises(PeerError, match="worker w has the unknown role 'oracle'"):
        reports_wire.decode_hello(greeting)
    event = pb.Event(tokens=pb.Tokens(finish_reason="boredom"))
    with pytest.raises(PeerError, match="unknown finish reason 'boredom'"):
        reports_wire.decode_event(event, 0)
    with pytest.raises(PeerError, match="a worker sent nothing"):
        reports_wire.decode_event(pb.Event(), 0)
    with pytest.raises(PeerError, match="a router sent nothing"):
        commands_wire.decode_to_worker(pb.ToWorker())
    with pytest.raises(PeerError, match="a router sent hello"):
        commands_wire.decode_to_worker(pb.ToWorker(hello=pb.RouterHello()))
    with pytest.raises(PeerError, match="a kind that this version does not know"):
        peer_wire.decode(b"")


def test_a_top_k_beyond_the_wire_keeps_everything() -> None:
    sampling = Sampling(max_tokens=1, seed=0, top_k=2**40)
    assert commands_wire.decode_sampling(commands_wire.encode_sampling(sampling)).top_k == 2**31 - 1


def test_the_longest_peer_message_fits_a_notification() -> None:
    """Prompts never travel between workers; what grows with a request are its id and choices."""
    longest = RequestKey("x" * MAX_REQUEST_ID_BYTES, 2**32 - 1)
    choices = tuple(2**32 - 1 - i for i in range(1000))
    commit = Commit(key=longest, pieces=10**6, first_token_ids=choices, finished_choices=choices)
    assert len(peer_wire.encode(commit)) < MAX_MESSAGE_BYTES
    assert len(peer_wire.encode(RenewLeases(keys=(longest,)))) < 1024
