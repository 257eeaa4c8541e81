"""What arrives and can't be read is a PeerError, and what is sent fits. That every message comes
back as it was is the contract in test_message_codec.py."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from kvpool.core.transfer.messages import Commit, KvDigest, PlaneDigest, RenewLeases
from kvpool.transport.peer.base import MAX_MESSAGE_BYTES
from kvpool.wire import peer as peer_wire
from kvrelay import wire
from kvrelay.errors import PeerError
from kvrelay.messages import Lifetime, WorkerHello
from kvrelay.starts import PhaseSeconds
from kvrelay.types import WIRE_VERSION, MemoryPart, PromptRule, RequestKey, Role
from kvrelay.v1 import peer_pb2
from kvrelay.v1 import worker_pb2 as pb
from router.core.migration import MOST_SINCE_TOKENS
from router.live.dispatcher import MAX_REQUEST_ID_BYTES
from tests.unit.router_kit import hello


@given(st.floats(0, 1e6), st.floats(0, 1e6), st.floats(0, 1e6))
def test_worker_events_keep_their_age(at_s: float, sent_s: float, read_s: float) -> None:
    event = Lifetime(key=RequestKey("r", 1), at_s=at_s, name="prefill_started")
    payload = wire.encode_event(event, sent_s).SerializeToString()
    arrived = wire.decode_event(pb.Event.FromString(payload), read_s)
    assert arrived.at_s == pytest.approx(read_s - (sent_s - at_s), abs=1e-6)
    assert replace(arrived, at_s=at_s) == event


@pytest.mark.parametrize("role", Role)
def test_worker_hello(role: Role) -> None:
    ours = replace(
        hello("w", role, handoff_by_pool=True),
        witness="h:1",
        witness_key="k",
        start=(PhaseSeconds(phase="load", seconds=1.5),),
        is_new=True,
        takes=PromptRule(min_prompt_tokens=5, tiers=("batch",)),
        memory=(MemoryPart(part="weights", nbytes=1 << 40),),
    )
    assert wire.decode_hello(wire.encode_hello(ours)) == ours
    assert all(getattr(ours, name) for name in WorkerHello.__dataclass_fields__)  # none is empty


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
        (pb.ToWorker, wire.decode_to_worker),
        (pb.Event, lambda event: wire.decode_event(event, 0.0)),
        (pb.WorkerHello, wire.decode_hello),
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
    with pytest.raises(PeerError, match=r"a worker sent PromptLogprobs .* unequal lengths"):
        wire.decode_event(event, 0.0)


def test_what_another_version_sends_is_refused() -> None:
    greeting = wire.encode_hello(hello("w", Role.BOTH))
    greeting.wire_version = WIRE_VERSION + 1
    told = f"worker w speaks wire version {WIRE_VERSION + 1}, this router {WIRE_VERSION}"
    with pytest.raises(PeerError, match=told):
        wire.decode_hello(greeting)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": "int4"}, "KvFacts: KV of dtype 'int4'"),
        ({"ranks": 0}, "KvFacts: KV of no rank"),
        ({"offer": {"speeds": [{"codec": "int4"}]}}, "CodecSpeed.codec 'int4', which is none of"),
        (
            {"offer": {"speeds": [{"codec": "fp8", "encode_per_s": 1}]}},
            "CodecSpeed: a codec's speed of 0 per second",
        ),
    ],
)
def test_facts_that_can_not_be_used_are_refused(changes: dict[str, Any], message: str) -> None:
    facts = peer_pb2.KvFacts(**({"dtype": "float32", "ranks": 1} | changes))
    payload = peer_pb2.PeerMessage(hello=peer_pb2.PeerHello(kv=facts)).SerializeToString()
    with pytest.raises(PeerError, match=f"a peer sent {message}"):
        peer_wire.decode(payload)


def test_step_times_that_no_step_takes_are_refused() -> None:
    greeting = wire.encode_hello(hello("w", Role.BOTH))
    greeting.step_times.prefill_token_s = -1
    told = "a worker sent StepCoefficients: prefill_token_s: a number"
    with pytest.raises(PeerError, match=told):
        wire.decode_hello(greeting)


def test_unknown_names_are_refused() -> None:
    greeting = wire.encode_hello(hello("w", Role.BOTH))
    greeting.role = "oracle"
    told = "a worker sent WorkerHello.role 'oracle', which is none of prefill, decode, both"
    with pytest.raises(PeerError, match=told):
        wire.decode_hello(greeting)
    event = pb.Event(tokens=pb.Tokens(finish_reason="boredom"))
    with pytest.raises(PeerError, match=r"a worker sent Tokens.finish_reason 'boredom', which is"):
        wire.decode_event(event, 0)
    with pytest.raises(PeerError, match="a worker sent nothing"):
        wire.decode_event(pb.Event(), 0)
    with pytest.raises(PeerError, match="a router sent nothing"):
        wire.decode_to_worker(pb.ToWorker())
    with pytest.raises(PeerError, match="a router sent hello"):
        wire.decode_to_worker(pb.ToWorker(hello=pb.RouterHello()))
    with pytest.raises(PeerError, match="a peer sent nothing"):
        peer_wire.decode(b"")


def test_a_request_is_resumed_by_all_its_choices() -> None:
    spec = pb.RequestSpec(sampling=pb.Sampling(n=2), resumed=[pb.EmittedIds(token_ids=[1])])
    with pytest.raises(PeerError, match="RequestSpec: 1 choices are resumed of 2"):
        wire.decode_to_worker(pb.ToWorker(generate=pb.Generate(spec=spec)))


def test_a_request_is_moved_with_all_its_choices() -> None:
    commit = peer_pb2.Commit(first_token_ids=[1, 2], resumed=[pb.EmittedIds(token_ids=[1])])
    with pytest.raises(PeerError, match="Commit: 1 choices are resumed of 2"):
        peer_wire.decode(peer_pb2.PeerMessage(commit=commit).SerializeToString())
    prefill = pb.Prefill(spec=pb.RequestSpec(sampling=pb.Sampling(n=2)), since=[1])
    with pytest.raises(PeerError, match="Prefill: 1 choices were moved of 2"):
        wire.decode_to_worker(pb.ToWorker(prefill=prefill))


def test_the_longest_peer_message_fits_a_notification() -> None:
    """Prompts never travel between workers; what grows with a request are its id, its choices and
    what these emit while it is being moved."""
    longest = RequestKey("x" * MAX_REQUEST_ID_BYTES, 2**32 - 1)
    choices = tuple(2**32 - 1 - i for i in range(1000))
    commit = Commit(
        key=longest,
        pieces=10**6,
        first_token_ids=choices,
        finished_choices=choices,
        resumed=((2**32 - 1,) * MOST_SINCE_TOKENS, *[()] * (len(choices) - 1)),
    )
    assert len(peer_wire.encode(commit)) < MAX_MESSAGE_BYTES
    assert len(peer_wire.encode(RenewLeases(keys=(longest,)))) < 1024
