"""What a worker says to its routers, to protobuf and back. Clock readings become ages on the way.

Pure: the caller passes its clock. What this module can't read raises PeerError.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import assert_never

from kvrelay.errors import PeerError
from kvrelay.key_wire import decode_key, encode_key
from kvrelay.messages import (
    Lifetime,
    PromptLogprobs,
    Released,
    RequestFailed,
    Reserved,
    ReserveRefused,
    Tokens,
    WorkerEvent,
    WorkerHello,
)
from kvrelay.prompt_logprobs_wire import decode_prompt_logprobs, encode_prompt_logprobs
from kvrelay.step_times import StepCoefficients
from kvrelay.times_wire import decode_step_times, encode_step_times
from kvrelay.types import (
    WIRE_VERSION,
    FinishReason,
    RequestKey,
    Role,
    TokenLogprobs,
)
from kvrelay.v1 import inference_pb2 as public_pb
from kvrelay.v1 import worker_pb2 as pb


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
