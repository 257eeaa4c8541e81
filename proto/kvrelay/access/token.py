"""Servers ask callers for the cluster's token: once for each call, however long its stream lives.

Clients give it as metadata of the call, not by an interceptor: gRPC's own would wrap every message
of a stream.
"""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable, Collection

import grpc

from kvrelay.access.values import AUTHORIZATION, bearer

HEALTH = "grpc.health.v1.Health"
WHERE = (
    "the token of the process that was called: --token-file, network.token_file, or by default "
    "~/.config/kvrelay/NAME.token of the user who started the cluster NAME"
)
MISSING = f"this call needs the cluster's token: give {WHERE}"
WRONG = f"the token is of another cluster, or out of date: copy {WHERE}"


def refusal(header: str, token: bytes) -> str | None:
    """Why a call with this `authorization` is refused; None: it may go on."""
    if not header:
        return MISSING
    scheme, _, given = header.partition(" ")
    shown = f"{scheme.capitalize()} {given.strip().lower()}".encode("utf-8", "replace")
    is_right = hmac.compare_digest(shown, bearer(token).encode())
    return None if token and is_right else WRONG


Continuation = Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]]


class TokenCheck(grpc.aio.ServerInterceptor):
    """`open_services` answer everybody."""

    def __init__(self, token: bytes, *, open_services: Collection[str] = (HEALTH,)) -> None:
        self._token = token
        self._open = tuple(f"/{name}/" for name in open_services)

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler:
        if handler_call_details.method.startswith(self._open):
            return await continuation(handler_call_details)
        told = dict(handler_call_details.invocation_metadata or ())
        reason = refusal(_text(told.get(AUTHORIZATION, "")), self._token)
        if reason is None:
            return await continuation(handler_call_details)
        return _refuse(reason)


def _text(value: str | bytes) -> str:
    return value if isinstance(value, str) else value.decode("utf-8", "replace")


def _refuse(reason: str) -> grpc.RpcMethodHandler:
    """Before a message is read: one may never come."""

    async def abort(requests: object, context: grpc.aio.ServicerContext) -> None:
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, reason)

    return grpc.stream_stream_rpc_method_handler(abort)
