"""What single values of a cluster file may be: counts, names, devices; "auto" is None. Pure."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    SerializerFunctionWrapHandler,
    WithJsonSchema,
    WrapSerializer,
)
from pydantic_core import CoreSchema

from cluster.quantities import Bytes

Json = dict[str, Any]


def _none_if_auto(given: object) -> object:
    return None if given == "auto" else given


def _on_or_off(given: object) -> object:
    """In YAML `on` is true."""
    if isinstance(given, bool):
        return "on" if given else "off"
    return given


def _off_if_false(given: object) -> object:
    return "off" if given is False else given


def _as_tuple(given: object) -> object:
    """What a validator before it has seen isn't JSON any more."""
    return tuple(given) if isinstance(given, list) else given


def _auto_if_none(value: object, inner: SerializerFunctionWrapHandler) -> object:
    return "auto" if value is None else inner(value)


def _spelled(pattern: str, expected: str) -> tuple[AfterValidator, WithJsonSchema]:
    """Text that matches the whole of `pattern`; `expected` says so in words."""

    def check(given: str) -> str:
        if not re.fullmatch(pattern, given):
            raise ValueError(expected)
        return given

    return AfterValidator(check), WithJsonSchema({"type": "string", "pattern": f"^({pattern})$"})


class _AutoInSchema:
    """The JSON schema allows "auto" beside what the type allows."""

    @staticmethod
    def __get_pydantic_json_schema__(core: CoreSchema, handler: GetJsonSchemaHandler) -> Json:
        return {"anyOf": [*handler(core)["anyOf"], {"const": "auto"}]}


_AUTO = (BeforeValidator(_none_if_auto), WrapSerializer(_auto_if_none), _AutoInSchema)

Count = Annotated[int, Field(ge=1)]
Port = Annotated[int, Field(ge=0, le=65535)]
AutoBool = Annotated[bool | None, *_AUTO]
AutoCount = Annotated[Count | None, *_AUTO]
AutoBytes = Annotated[Bytes | None, *_AUTO]
AutoPort = Annotated[Port | None, *_AUTO]
AutoText = Annotated[str | None, *_AUTO]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
AttentionBackend = Literal["auto", "native", "triton", "flex", "flashinfer", "flash", "sdpa"]
Name = Annotated[str, *_spelled(r"[a-z0-9]([a-z0-9-]{0,48}[a-z0-9])?", "a-z, 0-9 and inner dashes")]
Transport = Literal["shm", "nixl", "ucx", "cuda_ipc"]
FarTransport = Literal["nixl", "ucx"]
AutoFarTransports = Annotated[tuple[FarTransport, ...] | None, BeforeValidator(_as_tuple), *_AUTO]
AutoTransports = Annotated[
    Annotated[tuple[Transport, ...], Field(min_length=1)] | None, BeforeValidator(_as_tuple), *_AUTO
]
Device = Annotated[str, *_spelled(r"auto|cpu|cuda(:\d+)?", "auto, cpu, cuda or cuda:N")]
Profile = Annotated[str, BeforeValidator(_off_if_false), *_spelled(r".+", "auto, off or a file")]
"""In YAML `off` is false."""
AutoOrOff = Annotated[Literal["auto", "off"], BeforeValidator(_off_if_false)]
AutoOnOff = Annotated[Literal["auto", "on", "off"], BeforeValidator(_on_or_off)]
Quantity = Annotated[float, Field(ge=0)]


class Section(BaseModel):
    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True
    )
