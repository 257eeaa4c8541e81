"""The contract of every message class: it comes back as it was, no field is ignored, and what can't
be read is refused by name. Classes come from the unions, so a new one is tested by itself."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from enum import StrEnum
from functools import cache
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import pytest
from google.protobuf.message import Message

from cluster.on_ray.asked import ASKED, Asked
from cluster.worker.checkpoint.service import OFFERS
from engine.core.checkpoint_files import CheckpointOffer
from kvpool.core.layout.layout import DTYPE_BYTES
from kvpool.core.node.messages import PoolMessage
from kvpool.core.transfer.messages import Commit, PeerMessage
from kvpool.core.transfer.pool_map import KvFacts
from kvpool.wire import peer, pool
from kvrelay import wire
from kvrelay.client.requests import model_info_of, server_info_of
from kvrelay.codec import HASH_BYTES, EnvelopeCodec, MessageCodec
from kvrelay.counters import Counters
from kvrelay.errors import PeerError
from kvrelay.messages import (
    Abort,
    BlockChanges,
    PoolUpdate,
    Prefill,
    PromptLogprobs,
    ToWorker,
    WorkerEvent,
    WorkerHello,
)
from kvrelay.results import ModelInfo, ServerInfo
from kvrelay.types import (
    WIRE_VERSION,
    PromptLogprob,
    RequestSpec,
    Sampling,
    StepCoefficients,
    TokenLogprobs,
)
from kvrelay.v1 import (
    admin_pb2,
    counters_pb2,
    inference_pb2,
    peer_pb2,
    pool_node_pb2,
    pool_pb2,
    worker_pb2,
)

NOW_S = 1024.0
SEEDS = range(20)


@dataclass(frozen=True, slots=True)
class Door:
    """Where messages of some classes are written and read."""

    classes: tuple[Any, ...]
    message: type[Message]
    encode: Callable[[Any], Message]
    decode: Callable[[Any], Any]
    oneof: str = ""
    without_class: tuple[str, ...] = ()
    """Kinds of the oneof that are read elsewhere."""

    def inner(self, message: Message) -> Any:
        """What carries the fields of the class."""
        return getattr(message, message.WhichOneof(self.oneof) or "") if self.oneof else message

    def sent(self, value: Any) -> bytes:
        return self.encode(value).SerializeToString(deterministic=True)

    def back(self, message: Message) -> Any:
        """As it is read after its bytes have travelled."""
        return self.decode(self.message.FromString(message.SerializeToString()))


def _joined(message: PoolMessage) -> pool_pb2.PoolMessage:
    return pool_pb2.PoolMessage.FromString(b"".join(part[1:] for part in pool.encode(message)))


DOORS = (
    Door(
        get_args(ToWorker),
        worker_pb2.ToWorker,
        wire.encode_to_worker,
        wire.decode_to_worker,
        "message",
        ("hello", "refused"),
    ),
    Door(
        get_args(WorkerEvent),
        worker_pb2.Event,
        lambda event: wire.encode_event(event, NOW_S),
        lambda message: wire.decode_event(message, NOW_S),
        "event",
    ),
    Door(
        get_args(PeerMessage),
        peer_pb2.PeerMessage,
        lambda one: peer_pb2.PeerMessage.FromString(peer.encode(one)),
        lambda message: peer.decode(message.SerializeToString()),
        "message",
    ),
    Door(
        get_args(PoolMessage),
        pool_pb2.PoolMessage,
        _joined,
        lambda message: pool.Assembler().add(b"\0" + message.SerializeToString()),
        "message",
    ),
    Door((WorkerHello,), worker_pb2.WorkerHello, wire.encode_hello, wire.decode_hello),
    Door(
        (Counters,),
        counters_pb2.Counters,
        lambda one: wire.encode_batch([], one, NOW_S).counters,
        wire.decode_counters,
    ),
    Door(
        (BlockChanges,),
        pool_node_pb2.BlockChanges,
        lambda one: wire.encode_batch([], Counters(), NOW_S, [one]).blocks[0],
        lambda message: wire.decode_changes([message])[0],
    ),
    Door((PoolUpdate,), pool_node_pb2.PoolUpdate, wire.encode_update, wire.decode_update),
    Door(
        (ServerInfo,),
        inference_pb2.GetServerInfoResponse,
        MessageCodec(ServerInfo, inference_pb2.GetServerInfoResponse, "").encode,
        server_info_of,
    ),
    Door(
        (ModelInfo,),
        inference_pb2.GetModelInfoResponse,
        MessageCodec(ModelInfo, inference_pb2.GetModelInfoResponse, "").encode,
        model_info_of,
    ),
    Door((CheckpointOffer,), worker_pb2.CheckpointOffer, OFFERS.encode, OFFERS.decode),
    Door(get_args(Asked), admin_pb2.ChangeRequest, ASKED.encode, ASKED.decode, "wish"),
)
EACH = [
    pytest.param(door, cls, id=f"{door.message.__name__}-{cls.__name__}")
    for door in DOORS
    for cls in door.classes
]
each_class = pytest.mark.parametrize(("door", "cls"), EACH)


# --- values by type -----------------------------------------------------------------------------


def _knots(rng: random.Random) -> object:
    few = rng.randrange(1, 10)
    return ((few, rng.randrange(8) / 4), (few + rng.randrange(1, 10), 2.5))


OWN: dict[tuple[type, str], Callable[[random.Random], object]] = {
    (KvFacts, "dtype"): lambda rng: rng.choice([*DTYPE_BYTES]),
    (StepCoefficients, "decode_knots"): _knots,
    (Sampling, "n"): lambda rng: rng.randrange(1, 5),
    (PromptLogprob, "top"): lambda rng: ((rng.randrange(100), -0.25), (rng.randrange(100), -0.5)),
}
"""# (class, field) |-> a value of it, where not every one of its type will do"""


