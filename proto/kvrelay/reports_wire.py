"""What a worker says to its routers, to protobuf and back. Clock readings become ages on the way.

Pure: the caller passes its clock. What this module can't read raises PeerError.

Which blocks a worker or a pool node holds, as they tell routers, to protobuf and back. Pure.

What this module can't read raises PeerError.

Log probabilities of a prompt's tokens, to protobuf and back.

Pure. Flat arrays, for prompts are long. What this module can't read raises PeerError.

Step times to protobuf and back. Pure.

What a worker says after each of its turns to protobuf and back: events, counters, blocks.

Pure: the caller passes its clock. What this module can't read raises PeerError.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import assert_never

from kvrelay.commands_wire import decode_key, encode_key
from kvrelay.errors import PeerError
from kvrelay.messages import (
    BlockChanges,
    Counters,
    Lifetime,
    LinkState,
    PoolUpdate,
    PromptLogprobs,
    Released,
    RequestFailed,
    Reserved,
    ReserveRefused,
    TierLoad,
    Tokens,
    WorkerEvent,
    WorkerHello,
)
from kvrelay.types import (
    SCALARS,
    WIRE_VERSION,
    FinishReason,
    Incarnation,
    PromptLogprob,
    RequestKey,
    Role,
    StepCoefficients,
    Tier,
    TokenLogprobs,
)
from kvrelay.v1 import inference_pb2 as inference_pb
from kvrelay.v1 import inference_pb2 as public_pb
from kvrelay.v1 import pool_node_pb2 as node_pb
from kvrelay.v1 import worker_pb2 as pb

_HASH_BYTES = 32


def encode_changes(changes: BlockChanges) -> node_pb.BlockChanges:
    return node_pb.BlockChanges(
        tier=changes.tier,
        stored=b"".join(changes.stored),
        removed=b"".join(changes.removed),
    )


def decode_changes(messages: Iterable[node_pb.BlockChanges]) -> tuple[BlockChanges, ...]:
    return tuple(map(_decode, messages))


def encode_update(update: PoolUpdate) -> node_pb.PoolUpdate:
    return node_pb.PoolUpdate(
        sequence=update.sequence,
        incarnation=update.node,
        addresses=update.addresses,
        workers=update.workers,
        blocks=map(encode_changes, update.blocks),
    )


def decode_update(message: node_pb.PoolUpdate) -> PoolUpdate:
    return PoolUpdate(
        sequence=message.sequence,
        node=Incarnation(message.incarnation),
        addresses=tuple(message.addresses),
        workers=tuple(map(Incarnation, message.workers)),
        blocks=decode_changes(message.blocks),
    )


def _decode(message: node_pb.BlockChanges) -> BlockChanges:
    if message.tier not in tuple(Tier):
        raise PeerError(f"blocks in the unknown tier {message.tier!r}")
    return BlockChanges(
        tier=Tier(message.tier), stored=_hashes(message.stored), removed=_hashes(message.removed)
    )


def _hashes(joined: bytes) -> tuple[bytes, ...]:
    if len(joined) % _HASH_BYTES:
        raise PeerError(f"{len(joined)} bytes are no hashes of {_HASH_BYTES} bytes each")
    return tuple(joined[at : at + _HASH_BYTES] for at in range(0, len(joined), _HASH_BYTES))


def encode_prompt_logprobs(event: PromptLogprobs) -> pb.PromptLogprobs:
    """All entries of an event have equally many alternatives."""
    entries = event.entries
    return pb.PromptLogprobs(
        first_position=event.first_position,
        token_ids=[entry.token_id for entry in entries],
        logprobs=[entry.logprob for entry in entries],
        ranks=[entry.rank for entry in entries],
        top=len(entries[0].top) if entries else 0,
        top_ids=[token_id for entry in entries for token_id, _ in entry.top],
        top_logprobs=[logprob for entry in entries for _, logprob in entry.top],
    )


def decode_prompt_logprobs(
    message: pb.PromptLogprobs, key: RequestKey, at_s: float
) -> PromptLogprobs:
    count, top = len(message.token_ids), message.top
    pairs = [*zip(message.top_ids, message.top_logprobs, strict=False)]
    if not count == len(message.logprobs) == len(message.ranks) or len(pairs) != count * top:
        raise PeerError("a worker sent prompt logprobs of unequal lengths")
    told = zip(message.token_ids, message.logprobs, message.ranks, strict=True)
    return PromptLogprobs(
        key=key,
        at_s=at_s,
        first_position=message.first_position,
        entries=tuple(
            PromptLogprob(token_id, logprob, rank, tuple(pairs[i * top : (i + 1) * top]))
            for i, (token_id, logprob, rank) in enumerate(told)
        ),
    )


def encode_step_times(times: StepCoefficients) -> inference_pb.StepTimes:
    knots = [inference_pb.DecodeKnot(sequences=n, seconds=s) for n, s in times.decode_knots]
    scalars = {name: getattr(times, name) for name in SCALARS}
    return inference_pb.StepTimes(decode_knots=knots, **scalars)


def decode_step_times(message: inference_pb.StepTimes) -> StepCoefficients:
    """Raises ValueError for what no step can take."""
    knots = tuple((knot.sequences, knot.seconds) for knot in message.decode_knots)
    scalars = {name: getattr(message, name) for name in SCALARS}
    return StepCoefficients(decode_knots=knots, **scalars)


def encode_hello(hello: WorkerHello) -> pb.WorkerHello:
    fields = asdict(hello) | {"step_times": encode_step_times(hello.step_times)}
    return pb.WorkerHello(wire_version=WIRE_VERSION, **fields)


def decode_hello(message: pb.WorkerHello) -> WorkerHello:
    """Raises PeerError when the worker speaks another version."""
    if message.wire_version != WIRE_VERSION:
        raise PeerError(
            f"worker {message.name} speaks wire version {message.wire_version}, "
            f"this router {WIRE_VERSION}: install the same kvrelay on both"
        )
    fields = {name: getattr(message, name) for name in WorkerHello.__dataclass_fields__}
    if message.role not in tuple(Role):
        raise PeerError(f"worker {message.name} has the unknown role {message.role!r}")
    fields["role"] = Role(message.role)
    fields["transfer_addresses"] = tuple(message.transfer_addresses)
    fields["step_times"] = _told_times(message)
    if not message.HasField("rope_border_tokens"):
        fields["rope_border_tokens"] = None
    return WorkerHello(**fields)


def _told_times(message: pb.WorkerHello) -> StepCoefficients:
    try:
        return decode_step_times(message.step_times)
    except ValueError as error:
        raise PeerError(f"worker {message.name} sent step_times with {error}") from None


def encode_logprobs(logprobs: TokenLogprobs) -> public_pb.TokenLogprobs:
    return public_pb.TokenLogprobs(
        chosen=public_pb.TokenLogprob(token_id=logprobs.token_id, logprob=logprobs.logprob),
        top=[public_pb.TokenLogprob(token_id=t, logprob=p) for t, p in logprobs.top],
    )


def decode_logprobs(message: public_pb.TokenLogprobs) -> TokenLogprobs:
    top = tuple((entry.token_id, entry.logprob) for entry in message.top)
    return TokenLogprobs(message.chosen.token_id, message.chosen.logprob, top)


def encode_event(event: WorkerEvent, now_s: float) -> pb.Event:
    """`now_s` is the same clock as the event's `at_s`."""
    out = pb.Event(key=encode_key(event.key), age_s=now_s - event.at_s)
    match event:
        case Reserved(held_tokens=held_tokens):
            out.reserved.SetInParent()
            out.reserved.held_tokens = held_tokens
        case ReserveRefused(reason=reason):
            out.reserve_refused.reason = reason
        case Lifetime(name=name, tokens=tokens, source=source):
            out.lifetime.CopyFrom(pb.Lifetime(name=name, tokens=tokens, source=source))
        case Tokens():
            out.tokens.CopyFrom(_encode_tokens(event))
        case PromptLogprobs():
            out.prompt_logprobs.CopyFrom(encode_prompt_logprobs(event))
        case RequestFailed(reason=reason, message=message):
            out.failed.reason = reason
            out.failed.message = message
        case Released():
            out.released.SetInParent()
        case _:
            assert_never(event)
    return out


