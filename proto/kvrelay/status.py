"""kvrelay's errors as gRPC statuses, and back in the client."""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Sequence
from typing import NoReturn

import grpc
from google.rpc import error_details_pb2, status_pb2

from kvrelay.errors import (
    InvalidRequest,
    KvrelayError,
    ModelNotFound,
    NotAllowed,
    NotAuthenticated,
    Refused,
    RequestFailedError,
)

ERROR_DOMAIN = "kvrelay"
STATUS_DETAILS_KEY = "grpc-status-details-bin"
LEDGER_KEY = "kvrelay-ledger"

Metadata = Sequence[tuple[str, str | bytes]]

LOST_CONNECTION = "Stream removed"
"""gRPC says UNKNOWN with this text when a ping of its connection has timed out, UNAVAILABLE for all
other lost connections (github.com/grpc/grpc/issues/34076)."""


def error_of(code: grpc.StatusCode, message: str, trailing: Metadata) -> KvrelayError:
    """The error that the server meant; RequestFailedError for an error of gRPC itself."""
    info = error_details_pb2.ErrorInfo()
    retry = error_details_pb2.RetryInfo()
    for detail in _status(trailing).details:
        _ = detail.Unpack(info) or detail.Unpack(retry)
    if info.domain != ERROR_DOMAIN:
        lost = code is grpc.StatusCode.UNKNOWN and message.startswith(LOST_CONNECTION)
        return RequestFailedError("unavailable" if lost else code.name.lower(), message)
    param = info.metadata.get("param")
    match code:
        case grpc.StatusCode.NOT_FOUND:
            return ModelNotFound(message, code=info.reason, param=param)
        case grpc.StatusCode.INVALID_ARGUMENT:
            return InvalidRequest(message, code=info.reason, param=param)
        case grpc.StatusCode.UNAUTHENTICATED:
            return NotAuthenticated(message, code=info.reason, param=param)
        case grpc.StatusCode.PERMISSION_DENIED:
            return NotAllowed(message, code=info.reason, param=param)
    has_delay = retry.HasField("retry_delay")
    if not has_delay and code is not grpc.StatusCode.RESOURCE_EXHAUSTED:
        return RequestFailedError(info.reason, message)
    return Refused(
        info.reason,
        message,
        retry_after_s=retry.retry_delay.ToNanoseconds() / 1e9 if has_delay else None,
        tier=info.metadata.get("tier", ""),
        promise=b64decode(info.metadata.get("promise", "")),
    )


def _status(trailing: Metadata) -> status_pb2.Status:
    for key, value in trailing:
        if key == STATUS_DETAILS_KEY and isinstance(value, bytes):
            return status_pb2.Status.FromString(value)
    return status_pb2.Status()


def meant_by(error: grpc.RpcError) -> KvrelayError:
    """The meaning of a failed call."""
    trailing = tuple(error.trailing_metadata() or ())
    return error_of(error.code(), error.details() or "", trailing)


def raise_for(error: grpc.RpcError) -> NoReturn:
    """Raises the kvrelay error of a failed call."""
    raise meant_by(error) from error
