"""Router and worker messages to protobuf and back. Clock readings become ages on the way out.

Pure: the caller passes its clock. What this module can't read raises PeerError.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import assert_never

from kvrelay.errors import PeerError
from kvrelay.messages import (
    Abort,
    Generate,
    Lifetime,
    Prefill,
    PrefixSource,
    Preload,
    Released,
    RequestFailed,
    Reserve,
    Reserved,
    ReserveRefused,
    Stop,
    Tokens,
    ToWorker,
    WorkerEvent,
    WorkerHello,
)
from kvrelay.step_times import StepCoefficients
from kvrelay.times_wire import decode_step_times, encode_step_times
from kvrelay.types import (
    WIRE_VERSION,
    FinishReason,
    Incarnation,
    RequestKey,
    RequestSpec,
    Role,
    Sampling,
    TokenLogprobs,
)
from kvrelay.v1 import inference_pb2 as public_pb
from kvrelay.v1 import worker_pb2 as pb

MAX_TOP_K = 2**31 - 1  # more than any vocabulary


def encode_key(key: RequestKey) -> pb.Key:
    return pb.Key(request_id=key.request_id, attempt=key.attempt)


def decode_key(key: pb.Key) -> RequestKey:
    return RequestKey(key.request_id, key.attempt)


# --- router -> worker ---------------------------------------------------------------------------


def encode_sampling(sampling: Sampling) -> pb.Sampling:
    return pb.Sampling(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=min(sampling.top_k, MAX_TOP_K),
        min_p=sampling.min_p,
        frequency_penalty=sampling.frequency_penalty,
        presence_penalty=sampling.presence_penalty,
        repetition_penalty=sampling.repetition_penalty,
        max_tokens=sampling.max_tokens,
        min_tokens=sampling.min_tokens,
        stop_token_ids=sampling.stop_token_ids,
        n=sampling.n,
        logprobs=sampling.logprobs,
        seed=sampling.seed,
        logit_bias=dict(sampling.logit_bias),
    )


def decode_sampling(message: pb.Sampling) -> Sampling:
    return Sampling(
        temperature=message.temperature,
        top_p=message.top_p,
        top_k=message.top_k,
        min_p=message.min_p,
        frequency_penalty=message.frequency_penalty,
        presence_penalty=message.presence_penalty,
        repetition_penalty=message.repetition_penalty,
        max_tokens=message.max_tokens,
        min_tokens=message.min_tokens,
        stop_token_ids=tuple(message.stop_token_ids),
        n=message.n,
        logprobs=message.logprobs if message.HasField("logprobs") else None,
        seed=message.seed,
        logit_bias=tuple(sorted(message.logit_bias.items())),
    )


def _encode_spec(spec: RequestSpec) -> pb.RequestSpec:
    return pb.RequestSpec(
        key=encode_key(spec.key),
        prompt_ids=spec.prompt_ids,
        sampling=encode_sampling(spec.sampling),
        tenant=spec.tenant,
        qos_tier=spec.qos_tier,
        tpot_s=spec.tpot_s,
        emitted_ids=spec.emitted_ids,
    )


def _decode_spec(message: pb.RequestSpec) -> RequestSpec:
    return RequestSpec(
        key=decode_key(message.key),
        prompt_ids=tuple(message.prompt_ids),
        sampling=decode_sampling(message.sampling),
        tenant=message.tenant,
        qos_tier=message.qos_tier,
        tpot_s=message.tpot_s if message.HasField("tpot_s") else None,
        emitted_ids=tuple(message.emitted_ids),
    )


def _encode_source(source: PrefixSource | None) -> pb.PrefixSource | None:
    if source is None:
        return None
    return pb.PrefixSource(
        incarnation=source.peer,
        addresses=source.addresses,
        blocks=source.blocks,
        is_pool_node=source.is_pool_node,
    )


def _decode_prefill(message: pb.Prefill) -> Prefill:
    return Prefill(
        spec=_decode_spec(message.spec),
        target_addresses=tuple(message.target_addresses),
        target=Incarnation(message.target_incarnation),
        held_tokens=message.held_tokens,
        prefix_source=_decode_source(message),
        within_s=_decode_within(message),
    )


def _decode_within(message: pb.Prefill | pb.Generate) -> float | None:
    return message.within_s if message.HasField("within_s") else None


def _decode_source(message: pb.Prefill) -> PrefixSource | None:
    source = message.prefix_source
    if not message.HasField("prefix_source"):
        return None
    return PrefixSource(
        peer=Incarnation(source.incarnation),
        addresses=tuple(source.addresses),
        blocks=source.blocks,
        is_pool_node=source.is_pool_node,
    )


def encode_to_worker(message: ToWorker) -> pb.ToWorker:
    match message:
        case Reserve(spec=spec, source=source):
            reserve = pb.Reserve(spec=_encode_spec(spec), source_incarnation=source)
            return pb.ToWorker(reserve=reserve)
        case Prefill():
            prefill = pb.Prefill(
                spec=_encode_spec(message.spec),
                target_addresses=message.target_addresses,
                target_incarnation=message.target,
                held_tokens=message.held_tokens,
                prefix_source=_encode_source(message.prefix_source),
                within_s=message.within_s,
            )
            return pb.ToWorker(prefill=prefill)
        case Generate(spec=spec, within_s=within_s):
            generate = pb.Generate(spec=_encode_spec(spec), within_s=within_s)
            return pb.ToWorker(generate=generate)
        case Preload(spec=spec):
            return pb.ToWorker(preload=pb.Preload(spec=_encode_spec(spec)))
        case Abort(key=key):
            return pb.ToWorker(abort=pb.Abort(key=encode_key(key)))
        case Stop():
            stop = pb.Stop(
                key=encode_key(message.key),
                choice=message.choice,
                valid_tokens=message.valid_tokens,
            )
            return pb.ToWorker(stop=stop)
        case _:
            assert_never(message)


def decode_to_worker(message: pb.ToWorker) -> ToWorker:
    match message.WhichOneof("message"):
        case "reserve":
            return Reserve(
                spec=_decode_spec(message.reserve.spec),
                source=Incarnation(message.reserve.source_incarnation),
            )
        case "prefill":
            return _decode_prefill(message.prefill)
        case "generate":
            generate = message.generate
            return Generate(spec=_decode_spec(generate.spec), within_s=_decode_within(generate))
        case "preload":
            return Preload(spec=_decode_spec(message.preload.spec))
        case "abort":
            return Abort(key=decode_key(message.abort.key))
        case "stop":
            stop = message.stop
            key = decode_key(stop.key)
            return Stop(key=key, choice=stop.choice, valid_tokens=stop.valid_tokens)
        case other:
            raise PeerError(f"a router sent {other or 'nothing'}, which this version can't read")


# --- worker -> router ---------------------------------------------------------------------------


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
    )


def _decode_reason(text: str) -> FinishReason | None:
    if text and text not in tuple(FinishReason):
        raise PeerError(f"a worker sent the unknown finish reason {text!r}")
    return FinishReason(text) if text else None