def _encode_tokens(event: Tokens) -> pb.Tokens:
    return pb.Tokens(
        choice=event.choice,
        first_index=event.first_index,
        token_ids=event.token_ids,
        logprobs=[encode_logprobs(entry) for entry in event.logprobs],
        finish_reason=event.finish_reason or "",
        stop_token_id=event.stop_token_id,
        stood_back_s=event.stood_back_s,
    )


def decode_event(message: pb.Event, now_s: float) -> WorkerEvent:
    """On the receiver's clock: `now_s` less the event's age."""
    key, at_s = decode_key(message.key), now_s - message.age_s
    match message.WhichOneof("event"):
        case "tokens":
            return _decode_tokens(message.tokens, key, at_s)
        case "lifetime":
            said = message.lifetime
            return Lifetime(
                key=key, at_s=at_s, name=said.name, tokens=said.tokens, source=said.source
            )
        case "prompt_logprobs":
            return decode_prompt_logprobs(message.prompt_logprobs, key, at_s)
        case "reserved":
            return Reserved(key=key, at_s=at_s, held_tokens=message.reserved.held_tokens)
        case "reserve_refused":
            return ReserveRefused(key=key, at_s=at_s, reason=message.reserve_refused.reason)
        case "failed":
            failed = message.failed
            return RequestFailed(key=key, at_s=at_s, reason=failed.reason, message=failed.message)
        case "released":
            return Released(key=key, at_s=at_s)
        case other:
            raise PeerError(f"a worker sent {other or 'nothing'}, which this version can't read")


