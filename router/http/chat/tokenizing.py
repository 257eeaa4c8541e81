"""POST /tokenize and /detokenize: the tokens of a text or a chat, and the text of tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import Response

from kvrelay.errors import InvalidRequest
from router.chat.asking import chat_prompt
from router.http.api import api_of, json_response
from router.http.bodies import DetokenizeBody, TokenizeBody, read_body
from router.http.chat.form import form_to_tokenize
from router.http.neutral_fields import TEMPLATE_NEUTRAL
from router.text.bounds import check_tokens
from router.text.request import PromptInput
from router.text.service import TextService
from router.text.tokenizer import TextTokenizer


async def tokenize(request: Request) -> Response:
    api = api_of(request)
    body = await read_body(request, TokenizeBody, TEMPLATE_NEUTRAL, api.max_body_bytes)
    api.service.check_model(body.model or "")
    ids = await api.service.prompt_ids(
        _prompt_of(api.service, body), add_special_tokens=body.add_special_tokens is not False
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


def _prompt_of(service: TextService, body: TokenizeBody) -> PromptInput:
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("send either prompt or messages", param="prompt")
    if body.messages is not None:
        return chat_prompt(service, form_to_tokenize(body))
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
