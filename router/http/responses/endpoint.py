"""POST /v1/responses, /v1/responses/input_tokens; GET and DELETE /v1/responses/{id}."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from pydantic import TypeAdapter
from starlette.requests import Request
from starlette.responses import Response

from kvrelay.errors import InvalidRequest
from router.chat.asking import chat_request
from router.chat.conversations import KeptConversations, Turn
from router.chat.reader import reader_of
from router.chat.turns import TurnReader
from router.http.api import api_of, json_bytes, json_response, new_id
from router.http.asking import text_request
from router.http.bodies import logit_bias_of, read_fields, stop_strings, wants_ledger
from router.http.errors import NotKept
from router.http.parts.strict import strict
from router.http.reply import GenerationResponse
from router.http.responses import reply as replies
from router.http.responses.bodies import InputTokensBody, Item, PromptFields, ResponsesBody
from router.http.responses.form import form_of, items_of
from router.text.sampling import RequestedSampling

ITEMS: TypeAdapter[list[Item]] = TypeAdapter(list[Item])


async def create_response(request: Request) -> Response:
    received_s = time.perf_counter()
    api = api_of(request)
    body = strict(await read_fields(request, api.max_body_bytes), ResponsesBody)
    _check(body)
    response_id = new_id("resp", request)
    asked = text_request(request, body, response_id, sampling=_sampling(body))
    before = _turn_before(api.conversations, body, asked.tenant)
    new_items = items_of(body.input)
    form = form_of(body, [*_conversation(before), *new_items])

    def keep(response: replies.Response) -> None:
        if body.store is not False:
            api.conversations.keep(
                asked.tenant,
                response_id,
                before=before,
                items=_items_bytes(new_items, response["output"]),
                answer=json_bytes(response),
                now_s=time.monotonic(),
            )

    answer = replies.ResponsesReply(
        response_id,
        body,
        api.service.model_name,
        TurnReader(reader_of(api.service, form)),
        keep=keep,
        ledger=wants_ledger(request),
    )
    asked = chat_request(api.service, form, replace(asked, received_s=received_s))
    return GenerationResponse(api, [asked], answer)


async def count_input_tokens(request: Request) -> Response:
    api = api_of(request)
    body = strict(await read_fields(request, api.max_body_bytes), InputTokensBody)
    api.service.check_model(body.model or "")
    asked = text_request(request, body, "", sampling=RequestedSampling())
    before = _turn_before(api.conversations, body, asked.tenant)
    form = form_of(body, [*_conversation(before), *items_of(body.input)])
    ids = await api.service.prompt_ids(chat_request(api.service, form, asked).prompt)
    return json_response({"object": "response.input_tokens", "input_tokens": len(ids)})


async def get_response(request: Request) -> Response:
    if request.query_params.get("stream", "false") == "true":
        raise InvalidRequest("a kept response can't be streamed: leave stream out", param="stream")
    found = _find(api_of(request).conversations, request.path_params["id"], _owner(request), "id")
    return Response(found.answer, media_type="application/json")


async def delete_response(request: Request) -> Response:
    response_id = request.path_params["id"]
    if not api_of(request).conversations.forget(_owner(request), response_id):
        raise _not_kept(response_id, "id")
    return json_response({"id": response_id, "object": "response", "deleted": True})


def _owner(request: Request) -> str:
    """Whose response a call without a body asks for."""
    body = ResponsesBody.model_construct(cache_salt=request.query_params.get("cache_salt"))
    return text_request(request, body, "", sampling=RequestedSampling()).tenant


def _check(body: ResponsesBody) -> None:
    if "message.output_text.logprobs" in (body.include or ()):
        raise InvalidRequest(
            "include: message.output_text.logprobs is not supported: "
            "/v1/chat/completions has log probabilities",
            code="unsupported_parameter",
            param="include",
        )


def _sampling(body: ResponsesBody) -> RequestedSampling:
    return RequestedSampling(
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        min_p=body.min_p,
        frequency_penalty=body.frequency_penalty,
        presence_penalty=body.presence_penalty,
        repetition_penalty=body.repetition_penalty,
        logit_bias=logit_bias_of(body.logit_bias),
        stop=stop_strings(body.stop),
        stop_token_ids=tuple(body.stop_token_ids or ()),
        ignore_eos=bool(body.ignore_eos),
        max_tokens=body.max_output_tokens,
        cut_to_context=True,
        seed=body.seed,
    )


def _turn_before(kept: KeptConversations, body: PromptFields, owner: str) -> Turn | None:
    if body.previous_response_id is None:
        return None
    return _find(kept, body.previous_response_id, owner, "previous_response_id")


def _find(kept: KeptConversations, response_id: str, owner: str, param: str) -> Turn:
    found = kept.find(owner, response_id, time.monotonic())
    if found is None:
        raise _not_kept(response_id, param)
    return found


def _not_kept(response_id: str, param: str) -> NotKept:
    if param == "id":
        return NotKept(
            f"Response with id '{response_id}' not found.", code="not_found", param=param
        )
    return NotKept(
        f"Previous response with id '{response_id}' not found. It is kept for a bounded time, by "
        "the router that answered: send the whole conversation as input instead",
        code="previous_response_not_found",
        param=param,
    )


def _conversation(turn: Turn | None) -> list[Item]:
    turns = turn.conversation() if turn is not None else []
    return [item for items in turns for item in ITEMS.validate_json(items)]


def _items_bytes(asked: Sequence[Item], output: object) -> bytes:
    """What the turn added, as a client would send it."""
    given = ITEMS.dump_python(list(asked), mode="json", exclude_none=True)
    return json_bytes([*given, *(output if isinstance(output, list) else ())])
