"""Types of single values in a cluster file: counts, names, devices; "auto" is None. Pure.

Durations and sizes have units: "30s", "500ms", "2GiB".
"""

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
    PlainSerializer,
    SerializerFunctionWrapHandler,
    WithJsonSchema,
    WrapSerializer,
)
from pydantic_core import CoreSchema

from kvrelay.types import Role

SECONDS_PER_UNIT = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
BYTES_PER_UNIT = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12} | {
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
}

DURATION_HELP = 'a duration with its unit (ms, s, m, h), such as "30s"'
SIZE_HELP = 'a size with its unit (B, KB, MB, GB, KiB, MiB, GiB), such as "2GiB"'


def parse_duration_s(given: object) -> float:
    """Seconds. Raises ValueError that says what is expected, for anything but "<number><unit>"."""
    return _scaled(given, SECONDS_PER_UNIT, DURATION_HELP)


def parse_size_bytes(given: object) -> int:
    """Bytes, rounded down. Raises ValueError that says what is expected."""
    return int(_scaled(given, BYTES_PER_UNIT, SIZE_HELP))


def format_duration(seconds: float) -> str:
    """The shortest spelling that reads back as the same duration."""
    for unit in ("h", "m", "s"):
        if seconds and seconds % SECONDS_PER_UNIT[unit] == 0:
            return f"{seconds / SECONDS_PER_UNIT[unit]:.0f}{unit}"
    return f"{seconds * 1000:g}ms"


def format_size(size_bytes: int) -> str:
    """The shortest spelling that reads back as the same size."""
    whole = [(unit, n) for unit, n in BYTES_PER_UNIT.items() if size_bytes % n == 0]
    return min((f"{size_bytes // n}{unit}" for unit, n in whole), key=len)


def _scaled(given: object, units: dict[str, float] | dict[str, int], expected: str) -> float:
    text = given if isinstance(given, str) else ""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]+)", text)
    if match is None or match[2] not in units or float(match[1]) == 0:
        raise ValueError(expected)
    return float(match[1]) * units[match[2]]


def _text_schema(units: dict[str, float] | dict[str, int], example: str) -> WithJsonSchema:
    pattern = rf"^\d+(\.\d+)?\s*({'|'.join(units)})$"
    return WithJsonSchema({"type": "string", "pattern": pattern, "examples": [example]})


Seconds = Annotated[
    float,
    BeforeValidator(parse_duration_s),
    PlainSerializer(format_duration),
    _text_schema(SECONDS_PER_UNIT, "30s"),
]
Bytes = Annotated[
    int,
    BeforeValidator(parse_size_bytes),
    PlainSerializer(format_size),
    _text_schema(BYTES_PER_UNIT, "2GiB"),
]


_Json = dict[str, Any]


def _none_if_auto(given: object) -> object:
    return None if given == "auto" else given


def _on_or_off(given: object) -> object:
    """YAML reads `on` as true."""
    if isinstance(given, bool):
        return "on" if given else "off"
    return given


def _off_if_false(given: object) -> object:
    return "off" if given is False else given


def _as_tuple(given: object) -> object:
    """After a validator that ran first, pydantic no longer takes a list for a tuple, as in JSON."""
    return tuple(given) if isinstance(given, list) else given


def _auto_if_none(value: object, inner: SerializerFunctionWrapHandler) -> object:
    return "auto" if value is None else inner(value)


def _spelled(pattern: str, expected: str) -> tuple[AfterValidator, WithJsonSchema]:
    """Text that matches the whole of `pattern`; `expected` describes it in words."""

    def check(given: str) -> str:
        if not re.fullmatch(pattern, given):
            raise ValueError(expected)
        return given

    return AfterValidator(check), WithJsonSchema({"type": "string", "pattern": f"^({pattern})$"})


class _AutoInSchema:
    """The JSON schema allows "auto" beside the type's own values."""

    @staticmethod
    def __get_pydantic_json_schema__(core: CoreSchema, handler: GetJsonSchemaHandler) -> _Json:
        return {"anyOf": [*handler(core)["anyOf"], {"const": "auto"}]}


_AUTO = (BeforeValidator(_none_if_auto), WrapSerializer(_auto_if_none), _AutoInSchema)

Count = Annotated[int, Field(ge=1)]
Port = Annotated[int, Field(ge=0, le=65535)]
AutoBool = Annotated[bool | None, *_AUTO]
AutoCount = Annotated[Count | None, *_AUTO]
AutoBytes = Annotated[Bytes | None, *_AUTO]
AutoPort = Annotated[Port | None, *_AUTO]
AutoText = Annotated[str | None, *_AUTO]
AutoRole = Annotated[Role | None, *_AUTO]
DtypeName = Literal["auto", "float32", "bfloat16", "float16"]
Quantization = Literal["none", "fp8"]
AttentionBackend = Literal["auto", "native", "triton", "flashinfer", "flash", "sdpa"]
Name = Annotated[str, *_spelled(r"[a-z0-9]([a-z0-9-]{0,48}[a-z0-9])?", "a-z, 0-9 and inner dashes")]
Transport = Literal["shm", "nixl", "ucx", "cuda_ipc"]
FarTransport = Literal["nixl", "ucx"]
AutoFarTransports = Annotated[tuple[FarTransport, ...] | None, BeforeValidator(_as_tuple), *_AUTO]
AutoTransports = Annotated[
    Annotated[tuple[Transport, ...], Field(min_length=1)] | None, BeforeValidator(_as_tuple), *_AUTO
]
KeyHash = Annotated[str, *_spelled(r"[0-9a-f]{64}", "a SHA-256 of 64 hex digits")]
Device = Annotated[str, *_spelled(r"auto|cpu|cuda(:\d+)?", "auto, cpu, cuda or cuda:N")]
StepTimesSource = Annotated[
    str, BeforeValidator(_off_if_false), *_spelled(r".+", "auto, off or a file")
]
"""YAML reads `off` as false."""
AutoOrOff = Annotated[Literal["auto", "off"], BeforeValidator(_off_if_false)]
AutoOnOff = Annotated[Literal["auto", "on", "off"], BeforeValidator(_on_or_off)]
Quantity = Annotated[float, Field(ge=0)]


class Section(BaseModel):
    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True
    )
