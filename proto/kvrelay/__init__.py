"""kvrelay's public client. Nothing here is imported until it is used: workers need only types."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvrelay.access.values import Tls
    from kvrelay.client.aio import AsyncClient, AsyncStream
    from kvrelay.client.blocking import Client, Stream
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
    "Tls",
]

_HOMES = {
    "AsyncClient": "kvrelay.client.aio",
    "AsyncStream": "kvrelay.client.aio",
    "Client": "kvrelay.client.blocking",
    "Stream": "kvrelay.client.blocking",
    "Tls": "kvrelay.access.values",
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
