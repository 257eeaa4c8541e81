"""Calls of a router's internal gRPC API, kvrelay.v1.Admin, for commands."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import grpc

from kvrelay.access.tls import blocking_channel
from kvrelay.access.values import Access
from kvrelay.errors import ConfigError, KvrelayError
from kvrelay.v1.admin_pb2_grpc import AdminStub

NOT_INTERNAL = "not the internal gRPC address of a router, which kvrelay router prints"
IMPOSSIBLE = (grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.INVALID_ARGUMENT)
MESSAGE_BYTES = 64 * 1024 * 1024
Answer = TypeVar("Answer")


class NotKnown(KvrelayError):
    """The router answers, and does not know what it was asked about."""


class NotPossible(KvrelayError):
    """The router answers why it can't be."""


def ask(
    address: str,
    method: Callable[[AdminStub], Callable[..., Answer]],
    request: object,
    access: Access,
    *,
    timeout_s: float,
) -> Answer:
    """Raises ConfigError when no router answers at HOST:PORT, or not to us, and NotKnown."""
    options = [("grpc.max_receive_message_length", MESSAGE_BYTES)]
    with blocking_channel(address, access.dials, options) as channel:
        try:
            stub = AdminStub(channel)
            return method(stub)(request, timeout=timeout_s, metadata=access.metadata)
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.NOT_FOUND:
                raise NotKnown(error.details()) from None
            if error.code() in IMPOSSIBLE:
                raise NotPossible(error.details()) from None
            raise ConfigError(f"{address}: {_reason(error)}") from None


def _reason(error: grpc.RpcError) -> str:
    if error.code() is grpc.StatusCode.UNIMPLEMENTED:
        return NOT_INTERNAL
    if error.code() is grpc.StatusCode.UNAUTHENTICATED:
        return str(error.details())
    return f"no router answers: {error.details()}"