def made(hint: Any, rng: random.Random) -> Any:
    """A value of the type: nothing is empty, none or zero."""
    hint = getattr(hint, "__supertype__", hint)
    if is_optional(hint):
        return made(get_args(hint)[0], rng)
    if get_origin(hint) in (tuple, Sequence):
        kinds = get_args(hint)
        if len(kinds) == 1 or kinds[1] is ...:
            return tuple(made(kinds[0], rng) for _ in range(rng.randrange(1, 4)))
        return tuple(made(kind, rng) for kind in kinds)
    if has_fields(hint):
        return built(hint, {name: one_field(hint, name, rng) for name in names_of(hint)})
    if issubclass(hint, StrEnum):
        return rng.choice([*hint])
    simple: dict[Any, Callable[[], object]] = {
        bool: lambda: True,
        int: lambda: rng.randrange(1, 2**31),
        float: lambda: rng.randrange(1, 1000) / 4,
        str: lambda: f"text-{rng.randrange(10**6)}-é",
        bytes: lambda: rng.randbytes(HASH_BYTES),
    }
    return simple[hint]()


def one_field(cls: Any, name: str, rng: random.Random) -> Any:
    own = OWN.get((cls, name))
    return own(rng) if own is not None else made(hints_of(cls)[name], rng)


def built(cls: Any, values: dict[str, Any]) -> Any:
    """A request is resumed, and moved, by as many choices as it has."""
    if cls is RequestSpec:
        values["resumed"] = fitted(values["resumed"], values["sampling"].n)
    elif cls is Prefill:
        values["since"] = fitted(values["since"], values["spec"].sampling.n)
    elif cls is Commit:
        values["resumed"] = fitted(values["resumed"], len(values["first_token_ids"]))
    return cls(**values)


def fitted(values: tuple[Any, ...], count: int) -> tuple[Any, ...]:
    return (values * count)[:count]


def is_optional(hint: Any) -> bool:
    return get_origin(hint) in (Union, UnionType)


def has_fields(kind: Any) -> bool:
    return is_dataclass(kind) or hasattr(kind, "_fields")


@cache
def hints_of(cls: Any) -> dict[str, Any]:
    return get_type_hints(cls)


def names_of(cls: Any) -> tuple[str, ...]:
    return tuple(one.name for one in fields(cls)) if is_dataclass(cls) else cls._fields


def values_of(value: Any) -> dict[str, Any]:
    return {name: getattr(value, name) for name in names_of(type(value))}


def bare(cls: Any, value: Any) -> Any:
    """Without all that may be none or empty."""
    values = values_of(value)
    for name, hint in hints_of(cls).items():
        if is_optional(hint):
            values[name] = None
        elif get_origin(hint) in (tuple, Sequence):
            values[name] = ()
        elif has_fields(hint):
            values[name] = bare(hint, values[name])
    return built(cls, values)


def changed(value: Any, rng: random.Random) -> Iterator[tuple[str, Any]]:
    """(path of a field, the value with another value of that field)"""
    cls = type(value)
    for name, old in values_of(value).items():
        for path, new in _changed_field(cls, name, old, rng):
            yield f"{cls.__name__}.{name}{path}", built(cls, values_of(value) | {name: new})


def _changed_field(
    cls: Any, name: str, old: Any, rng: random.Random
) -> Iterator[tuple[str, object]]:
    if has_fields(type(old)):
        yield from ((f" {path}", new) for path, new in changed(old, rng))
    elif type(old) is tuple and has_fields(type(old[0])):
        yield from ((f" {path}", (new, *old[1:])) for path, new in changed(old[0], rng))
    elif type(old) is bool:
        yield "", not old
    else:
        yield "", next(new for _ in range(100) if (new := one_field(cls, name, rng)) != old)


# --- the contract -------------------------------------------------------------------------------


@each_class
def test_a_message_comes_back_as_it_was(door: Door, cls: Any) -> None:
    for seed in SEEDS:
        value = made(cls, random.Random(seed))
        assert door.back(door.encode(value)) == value
        assert door.back(door.encode(bare(cls, value))) == bare(cls, value)


@each_class
def test_every_field_changes_the_bytes_and_arrives(door: Door, cls: Any) -> None:
    rng = random.Random(1)
    value = made(cls, rng)
    for path, other in changed(value, rng):
        assert door.sent(other) != door.sent(value), path
        assert door.back(door.encode(other)) == other, path


