"""Every error has OpenAI's shape, {"error": {message, type, code, param}}, unless its path belongs
to an API with a shape of its own."""

from __future__ import annotations

import json
import logging
import math
from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from kvrelay.errors import (
    FailureReason,
    InvalidRequest,
    KvrelayError,
    ModelNotFound,
    NotAllowed,
    NotAuthenticated,
    RefusalReason,
    Refused,
    RequestFailedError,
)

log = logging.getLogger(__name__)

PROMISE_HEADER = "x-kvrelay-promise"
"""In refusals, and in requests that come back: the promise of the retry time, in Base64."""
TIER_HEADER = "x-kvrelay-tier"
"""In answers and refusals: the QoS tier that was applied."""


class BodyTooLarge(InvalidRequest):
    """HTTP 413."""


class BodyTimeout(InvalidRequest):
    """HTTP 408."""


class UnsupportedMediaType(InvalidRequest):
    """HTTP 415."""


class NotKept(InvalidRequest):
    """What the request names is not kept here: HTTP 404."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorReply:
    status: int
    message: str
    type: str
    code: str | None = None
    param: str | None = None
    promise: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)

    def body(self) -> dict[str, object]:
        fields = {
            "message": self.message,
            "type": self.type,
            "code": self.code,
            "param": self.param,
        }
        return {"error": fields | {"promise": self.promise} if self.promise else fields}

    def response(self) -> Response:
        # ASCII escapes: the message may quote a client's lone surrogate.
        content = json.dumps(self.body())
        return Response(content, self.status, self.headers, media_type="application/json")


Shape = Callable[[Request, ErrorReply], Response]


def error_response(request: Request, error: ErrorReply) -> Response:
    """In the shape of the API that was called: `app.state.error_shapes` has those of paths."""
    shapes: Mapping[str, Shape] = getattr(request.app.state, "error_shapes", {})
    for prefix, shape in shapes.items():
        if request.url.path.startswith(prefix):
            return shape(request, error)
    return error.response()


INTERNAL = ErrorReply(
    status=500,
    message="internal error: the router's log has the details",
    type="server_error",
    code=FailureReason.INTERNAL,
)


FAILURES: Mapping[str, int] = {
    FailureReason.INTERNAL: 500,
    FailureReason.DEADLINE_EXCEEDED: 504,
    FailureReason.POISON: 422,
    FailureReason.GRAMMAR: 422,
}
"""# reason of a RequestFailedError |-> its status, where it isn't 503"""


REASONS: Mapping[int, str] = {
    400: "The request can never be served as it is.",
    401: "The call brings no valid API key.",
    403: "The API key does not allow this.",
    404: "The model, or what the request names, does not exist.",
    408: "The body has not come in time.",
    413: "The body is too large.",
    415: "The body is not JSON.",
    422: "The request has failed on several workers, and is not tried again.",
    429: "The request can't be served now; `retry-after` says when it can.",
    431: "The header block is too large.",
    500: "The router or a worker has a fault.",
    503: "There is no worker that could serve the request.",
    504: "The request's deadline has passed.",
    529: "The cluster can't serve the request now; `retry-after` says when it can.",
}
"""# status |-> what it means, in words"""

INVALID: Mapping[type[InvalidRequest], int] = {
    NotAuthenticated: 401,
    NotAllowed: 403,
    ModelNotFound: 404,
    NotKept: 404,
    BodyTimeout: 408,
    BodyTooLarge: 413,
    UnsupportedMediaType: 415,
}
"""# kind of an InvalidRequest |-> its status, where it isn't 400"""


def reply_of(error: Exception) -> ErrorReply:
    match error:
        case InvalidRequest():
            return _invalid(error)
        case Refused():
            return _refused(error)
        case RequestFailedError():
            status = FAILURES.get(error.reason, 503)
            kind = "invalid_request_error" if status == 422 else "server_error"
            return ErrorReply(status=status, message=error.message, type=kind, code=error.reason)
        case KvrelayError():
            return ErrorReply(status=500, message=str(error), type="server_error")
        case _:
            return INTERNAL


def _invalid(error: InvalidRequest) -> ErrorReply:
    return ErrorReply(
        status=INVALID.get(type(error), 400),
        message=error.message,
        type="invalid_request_error",
        code=error.code,
        param=error.param,
        headers={"www-authenticate": "Bearer"} if isinstance(error, NotAuthenticated) else {},
    )


def _refused(error: Refused) -> ErrorReply:
    contended = error.reason != RefusalReason.NO_CAPACITY
    return ErrorReply(
        status=429 if contended else 503,
        message=error.message,
        type="rate_limit_error" if contended else "server_error",
        code=error.reason,
        promise=b64encode(error.promise).decode(),
        headers=_refusal_headers(error),
    )


def _refusal_headers(error: Refused) -> dict[str, str]:
    """OpenAI's clients try again by themselves unless a header forbids it."""
    tier = {TIER_HEADER: error.tier} if error.tier else {}
    if error.retry_after_s is None:
        return {**tier, "x-should-retry": "false"}
    promise = {PROMISE_HEADER: b64encode(error.promise).decode()} if error.promise else {}
    return {**tier, **promise, **_retry_headers(error.retry_after_s)}


def promise_in(request: Request) -> bytes:
    """What is not Base64 was promised by no router."""
    try:
        return b64decode(request.headers.get(PROMISE_HEADER, ""), validate=True)
    except ValueError:
        return b""


def _retry_headers(retry_after_s: float) -> dict[str, str]:
    return {
        "retry-after": str(max(math.ceil(retry_after_s), 1)),
        "retry-after-ms": str(max(math.ceil(1000 * retry_after_s), 1)),
    }


async def on_kvrelay_error(request: Request, error: Exception) -> Response:
    return error_response(request, reply_of(error))


async def on_http_exception(request: Request, error: Exception) -> Response:
    """Starlette's own 404 and 405."""
    assert isinstance(error, HTTPException)
    reply = ErrorReply(
        status=error.status_code,
        message=f"{request.method} {request.url.path}: {error.detail}",
        type="invalid_request_error",
        code="not_found" if error.status_code == 404 else "method_not_allowed",
        headers=error.headers or {},
    )
    return error_response(request, reply)


async def on_disconnect(request: Request, error: Exception) -> Response:
    """The client left while its body was read; nobody reads this answer."""
    return Response(status_code=499)


async def on_bug(request: Request, error: Exception) -> Response:
    """After this the server logs the traceback."""
    request_id = {"request_id": request.state.request_id}
    log.error("internal error in %s %s", request.method, request.url.path, extra=request_id)
    return error_response(request, INTERNAL)
