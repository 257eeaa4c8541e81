"""Errors in Anthropic's shape: {"type": "error", "error": {type, message}, "request_id"}.

A refusal of the cluster is 529 `overloaded_error`, for it is no fault of the client. 429
`rate_limit_error` is left to the limits of a key.
"""

from __future__ import annotations

from collections.abc import Mapping

from starlette.requests import Request
from starlette.responses import Response

from kvrelay.errors import RefusalReason
from router.http.api import json_response
from router.http.errors import ErrorReply

OVERLOADED = 529
OF_KEY = frozenset(
    {
        RefusalReason.KEY_REQUESTS,
        RefusalReason.KEY_TOKENS,
        RefusalReason.KEY_CONCURRENCY,
    }
)
"""Refusals for the limits of a key. All others with status 429 are for want of room."""

TYPES: Mapping[int, str] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "api_error",
    504: "timeout_error",
    OVERLOADED: "overloaded_error",
}
"""# status |-> its type, where it isn't invalid_request_error"""


def respond(request: Request, error: ErrorReply) -> Response:
    status = _status(error)
    request_id = request.state.request_id
    headers = {**error.headers, "request-id": request_id}
    return json_response(error_body(error, request_id), status, headers)


def error_body(error: ErrorReply, request_id: str) -> dict[str, object]:
    """`code`, `param` and `promise` are kvrelay's own."""
    own = {"code": error.code, "param": error.param, "promise": error.promise or None}
    told = {"type": _type(error), "message": error.message}
    named = told | {name: value for name, value in own.items() if value is not None}
    return {"type": "error", "error": named, "request_id": request_id}


def _type(error: ErrorReply) -> str:
    if error.code == RefusalReason.NO_CAPACITY:
        return TYPES[OVERLOADED]
    return TYPES.get(_status(error), "invalid_request_error")


def _status(error: ErrorReply) -> int:
    return OVERLOADED if error.status == 429 and error.code not in OF_KEY else error.status
