"""What is sent: bodies that are nearly right, JSON and bytes that are anything, and headers."""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Iterable
from typing import Any, TypeVar

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.struct_pb2 import Struct
from hypothesis import strategies as st
from pydantic import BaseModel

from kvrelay.v1 import inference_pb2 as pb
from router.http.bodies import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from router.http.neutral_fields import CHAT_NEUTRAL, COMPLETION_NEUTRAL
from router.http.streamed_input.endpoint import StreamedInputBody
from tests.integration.faces_kit import MODEL

Of = TypeVar("Of")


def mostly(common: st.SearchStrategy[Of], rare: st.SearchStrategy[Of]) -> st.SearchStrategy[Of]:
    """One of ten is rare."""
    return st.integers(0, 9).flatmap(lambda at: rare if at == 9 else common)


texts = st.text(st.characters(exclude_categories=()), max_size=12)
"""Also halves of surrogate pairs, and control characters."""
numbers = st.one_of(
    st.integers(-3, 20),
    st.integers(),
    st.floats(allow_nan=False, allow_infinity=False),
    st.sampled_from([2**31, 2**32, 2**63, 2**64, -(2**63), 10**30]),
)
anything = st.recursive(
    st.none() | st.booleans() | numbers | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=12,
)
roles = mostly(st.sampled_from(["user", "system", "assistant", "skip"]), texts | st.just("tool"))
messages = st.lists(
    st.fixed_dictionaries(
        {"role": roles, "content": mostly(texts, anything)}, optional={"name": texts}
    ),
    max_size=3,
)
token_ids = mostly(st.lists(st.integers(0, 600), max_size=8), st.lists(numbers, max_size=4))

LIKELY: dict[str, st.SearchStrategy[Any]] = {
    "model": mostly(st.just(MODEL), texts),
    "prompt": texts | token_ids | st.lists(texts | token_ids, max_size=4),
    "messages": messages,
    "tokens": token_ids,
    "token_ids": token_ids,
    "text": texts,
    "offset": numbers,
    "n": st.integers(0, 4),
    "max_tokens": st.integers(0, 30),
    "min_tokens": st.integers(0, 10),
    "temperature": st.floats(-0.1, 3),
    "logprobs": st.integers(0, 21) | st.booleans(),
    "top_logprobs": st.integers(0, 21),
    "prompt_logprobs": st.integers(0, 21),
    "stop": texts | st.lists(texts, max_size=18),
    "stop_token_ids": token_ids,
    "logit_bias": st.dictionaries(st.integers(-1, 700).map(str) | texts, numbers, max_size=3),
    "stream": st.booleans(),
    "stream_options": st.fixed_dictionaries({}, optional={"include_usage": st.booleans()}),
    "continuation": st.fixed_dictionaries(
        {"choices": st.lists(st.fixed_dictionaries({"token_ids": token_ids}), max_size=3)},
        optional={"ticket": texts},
    ),
    "chat_template_kwargs": st.dictionaries(texts, anything, max_size=3),
    "tier": mostly(st.just("free"), st.sampled_from(["premium", "other"])),
    "echo": st.booleans(),
}

KINDS: dict[str, tuple[type[BaseModel], tuple[str, ...], tuple[str, ...]]] = {
    "/v1/completions": (CompletionBody, ("prompt",), tuple(COMPLETION_NEUTRAL)),
    "/v1/chat/completions": (ChatBody, ("messages",), tuple(CHAT_NEUTRAL)),
    "/v1/completions/stream": (StreamedInputBody, (), tuple(COMPLETION_NEUTRAL)),
    "/tokenize": (TokenizeBody, (), ()),
    "/detokenize": (DetokenizeBody, ("tokens",), ()),
}
"""# path |-> its body, the fields that it needs, further fields that it may have"""


def _pairs(names: Iterable[str], *, odd: bool) -> st.SearchStrategy[tuple[str, Any]]:
    """Of a name and a value, most of which are of the right type."""
    likely = [(name, LIKELY.get(name, anything)) for name in names]
    return st.one_of(
        *(st.tuples(st.just(n), mostly(v, anything) if odd else v) for n, v in likely),
        *([st.tuples(texts, anything)] if odd else []),
    )


def _fields_for(path: str) -> st.SearchStrategy[dict[str, Any]]:
    kind, needed, neutral = KINDS[path]
    known = [name for name in kind.model_fields if name in LIKELY]
    plain = st.lists(_pairs(known, odd=False), max_size=5)
    odd = st.lists(_pairs([*kind.model_fields, *neutral], odd=True), max_size=2)
    must = st.fixed_dictionaries({name: LIKELY[name] for name in needed})
    found = st.tuples(must, mostly(plain, odd))
    return found.map(lambda parts: {**parts[0], **dict(parts[1])})


def _bytes_of(value: object) -> bytes:
    return json.dumps(value).encode()


def _damaged(body: bytes) -> st.SearchStrategy[bytes]:
    cut = st.integers(0, len(body)).map(lambda at: body[:at])
    wrong = st.sampled_from([b"", b"[", b"\xff", b"\\"]).map(lambda by: body.replace(b'"', by, 1))
    return st.one_of(cut, wrong, st.binary(max_size=60))


FIELDS = {path: _fields_for(path) for path in KINDS}