@each_class
def test_unknown_names_and_wrong_sizes_are_refused_by_name(door: Door, cls: Any) -> None:
    message = door.encode(made(cls, random.Random(2)))
    for where in spoiled(cls, door.inner(message)):
        with pytest.raises(PeerError, match=rf"sent {where} "):
            door.back(message)
    door.back(message)


def spoiled(cls: Any, message: Any) -> Iterator[str]:
    """The message is wrong in one field after another, which is named."""
    for name, hint in hints_of(cls).items():
        if not hasattr(message, name):
            continue  # read and written by a function of its own
        kind = (get_args(hint) or (hint,))[0]
        kind = getattr(kind, "__supertype__", kind)
        told, bad = getattr(message, name), _bad(kind)
        if has_fields(kind):
            yield from spoiled(kind, told if isinstance(told, Message) else told[0])
        elif bad is not None:
            setattr(message, name, bad)
            yield f"{cls.__name__}.{name}"
            setattr(message, name, told)
        elif get_origin(kind) is tuple and isinstance(told[0], int):
            told.append(1)
            yield f"{cls.__name__}.{name}"
            told.pop()


def _bad(kind: Any) -> str | bytes | None:
    if kind is bytes:
        return bytes(HASH_BYTES - 1)
    return "oracle" if isinstance(kind, type) and issubclass(kind, StrEnum) else None


def test_all_that_can_be_wrong_is_tried() -> None:
    found = {
        where
        for door in DOORS
        for cls in door.classes
        for where in spoiled(cls, door.inner(door.encode(made(cls, random.Random(3)))))
    }
    assert found == {
        *("Tokens.finish_reason", "WorkerHello.role", "BlockChanges.tier"),
        *("StoredRun.hashes", "PullWanted.hashes"),
        *("SlabLent.codec", "CodecSpeed.codec", "PieceBlocks.runs"),
        *("ChainBlock.hash", "ChainBlock.parent", "FetchWanted.hashes"),
        *("FetchDone.damaged", "LookupWanted.hashes", "Counters.role", "Flip.role"),
    }


@pytest.mark.parametrize("door", [door for door in DOORS if door.oneof])
def test_a_message_of_no_kind_is_refused(door: Door) -> None:
    with pytest.raises(PeerError, match="sent nothing, which this version can't read"):
        door.back(door.message())


@pytest.mark.parametrize("door", [door for door in DOORS if door.oneof])
def test_every_kind_of_an_envelope_has_its_class(door: Door) -> None:
    classes = {cls.__name__ for cls in door.classes}
    kinds = door.message.DESCRIPTOR.oneofs[0].fields
    without = {kind.name for kind in kinds if kind.message_type.name not in classes}
    assert without == {*door.without_class}
    for kind in door.without_class:
        with pytest.raises(PeerError, match=f"sent {kind}, which this version can't read"):
            door.back(door.message(**{kind: {}}))


def test_classes_with_functions_of_their_own() -> None:
    """Their messages have other fields, so the tests above do not look into them."""
    logprobs = TokenLogprobs(1, -0.5, ((1, -0.5), (2, -1.5)))
    told = wire.logprobs_to_wire(logprobs)
    assert wire.logprobs_from_wire(inference_pb2.TokenLogprobs(**told)) == logprobs
    event = worker_pb2.Event(prompt_logprobs={"token_ids": [1, 2], "logprobs": [-1.0, -2.0]})
    with pytest.raises(PeerError, match="sent PromptLogprobs with columns of unequal lengths"):
        wire.decode_event(event, NOW_S)
    assert PromptLogprobs in get_args(WorkerEvent)


# --- a codec that can't be made -----------------------------------------------------------------


@dataclass
class Unheard:
    key: str


@dataclass
class Key:
    request_id: str
    attempt: int
    more: int = 0


@dataclass
class BlockSpan:
    """Like PieceBlocks, whose runs are repeated."""

    group: int
    first: int
    runs: int


def test_a_class_without_a_message_is_found_out_at_once() -> None:
    with pytest.raises(TypeError, match=r"ToWorker.message has no message of the name Unheard"):
        EnvelopeCodec(Abort | Unheard, worker_pb2.ToWorker, "")


def test_a_field_of_one_side_only_is_found_out_at_once() -> None:
    with pytest.raises(TypeError, match="Key and the message Key differ in more"):
        MessageCodec(Key, worker_pb2.Key, "")


def test_a_type_that_does_not_fit_is_found_out_at_once() -> None:
    with pytest.raises(TypeError, match=r"BlockSpan.runs: <class 'int'> does not travel"):
        MessageCodec(BlockSpan, peer_pb2.PieceBlocks, "")


def test_another_version_is_refused_before_anything_is_read() -> None:
    hello = wire.encode_hello(made(WorkerHello, random.Random(4)))
    assert hello.wire_version == WIRE_VERSION
    hello.wire_version, hello.role = WIRE_VERSION + 1, "oracle"
    with pytest.raises(PeerError, match=f"speaks wire version {WIRE_VERSION + 1}"):
        wire.decode_hello(hello)
