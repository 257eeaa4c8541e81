"""Who asks, and with what rights: the caller of every call, and what every endpoint that generates
takes from a call besides its prompt."""

from __future__ import annotations

from collections.abc import Collection

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from kvrelay.errors import NotAuthenticated
from router.access.caller import Caller
from router.http.api import HttpApi, api_of
from router.http.bodies import AskingBody, GenerationBody, continuation_of, objectives_in
from router.http.errors import error_response, promise_in, reply_of
from router.text.request import TextRequest
from router.text.sampling import RequestedSampling


class Authentication:
    """Finds the caller of every call but those of the `open_paths`. A stranger gets 401, whatever
    the path, and nothing of the body is read."""

    def __init__(self, app: ASGIApp, api: HttpApi, open_paths: Collection[str]) -> None:
        self._app = app
        self._api = api
        self._open = frozenset(open_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in self._open:
            state = scope.setdefault("state", {})
            try:
                state["caller"] = self._api.service.caller_of(
                    Headers(scope=scope), state.get("request_id", "")
                )
            except NotAuthenticated as stranger:
                answer = error_response(Request(scope), reply_of(stranger))
                await answer(scope, receive, send)
                return
        await self._app(scope, receive, send)


def caller_of(request: Request) -> Caller:
    """Of a call that was authenticated."""
    caller = request.state.caller
    assert isinstance(caller, Caller)
    return caller


def text_request(
    request: Request, body: AskingBody, request_id: str, *, sampling: RequestedSampling
) -> TextRequest:
    """Its prompt is still to be set. Raises InvalidRequest."""
    caller = caller_of(request)
    return TextRequest(
        request_id=request_id,
        prompt="",
        sampling=sampling,
        model=body.model or "",
        caller=caller,
        tenant=caller.space(body.cache_salt or ""),
        tier=api_of(request).service.tier_of(body.tier or "", request.headers, caller),
        objectives=objectives_in(request),
        continuation=continuation_of(body) if isinstance(body, GenerationBody) else None,
        promise=promise_in(request),
    )
