"""kvrelay's public client. Nothing here is imported until it is used: workers need only types."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvrelay.aclient import AsyncClient, AsyncStream
    from kvrelay.client import Client, Stream
    from kvrelay.errors import (
        InvalidRequest,
        KvrelayError,
        ModelNotFound,
        Refused,
        RequestFailedError,
    )
    from kvrelay.results import ChatMessage, Choice, Chunk, Generated, ModelInfo, ServerInfo, Slo

__all__ = [
    "AsyncClient",
    "AsyncStream",
    "ChatMessage",
    "Choice",
    "Chunk",
    "Client",
    "Generated",
    "InvalidRequest",
    "KvrelayError",
    "ModelInfo",
    "ModelNotFound",
    "Refused",
    "RequestFailedError",
    "ServerInfo",
    "Slo",
    "Stream",
]

_HOMES = {
    "AsyncClient": "kvrelay.aclient",
    "AsyncStream": "kvrelay.aclient",
    "Client": "kvrelay.client",
    "Stream": "kvrelay.client",
    "InvalidRequest": "kvrelay.errors",
    "KvrelayError": "kvrelay.errors",
    "ModelNotFound": "kvrelay.errors",
    "Refused": "kvrelay.errors",
    "RequestFailedError": "kvrelay.errors",
}


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'kvrelay' has no attribute {name!r}")
    return getattr(import_module(_HOMES.get(name, "kvrelay.results")), name)
