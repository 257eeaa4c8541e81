"""POST /v1/messages and /v1/messages/count_tokens"""

from __future__ import annotations

import time
from dataclasses import replace

from starlette.requests import Request
from starlette.responses import Response

from router.chat.asking import chat_request
from router.chat.reader import reader_of
from router.chat.turns import TurnReader
from router.http.api import api_of, json_response, new_id
from router.http.asking import text_request
from router.http.bodies import read_fields, wants_ledger
from router.http.messages.bodies import CountTokensBody, MessagesBody
from router.http.messages.form import check_last, form_of
from router.http.messages.reply import MessagesReply
from router.http.parts.strict import strict
from router.http.reply import GenerationResponse
from router.text.sampling import RequestedSampling


async def create_message(request: Request) -> Response:
    received_s = time.perf_counter()
    api = api_of(request)
    body = strict(await read_fields(request, api.max_body_bytes), MessagesBody)
    check_last(body)
    message_id = new_id("msg", request)
    form = form_of(body)
    asked = text_request(request, body, message_id, sampling=_sampling(body))
    answer = MessagesReply(
        message_id,
        body,
        api.service.model_name,
        TurnReader(reader_of(api.service, form)),
        request_id=request.state.request_id,
        ledger=wants_ledger(request),
    )
    asked = chat_request(api.service, form, replace(asked, received_s=received_s))
    return GenerationResponse(api, [asked], answer)


async def count_tokens(request: Request) -> Response:
    api = api_of(request)
    body = strict(await read_fields(request, api.max_body_bytes), CountTokensBody)
    api.service.check_model(body.model or "")
    asked = text_request(request, body, "", sampling=RequestedSampling())
    ids = await api.service.prompt_ids(chat_request(api.service, form_of(body), asked).prompt)
    answer = json_response({"input_tokens": len(ids)})
    answer.headers["request-id"] = request.state.request_id
    return answer


def _sampling(body: MessagesBody) -> RequestedSampling:
    return RequestedSampling(
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        max_tokens=body.max_tokens,
        cut_to_context=True,
        stop=tuple(body.stop_sequences or ()),
        seed=body.seed,
    )
