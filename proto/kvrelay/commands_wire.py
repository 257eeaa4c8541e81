"""What a router says to a worker, to protobuf and back. Pure. What this module can't read raises
PeerError.

A request's key to protobuf and back. Pure.
"""

from __future__ import annotations

from typing import assert_never

from kvrelay.errors import PeerError
from kvrelay.messages import (
    Abort,
    Generate,
    Prefill,
    PrefixSource,
    Preload,
    Reserve,
    Stop,
    ToWorker,
)
from kvrelay.types import Incarnation, RequestKey, RequestSpec, Sampling
from kvrelay.v1 import worker_pb2 as pb


def encode_key(key: RequestKey) -> pb.Key:
    return pb.Key(request_id=key.request_id, attempt=key.attempt)


def decode_key(key: pb.Key) -> RequestKey:
    return RequestKey(key.request_id, key.attempt)


MAX_TOP_K = 2**31 - 1  # more than any vocabulary


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
        prompt_logprobs=sampling.prompt_logprobs,
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
        prompt_logprobs=(message.prompt_logprobs if message.HasField("prompt_logprobs") else None),
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
        resumed=[pb.EmittedIds(token_ids=ids) for ids in spec.resumed],
        finished_choices=spec.finished_choices,
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
        resumed=_decode_resumed(message),
        finished_choices=tuple(message.finished_choices),
    )


def _decode_resumed(message: pb.RequestSpec) -> tuple[tuple[int, ...], ...]:
    if len(message.resumed) not in (0, message.sampling.n):
        raise PeerError(f"{len(message.resumed)} choices are resumed of {message.sampling.n}")
    return tuple(tuple(choice.token_ids) for choice in message.resumed)


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
        target=(
            Incarnation(message.target_incarnation)
            if message.HasField("target_incarnation")
            else None
        ),
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
        case Reserve(spec=spec, source=source, counted=counted):
            reserve = pb.Reserve(
                spec=_encode_spec(spec), source_incarnation=source, counted=counted
            )
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
            reserve = message.reserve
            named = reserve.HasField("source_incarnation")
            source = Incarnation(reserve.source_incarnation) if named else None
            counted = reserve.counted if reserve.HasField("counted") else None
            return Reserve(spec=_decode_spec(reserve.spec), source=source, counted=counted)
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
