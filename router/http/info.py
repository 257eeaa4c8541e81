"""The endpoints that generate nothing: models, tokens, health, metrics."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from google.protobuf.json_format import MessageToDict
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response

from kvrelay.errors import InvalidRequest
from router.http.api import HttpApi, api_of, json_response
from router.http.bodies import DetokenizeBody, TokenizeBody, read_body
from router.http.chat import chat_prompt
from router.http.neutral_fields import TEMPLATE_NEUTRAL
from router.text.bounds import check_tokens
from router.text.service import PromptInput
from router.text.tokenizer import TextTokenizer


async def models(request: Request) -> Response:
    return json_response({"object": "list", "data": [_model_card(api_of(request))]})


async def model(request: Request) -> Response:
    api = api_of(request)
    api.service.check_model(request.path_params["model"])
    return json_response(_model_card(api))


def _model_card(api: HttpApi) -> dict[str, object]:
    facts = api.service.dispatcher.model()
    return {
        "id": api.service.model_name,
        "object": "model",
        "created": int(api.started_s),
        "owned_by": "kvrelay",
        "root": api.service.model_name,
        "max_model_len": facts.max_model_len if facts is not None else None,
    }


async def tokenize(request: Request) -> Response:
    api = api_of(request)
    body = await read_body(request, TokenizeBody, TEMPLATE_NEUTRAL, api.max_body_bytes)
    api.service.check_model(body.model or "")
    ids = await api.service.prompt_ids(
        _prompt_of(body), add_special_tokens=body.add_special_tokens is not False
    )
    texts = None
    if body.return_token_strs:
        texts = await asyncio.to_thread(_token_texts, api.service.tokenizer, ids)
    return json_response(
        {
            "count": len(ids),
            "max_model_len": api.service.facts().max_model_len,
            "tokens": ids,
            "token_strs": texts,
        }
    )


def _token_texts(tokenizer: TextTokenizer, ids: Sequence[int]) -> list[str | None]:
    return [tokenizer.backend.id_to_token(token_id) for token_id in ids]


def _prompt_of(body: TokenizeBody) -> PromptInput:
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("send either prompt or messages", param="prompt")
    if body.messages is not None:
        return chat_prompt(body.messages, body)
    return body.prompt or ""


async def detokenize(request: Request) -> Response:
    api = api_of(request)
    body = await read_body(request, DetokenizeBody, {}, api.max_body_bytes)
    api.service.check_model(body.model or "")
    check_tokens(len(body.tokens), api.service.facts().max_model_len, "tokens")
    text = await asyncio.to_thread(
        api.service.tokenizer.decode, body.tokens, skip_special_tokens=False
    )
    return json_response({"prompt": text})


async def health(request: Request) -> Response:
    return json_response({"status": "ok"})


async def ping(request: Request) -> Response:
    """As in vLLM and SageMaker: `health` without a body."""
    return Response()


async def load(request: Request) -> Response:
    """As in vLLM: the number of requests that this router is serving."""
    running = api_of(request).service.dispatcher.running_requests()
    return json_response({"server_load": running})


async def ready(request: Request) -> Response:
    service = api_of(request).service
    if service.draining:
        return json_response({"ready": False, "reason": "this router is draining"}, status=503)
    reason = service.dispatcher.not_ready()
    if reason is None:
        return json_response({"ready": True})
    return json_response({"ready": False, "reason": reason}, status=503)


async def metrics(request: Request) -> Response:
    service = api_of(request).service
    snapshot = service.dispatcher.snapshot()
    content = await asyncio.to_thread(service.metrics.exposition, snapshot)
    return Response(content, media_type=CONTENT_TYPE_LATEST)


async def debug_kv(request: Request) -> Response:
    found = await api_of(request).service.dispatcher.debug_kv()
    return json_response(
        MessageToDict(
            found, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
        )
    )


async def version(request: Request) -> Response:
    return json_response({"version": api_of(request).version})
