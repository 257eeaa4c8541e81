"""kvrelay's errors as gRPC statuses with google.rpc details."""

from __future__ import annotations

import logging
from base64 import b64encode
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import grpc
from google.protobuf import any_pb2
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

from kvrelay.errors import (
    FailureReason,
    InvalidRequest,
    ModelNotFound,
    NotAllowed,
    NotAuthenticated,
    RefusalReason,
    Refused,
    RequestFailedError,
)
from kvrelay.status import ERROR_DOMAIN, STATUS_DETAILS_KEY

log = logging.getLogger(__name__)

FAILURES: Mapping[str, Any] = {
    FailureReason.ABORTED: grpc.StatusCode.ABORTED,
    FailureReason.SLOW_READER: grpc.StatusCode.ABORTED,
    FailureReason.DEADLINE_EXCEEDED: grpc.StatusCode.DEADLINE_EXCEEDED,
    FailureReason.POISON: grpc.StatusCode.INVALID_ARGUMENT,
    FailureReason.GRAMMAR: grpc.StatusCode.INVALID_ARGUMENT,
}
"""# reason of a RequestFailedError |-> its status, if not UNAVAILABLE"""


@dataclass(frozen=True, slots=True)
class GrpcError:
    code: grpc.StatusCode
    message: str
    details: tuple[Message, ...] = ()

    def status_details(self) -> bytes:
        status = status_pb2.Status(code=self.code.value[0], message=self.message)
        for detail in self.details:
            packed = any_pb2.Any()
            packed.Pack(detail)
            status.details.append(packed)
        return status.SerializeToString()


def grpc_error_of(error: Exception, request_id: str | None = None) -> GrpcError:
    match error:
        case ModelNotFound():
            return _invalid(grpc.StatusCode.NOT_FOUND, error)
        case NotAuthenticated():
            return _invalid(grpc.StatusCode.UNAUTHENTICATED, error)
        case NotAllowed():
            return _invalid(grpc.StatusCode.PERMISSION_DENIED, error)
        case InvalidRequest():
            return _invalid(grpc.StatusCode.INVALID_ARGUMENT, error)
        case Refused():
            return _refused(error)
        case RequestFailedError():
            code = FAILURES.get(error.reason, grpc.StatusCode.UNAVAILABLE)
            return GrpcError(code, error.message, (_info(error.reason),))
        case _:
            log.error("a call failed", exc_info=error, extra={"request_id": request_id})
            message = "internal error: the router's log has the details"
            return GrpcError(grpc.StatusCode.INTERNAL, message, (_info(FailureReason.INTERNAL),))


def _info(reason: str, param: str | None = None) -> error_details_pb2.ErrorInfo:
    metadata = {"param": param} if param is not None else {}
    return error_details_pb2.ErrorInfo(reason=reason, domain=ERROR_DOMAIN, metadata=metadata)


def _invalid(code: grpc.StatusCode, error: InvalidRequest) -> GrpcError:
    return GrpcError(code, error.message, (_info(error.code, error.param),))


def _refused(error: Refused) -> GrpcError:
    no_capacity = error.reason == RefusalReason.NO_CAPACITY
    code = grpc.StatusCode.UNAVAILABLE if no_capacity else grpc.StatusCode.RESOURCE_EXHAUSTED
    metadata = {"tier": error.tier} if error.tier else {}
    if error.promise:
        metadata["promise"] = b64encode(error.promise).decode()
    info = error_details_pb2.ErrorInfo(reason=error.reason, domain=ERROR_DOMAIN, metadata=metadata)
    details = (info,) if error.retry_after_s is None else (info, _retry(error.retry_after_s))
    return GrpcError(code, error.message, details)


def _retry(retry_after_s: float) -> error_details_pb2.RetryInfo:
    retry = error_details_pb2.RetryInfo()
    retry.retry_delay.FromNanoseconds(int(retry_after_s * 1e9))
    return retry


async def abort_with(
    context: grpc.aio.ServicerContext, error: Exception, request_id: str | None = None
) -> NoReturn:
    reply = grpc_error_of(error, request_id)
    trailing = ((STATUS_DETAILS_KEY, reply.status_details()),)
    await context.abort(reply.code, reply.message, trailing_metadata=trailing)
    raise AssertionError("abort raises")
