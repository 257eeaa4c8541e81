"""POST /v1/completions"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from kvrelay.errors import InvalidRequest
from router.http.api import HttpApi, api_of, new_id
from router.http.asking import text_request
from router.http.bodies import (
    CompletionBody,
    CompletionFields,
    read_body,
    sampling_of,
    stop_reason,
    stream_flags,
    wants_ledger,
)
from router.http.neutral_fields import COMPLETION_NEUTRAL
from router.http.reply import (
    ChoiceTotals,
    CompletionLogprobs,
    EchoedPrompt,
    GenerationResponse,
    Reply,
    prompt_logprobs,
)
from router.text.bounds import check_sequences
from router.text.choices import TextDelta
from router.text.generation import TextGeneration
from router.text.request import TextRequest
from router.text.sampling import RequestedSampling


async def completions(request: Request) -> Response:
    received_s = time.perf_counter()
    api = api_of(request)
    body = await read_body(request, CompletionBody, COMPLETION_NEUTRAL, api.max_body_bytes)
    request_id = new_id("cmpl", request)
    reply = CompletionReply(api, body, request_id, ledger=wants_ledger(request))
    asked = text_request(request, body, reply.id, sampling=completion_sampling(body))
    asked = replace(
        asked, add_special_tokens=body.add_special_tokens is not False, received_s=received_s
    )
    prompts = _prompts(body)
    check_sequences(len(prompts), body.n)
    return GenerationResponse(api, _one_each(asked, prompts), reply)


def completion_sampling(body: CompletionFields) -> RequestedSampling:
    return sampling_of(
        body,
        logprobs=body.logprobs,
        prompt_logprobs=_prompt_logprobs_asked(body),
        echo=bool(body.echo),
    )


def _prompt_logprobs_asked(body: CompletionFields) -> int | None:
    """An echoed prompt has as many alternatives as the answer."""
    wanted = [body.prompt_logprobs, body.logprobs if body.echo else None]
    return max((top for top in wanted if top is not None), default=None)


def _one_each(asked: TextRequest, prompts: Sequence[str | tuple[int, ...]]) -> list[TextRequest]:
    """A single prompt keeps the call's id."""
    if len(prompts) == 1:
        return [replace(asked, prompt=prompts[0])]
    return [
        replace(asked, request_id=f"{asked.request_id}-{position}", prompt=prompt)
        for position, prompt in enumerate(prompts)
    ]


def _prompts(body: CompletionBody) -> list[str | tuple[int, ...]]:
    """A list of numbers is one prompt; a list of strings or lists is several."""
    if isinstance(body.prompt, str):
        return [body.prompt]
    if not body.prompt:
        raise InvalidRequest("the prompt is an empty list: send at least one", param="prompt")
    if isinstance(body.prompt[0], int):
        return [tuple(body.prompt)]
    return [part if isinstance(part, str) else tuple(part) for part in body.prompt]


class CompletionReply(Reply):
    def __init__(
        self, api: HttpApi, body: CompletionFields, request_id: str, *, ledger: bool
    ) -> None:
        super().__init__(stream_flags(body), ledger=ledger, tickets=bool(body.return_token_ids))
        self.id = request_id
        self._eos_ids = api.service.defaults.eos_token_ids
        self._with_logprobs = body.logprobs is not None
        self._with_token_ids = bool(body.return_token_ids)
        self._choices_per_prompt = body.n or 1
        self._echo = bool(body.echo)
        self._prompt_logprobs = body.prompt_logprobs
        self._tokenizer = api.service.tokenizer
        self._logprobs = defaultdict[int, CompletionLogprobs](
            partial(CompletionLogprobs, api.service.tokenizer, body.logprobs or 0)
        )
        self._begun: set[int] = set()
        self._envelope: dict[str, object] = {
            "id": self.id,
            "object": "text_completion",
            "created": int(time.time()),
            "model": api.service.model_name,
        }

    def chunk(self, position: int, delta: TextDelta) -> dict[str, object]:
        return {**self._envelope, "choices": [self._choice(position, delta)]}

    def closing_chunk(self) -> dict[str, object]:
        return {**self._envelope, "choices": []}

    def whole(self, totals: ChoiceTotals) -> dict[str, object]:
        choices = [self._choice(position, delta) for (position, _), delta in totals.items()]
        return {**self._envelope, "choices": choices, "usage": self.usage()}

    def _choice(self, position: int, delta: TextDelta) -> dict[str, object]:
        index = position * self._choices_per_prompt + delta.choice
        begins = index not in self._begun
        self._begun.add(index)
        prompt = self.generations[position] if begins else None
        choice: dict[str, object] = {
            "index": index,
            "text": self._echoed_text(prompt) + delta.text,
            "logprobs": self._logprobs[index].shape(delta.logprobs, self._echoed(prompt))
            if self._with_logprobs
            else None,
            "finish_reason": delta.finish_reason,
            "stop_reason": stop_reason(delta, self._eos_ids),
        }
        if self._with_token_ids:
            choice["token_ids"] = delta.token_ids
        return choice if prompt is None else choice | self._prompt_extra(prompt)

    def _echoed_text(self, prompt: TextGeneration | None) -> str:
        if prompt is None or not self._echo:
            return ""
        text = prompt.prompt
        if isinstance(text, str):
            return text
        return self._tokenizer.decode(prompt.prompt_ids, skip_special_tokens=False)

    def _echoed(self, prompt: TextGeneration | None) -> EchoedPrompt | None:
        if prompt is None or not self._echo:
            return None
        return EchoedPrompt(token_ids=prompt.prompt_ids, entries=prompt.prompt_logprobs)

    def _prompt_extra(self, prompt: TextGeneration) -> dict[str, object]:
        extra: dict[str, object] = {}
        if self._with_token_ids:
            extra["prompt_token_ids"] = prompt.prompt_ids
        if (top := self._prompt_logprobs) is not None:
            told = prompt_logprobs(self._tokenizer, prompt.prompt_logprobs, top)
            extra["prompt_logprobs"] = told
        return extra