def _bodies(path: str) -> st.SearchStrategy[bytes]:
    """Whole, cut off, or not JSON at all."""
    whole = mostly(FIELDS[path], anything).map(_bytes_of)
    return mostly(whole, whole.flatmap(_damaged))


BODIES = {path: _bodies(path) for path in KINDS}
requests = st.sampled_from(sorted(KINDS)).flatmap(lambda p: st.tuples(st.just(p), BODIES[p]))
"""Pairs of a path and a body."""

_part = st.fixed_dictionaries(
    {}, optional={"text": texts, "token_ids": token_ids, "offset": st.integers(-1, 20)}
)
_line = mostly(_part, anything).map(_bytes_of)
lines = st.tuples(BODIES["/v1/completions/stream"], st.lists(_line, max_size=4)).map(
    lambda parts: b"\n".join([parts[0], *parts[1]])
)
"""Of a prompt that arrives in parts."""


_visible = st.text(
    st.characters(min_codepoint=0x20, max_codepoint=0xFF, exclude_categories=("Cc",)), max_size=20
).map(lambda text: text.strip().encode("latin-1"))
_base64 = st.binary(max_size=80).map(b64encode)
_ms = (numbers | st.sampled_from(["nan", "inf", "-1", "1e400", ""])).map(lambda n: str(n).encode())

headers = st.fixed_dictionaries(
    {},
    optional={
        b"x-slo-ttft-ms": mostly(st.just(b"50"), _ms),
        b"x-slo-tpot-ms": mostly(st.just(b"50"), _ms),
        b"x-deadline-ms": mostly(st.just(b"20000"), _ms),
        b"x-customer-tier": _visible | st.just(b"gold"),
        b"authorization": _visible | st.sampled_from([b"Bearer x", b"Bearer", b"Basic x"]),
        b"x-kvrelay-promise": _base64 | _visible,
        b"x-kvrelay-ledger": _visible | st.just(b"1"),
        b"x-request-id": _visible,
        b"traceparent": _visible,
        b"content-type": mostly(st.just(b"application/json"), _visible),
    },
)


def _scalar(field: FieldDescriptor) -> st.SearchStrategy[Any]:
    kinds = {
        FieldDescriptor.CPPTYPE_BOOL: st.booleans(),
        FieldDescriptor.CPPTYPE_DOUBLE: st.floats() | st.floats(0, 2),
        FieldDescriptor.CPPTYPE_FLOAT: st.floats(width=32),
        FieldDescriptor.CPPTYPE_INT32: st.integers(-2, 30) | st.integers(-(2**31), 2**31 - 1),
        FieldDescriptor.CPPTYPE_INT64: st.integers(-2, 30) | st.integers(-(2**63), 2**63 - 1),
        FieldDescriptor.CPPTYPE_UINT32: st.integers(0, 30) | st.integers(0, 2**32 - 1),
        FieldDescriptor.CPPTYPE_UINT64: st.integers(0, 30) | st.integers(0, 2**64 - 1),
    }
    if field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
        is_bytes = field.type == FieldDescriptor.TYPE_BYTES
        return st.binary(max_size=80) if is_bytes else st.text(max_size=12)
    return kinds[field.cpp_type]


@st.composite
def filled(draw: st.DrawFn, message: Message, share: int = 4) -> Message:
    """About one of `share` of its fields, and of those within, has a value."""
    _fill(draw, message, message.DESCRIPTOR, share)
    return message


def _fill(draw: st.DrawFn, message: Message, kind: Descriptor, share: int) -> None:
    for field in kind.fields:
        if draw(st.integers(0, share - 1)):
            continue
        if isinstance(message, Struct):
            message.update(draw(st.dictionaries(st.text(max_size=6), _plain, max_size=3)))
        elif field.is_repeated:
            _fill_several(draw, message, field, share)
        elif field.message_type is not None:
            _fill(draw, getattr(message, field.name), field.message_type, share)
        else:
            setattr(message, field.name, draw(_scalar(field)))


_plain = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=5,
)


def _fill_several(draw: st.DrawFn, message: Message, field: FieldDescriptor, share: int) -> None:
    values = getattr(message, field.name)
    count = draw(st.integers(0, 4))
    if field.message_type is None:
        values.extend(draw(st.lists(_scalar(field), min_size=count, max_size=count)))
    elif field.message_type.GetOptions().map_entry:
        key, value = (field.message_type.fields_by_name[name] for name in ("key", "value"))
        for _ in range(count):
            values[draw(_scalar(key))] = draw(_scalar(value))
    else:
        for _ in range(count):
            _fill(draw, values.add(), field.message_type, share)


def _likelier(request: pb.GenerateRequest) -> pb.GenerateRequest:
    """Names that nothing has would be all that is ever refused."""
    if len(request.model) % 6 != 1:
        request.model = ""
    if len(request.tier) % 6 != 1:
        request.tier = ""
    if request.WhichOneof("input") is None and not request.ledger:
        request.text = "the earth"
    return request


def _likelier_parts(parts: list[pb.PromptPart]) -> list[pb.PromptPart]:
    for part in parts[1:]:
        if len(part.text) % 6 != 1:
            part.ClearField("request")
    for part in parts[:1]:
        _likelier(part.request)
    return parts


generate_requests = st.builds(pb.GenerateRequest).flatmap(filled).map(_likelier)
prompt_parts = st.lists(st.builds(pb.PromptPart).flatmap(filled), max_size=4).map(_likelier_parts)
