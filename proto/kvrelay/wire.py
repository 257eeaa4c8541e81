"""What routers, workers and pool nodes say to each other, to protobuf and back. Pure.

Clock readings become ages on the way: the caller passes its clock. What can't be read is a
PeerError. `kvrelay.codec` does the work; here stand the exceptions.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvrelay.codec import HASH_BYTES, EnvelopeCodec, MessageCodec, check, travels_by
from kvrelay.counters import Counters
from kvrelay.errors import PeerError
from kvrelay.messages import (
    BlockChanges,
    PoolUpdate,
    Prefill,
    PromptLogprobs,
    StoredRun,
    ToWorker,
    WorkerEvent,
    WorkerHello,
)
from kvrelay.types import WIRE_VERSION, PromptLogprob, RequestKey, RequestSpec, TokenLogprobs
from kvrelay.v1 import counters_pb2, inference_pb2, pool_node_pb2
from kvrelay.v1 import worker_pb2 as pb


def logprobs_to_wire(logprobs: TokenLogprobs) -> dict[str, object]:
    return {
        "chosen": {"token_id": logprobs.token_id, "logprob": logprobs.logprob},
        "top": [{"token_id": token_id, "logprob": one} for token_id, one in logprobs.top],
    }


def logprobs_from_wire(message: inference_pb2.TokenLogprobs) -> TokenLogprobs:
    top = tuple([(entry.token_id, entry.logprob) for entry in message.top])
    return TokenLogprobs(message.chosen.token_id, message.chosen.logprob, top)


def _prompt_logprobs_to_wire(event: PromptLogprobs) -> dict[str, object]:
    """In columns, for prompts are long. All entries of an event have equally many alternatives."""
    entries = event.entries
    return {
        "first_position": event.first_position,
        "token_ids": [entry.token_id for entry in entries],
        "logprobs": [entry.logprob for entry in entries],
        "ranks": [entry.rank for entry in entries],
        "top": len(entries[0].top) if entries else 0,
        "top_ids": [token_id for entry in entries for token_id, _ in entry.top],
        "top_logprobs": [logprob for entry in entries for _, logprob in entry.top],
    }


def _prompt_logprobs_from_wire(
    message: pb.PromptLogprobs, key: RequestKey, at_s: float
) -> PromptLogprobs:
    count, top = len(message.token_ids), message.top
    pairs = [*zip(message.top_ids, message.top_logprobs, strict=False)]
    if not count == len(message.logprobs) == len(message.ranks) or len(pairs) != count * top:
        raise PeerError("PromptLogprobs with columns of unequal lengths")
    columns = zip(message.token_ids, message.logprobs, message.ranks, strict=True)
    return PromptLogprobs(
        key=key,
        at_s=at_s,
        first_position=message.first_position,
        entries=tuple(
            PromptLogprob(token_id, logprob, rank, tuple(pairs[i * top : (i + 1) * top]))
            for i, (token_id, logprob, rank) in enumerate(columns)
        ),
    )


def _stored_run_to_wire(run: StoredRun) -> dict[str, object]:
    return {
        "number": run.number,
        "parent": run.parent,
        "start": run.start,
        "hashes": run.hashes,
    }


def _stored_run_from_wire(message: pool_node_pb2.StoredRun) -> StoredRun:
    """A field of the type bytes would be one hash."""
    if len(message.hashes) % HASH_BYTES:
        raise PeerError(
            f"StoredRun.hashes of {len(message.hashes)} bytes, "
            f"which are no hashes of {HASH_BYTES} bytes each"
        )
    return StoredRun(
        number=message.number, parent=message.parent, start=message.start, hashes=message.hashes
    )


def _check_resumed(spec: RequestSpec) -> None:
    if len(spec.resumed) not in (0, spec.sampling.n):
        raise ValueError(f"{len(spec.resumed)} choices are resumed of {spec.sampling.n}")


def _check_since(prefill: Prefill) -> None:
    choices = prefill.spec.sampling.n
    if len(prefill.since) not in (0, choices):
        raise ValueError(f"{len(prefill.since)} choices were moved of {choices}")


travels_by(TokenLogprobs, logprobs_to_wire, logprobs_from_wire)
travels_by(PromptLogprobs, _prompt_logprobs_to_wire, _prompt_logprobs_from_wire)
travels_by(StoredRun, _stored_run_to_wire, _stored_run_from_wire)
check(RequestSpec, _check_resumed)
check(Prefill, _check_since)

_TO_WORKER: EnvelopeCodec[ToWorker, pb.ToWorker] = EnvelopeCodec(ToWorker, pb.ToWorker, "a router")
_EVENT: EnvelopeCodec[WorkerEvent, pb.Event] = EnvelopeCodec(
    WorkerEvent, pb.Event, "a worker", apart=("key", "at_s")
)
_KEY = MessageCodec(RequestKey, pb.Key, "a worker")
_HELLO = MessageCodec(WorkerHello, pb.WorkerHello, "a worker", apart=("wire_version",))
_COUNTERS = MessageCodec(Counters, counters_pb2.Counters, "a worker")
_CHANGES = MessageCodec(BlockChanges, pool_node_pb2.BlockChanges, "a worker")
_UPDATE = MessageCodec(PoolUpdate, pool_node_pb2.PoolUpdate, "a pool node")

encode_to_worker, decode_to_worker = _TO_WORKER.encode, _TO_WORKER.decode
encode_update, decode_update = _UPDATE.encode, _UPDATE.decode
decode_counters = _COUNTERS.decode


def encode_hello(hello: WorkerHello) -> pb.WorkerHello:
    return _HELLO.encode(hello, wire_version=WIRE_VERSION)


def decode_hello(message: pb.WorkerHello) -> WorkerHello:
    """Raises PeerError when the worker speaks another version."""
    if message.wire_version != WIRE_VERSION:
        raise PeerError(
            f"worker {message.name} speaks wire version {message.wire_version}, "
            f"this router {WIRE_VERSION}: install the same kvrelay on both"
        )
    return _HELLO.decode(message)


def encode_event(event: WorkerEvent, now_s: float) -> pb.Event:
    """`now_s` is the same clock as the event's `at_s`."""
    return _EVENT.encode(event, key=_KEY.encode(event.key), age_s=now_s - event.at_s)


def decode_event(message: pb.Event, now_s: float) -> WorkerEvent:
    """On the receiver's clock: `now_s` less the event's age."""
    return _EVENT.decode(message, key=_KEY.decode(message.key), at_s=now_s - message.age_s)


def encode_batch(
    events: Iterable[WorkerEvent],
    counters: Counters,
    now_s: float,
    blocks: Iterable[BlockChanges] = (),
) -> pb.FromWorker:
    """All that one engine step has to say to one router."""
    return pb.FromWorker(
        events=[encode_event(event, now_s) for event in events],
        counters=_COUNTERS.encode(counters),
        blocks=map(_CHANGES.encode, blocks),
    )


def decode_changes(messages: Iterable[pool_node_pb2.BlockChanges]) -> tuple[BlockChanges, ...]:
    return tuple(map(_CHANGES.decode, messages))