def _decode_tokens(message: pb.Tokens, key: RequestKey, at_s: float) -> Tokens:
    return Tokens(
        key=key,
        at_s=at_s,
        choice=message.choice,
        first_index=message.first_index,
        token_ids=tuple(message.token_ids),
        logprobs=tuple(decode_logprobs(entry) for entry in message.logprobs),
        finish_reason=_decode_reason(message.finish_reason),
        stop_token_id=message.stop_token_id if message.HasField("stop_token_id") else None,
        stood_back_s=message.stood_back_s,
    )


def _decode_reason(text: str) -> FinishReason | None:
    if text and text not in tuple(FinishReason):
        raise PeerError(f"a worker sent the unknown finish reason {text!r}")
    return FinishReason(text) if text else None


def encode_batch(
    events: Iterable[WorkerEvent],
    counters: Counters,
    now_s: float,
    blocks: Iterable[BlockChanges] = (),
) -> pb.FromWorker:
    """All that one engine step has to say to one router."""
    return pb.FromWorker(
        events=[encode_event(event, now_s) for event in events],
        counters=pb.Counters(**asdict(counters)),
        blocks=map(encode_changes, blocks),
    )


def decode_counters(message: pb.Counters) -> Counters:
    names = Counters.__dataclass_fields__
    fields = {name: getattr(message, name) for name in names}
    fields["links"] = tuple(_decode_link(link) for link in message.links)
    fields["tiers"] = tuple(map(_decode_tier, message.tiers))
    return Counters(**fields)


def _decode_tier(message: pb.TierLoad) -> TierLoad:
    return TierLoad(tier=message.tier, running=message.running, waiting=message.waiting)


def _decode_link(message: pb.Link) -> LinkState:
    return LinkState(
        peer=Incarnation(message.peer),
        transport=message.transport,
        bytes_per_s=message.bytes_per_s,
        latency_s=message.latency_s,
    )
