"""POST /v1/chat/completions"""

from __future__ import annotations

import time
from dataclasses import replace

from starlette.requests import Request
from starlette.responses import Response

from kvrelay.errors import InvalidRequest
from router.chat.asking import chat_request
from router.http.api import api_of, new_id
from router.http.asking import text_request
from router.http.bodies import ChatBody, read_body, sampling_of, wants_ledger
from router.http.chat.form import form_of
from router.http.chat.reply import ChatReply
from router.http.neutral_fields import CHAT_NEUTRAL
from router.http.reply import GenerationResponse


async def chat_completions(request: Request) -> Response:
    received_s = time.perf_counter()
    api = api_of(request)
    body = await read_body(request, ChatBody, CHAT_NEUTRAL, api.max_body_bytes)
    form = form_of(body)
    request_id = new_id("chatcmpl", request)
    reply = ChatReply(api, body, form, request_id, ledger=wants_ledger(request))
    sampling = sampling_of(body, logprobs=_logprobs(body), prompt_logprobs=body.prompt_logprobs)
    asked = text_request(request, body, reply.id, sampling=sampling)
    asked = chat_request(api.service, form, replace(asked, received_s=received_s))
    return GenerationResponse(api, [asked], reply)


def _logprobs(body: ChatBody) -> int | None:
    if body.logprobs:
        return body.top_logprobs or 0
    if body.top_logprobs:
        raise InvalidRequest("top_logprobs needs logprobs: true", param="top_logprobs")
    return None
