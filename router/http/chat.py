"""POST /v1/chat/completions"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from kvrelay.errors import InvalidRequest
from router.http.api import HttpApi, api_of, new_id
from router.http.asking import text_request
from router.http.bodies import (
    ChatBody,
    MessageBody,
    TokenizeBody,
    read_body,
    sampling_of,
    stop_reason,
    stream_flags,
    wants_ledger,
)
from router.http.neutral_fields import CHAT_NEUTRAL
from router.http.reply import (
    ChoiceTotals,
    GenerationResponse,
    Reply,
    chat_logprobs,
    prompt_logprobs,
)
from router.text.service import ChatPrompt, TextDelta


async def chat_completions(request: Request) -> Response:
    received_s = time.perf_counter()
    api = api_of(request)
    body = await read_body(request, ChatBody, CHAT_NEUTRAL, api.max_body_bytes)
    request_id = new_id("chatcmpl", request)
    reply = ChatReply(api, body, request_id, ledger=wants_ledger(request))
    sampling = sampling_of(body, logprobs=_logprobs(body), prompt_logprobs=body.prompt_logprobs)
    asked = text_request(request, body, reply.id, sampling=sampling)
    prompt = chat_prompt(body.messages, body)
    asked = replace(asked, prompt=prompt, received_s=received_s)
    return GenerationResponse(api, [asked], reply)


def chat_prompt(messages: Sequence[MessageBody], body: ChatBody | TokenizeBody) -> ChatPrompt:
    """Raises InvalidRequest without messages, or for content that isn't text."""
    if not messages:
        raise InvalidRequest("messages is empty: send at least one", param="messages")
    return ChatPrompt(
        [_plain(message, position) for position, message in enumerate(messages)],
        add_generation_prompt=body.add_generation_prompt is not False,
        template_kwargs=body.chat_template_kwargs or {},
        add_special_tokens=bool(body.add_special_tokens),
    )


def _plain(message: MessageBody, position: int) -> dict[str, Any]:
    plain: dict[str, Any] = {"role": message.role, "content": _content(message, position)}
    if message.name is not None:
        plain["name"] = message.name
    return plain


def _content(message: MessageBody, position: int) -> str:
    """Text parts are joined by newlines."""
    param = f"messages[{position}].content"
    match message.content:
        case None:
            raise InvalidRequest(f"{param} is missing: send text", param=param)
        case str() as text:
            return text
        case parts:
            wrong = [part.type for part in parts if part.type != "text" or part.text is None]
            if wrong:
                raise InvalidRequest(
                    f"{param}: parts of type {wrong[0]!r} are not supported, send text",
                    code="unsupported_parameter",
                    param=param,
                )
            return "\n".join(part.text for part in parts if part.text is not None)


def _logprobs(body: ChatBody) -> int | None:
    if body.logprobs:
        return body.top_logprobs or 0
    if body.top_logprobs:
        raise InvalidRequest("top_logprobs needs logprobs: true", param="top_logprobs")
    return None


class ChatReply(Reply):
    def __init__(self, api: HttpApi, body: ChatBody, request_id: str, *, ledger: bool) -> None:
        super().__init__(stream_flags(body), ledger=ledger, tickets=bool(body.return_token_ids))
        self.id = request_id
        self._eos_ids = api.service.defaults.eos_token_ids
        self._tokenizer = api.service.tokenizer
        self._with_logprobs = bool(body.logprobs)
        self._with_token_ids = bool(body.return_token_ids)
        self._prompt_logprobs = body.prompt_logprobs
        self._begun: set[int] = set()
        self._envelope: dict[str, object] = {
            "id": self.id,
            "object": "chat.completion.chunk" if self.stream else "chat.completion",
            "created": int(time.time()),
            "model": api.service.model_name,
        }

    def chunk(self, position: int, delta: TextDelta) -> dict[str, object]:
        said: dict[str, object] = {"content": delta.text}
        prompt: dict[str, object] = {}
        if delta.choice not in self._begun:
            prompt = self._prompt_extra() if not self._begun else {}
            self._begun.add(delta.choice)
            said = {"role": "assistant", "content": delta.text}
        choice = {**self._choice(delta), "delta": said}
        return {**self._envelope, **prompt, "choices": [choice]}

    def closing_chunk(self) -> dict[str, object]:
        return {**self._envelope, "choices": []}

    def whole(self, totals: ChoiceTotals) -> dict[str, object]:
        choices = [
            {
                **self._choice(delta),
                "message": {"role": "assistant", "content": delta.text, "refusal": None},
            }
            for delta in totals.values()
        ]
        extra = self._prompt_extra()
        return {**self._envelope, **extra, "choices": choices, "usage": self.usage()}

    def _choice(self, delta: TextDelta) -> dict[str, object]:
        choice: dict[str, object] = {
            "index": delta.choice,
            "logprobs": chat_logprobs(self._tokenizer, delta.logprobs)
            if self._with_logprobs
            else None,
            "finish_reason": delta.finish_reason,
            "stop_reason": stop_reason(delta, self._eos_ids),
        }
        if self._with_token_ids:
            choice["token_ids"] = delta.token_ids
        return choice

    def _prompt_extra(self) -> dict[str, object]:
        extra: dict[str, object] = {}
        prompt = self.generations[0]
        if self._with_token_ids:
            extra["prompt_token_ids"] = prompt.prompt_ids
        if (top := self._prompt_logprobs) is not None:
            told = prompt_logprobs(self._tokenizer, prompt.prompt_logprobs, top)
            extra["prompt_logprobs"] = told
        return extra
