"""Who asks, and with what rights: what every endpoint that generates takes from a call besides its
prompt."""

from __future__ import annotations

from starlette.requests import Request

from router.http.api import api_of
from router.http.bodies import AskingBody, GenerationBody, continuation_of, objectives_in
from router.http.errors import promise_in
from router.text.sampling import RequestedSampling
from router.text.service import TextRequest


def text_request(
    request: Request, body: AskingBody, request_id: str, *, sampling: RequestedSampling
) -> TextRequest:
    """Its prompt is still to be set. Raises InvalidRequest."""
    return TextRequest(
        request_id=request_id,
        prompt="",
        sampling=sampling,
        model=body.model or "",
        tenant=body.cache_salt or "",
        tier=api_of(request).service.tiers.tier_of(body.tier or "", request.headers),
        objectives=objectives_in(request),
        continuation=continuation_of(body) if isinstance(body, GenerationBody) else None,
        promise=promise_in(request),
    )
