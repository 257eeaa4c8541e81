"""The endpoint. The first line of the body is a completion's, whose `prompt` may be absent or the
first part; each further line is a part; the prompt ends where the body ends."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from kvrelay.errors import InvalidRequest
from router.arriving.parts import PromptPart
from router.arriving.prompt import Arriving, start_arriving
from router.http.api import api_of, new_id
from router.http.asking import text_request
from router.http.bodies import (
    CompletionFields,
    TokenIds,
    parsed,
    wants_ledger,
)
from router.http.completions import CompletionReply, completion_sampling
from router.http.neutral_fields import COMPLETION_NEUTRAL
from router.http.reply import GenerationResponse
from router.http.streamed_input.lines import json_lines, part_of

MOST_LINE_BYTES = 1 << 20


class StreamedInputBody(CompletionFields):
    prompt: str | TokenIds = ""
    expected_tokens: int = 0
    """So long the prompt is expected to be. One that could never be served is refused at once."""

    def first_part(self) -> PromptPart:
        content = self.prompt if isinstance(self.prompt, str) else tuple(self.prompt)
        return PromptPart(content=content)


async def streamed_completions(request: Request) -> Response:
    api = api_of(request)
    async with aclosing(json_lines(request.stream(), MOST_LINE_BYTES)) as lines:
        body = parsed(await _first(lines), StreamedInputBody, COMPLETION_NEUTRAL)
        reply = CompletionReply(api, body, new_id("cmpl", request), ledger=wants_ledger(request))
        asked = text_request(request, body, reply.id, sampling=completion_sampling(body))
        asked = replace(asked, add_special_tokens=body.add_special_tokens is not False)
        generation = await start_arriving(
            api.service,
            Arriving(
                request=asked,
                parts=_parts(body.first_part(), lines),
                most_characters=api.max_body_bytes,
                expected_tokens=body.expected_tokens,
            ),
        )
    return GenerationResponse(api, [asked], reply, started=[generation])


async def _first(lines: AsyncIterator[dict[str, Any]]) -> dict[str, Any]:
    async for fields in lines:
        return fields
    raise InvalidRequest("the body is empty: send a line with the request", code="invalid_json")


async def _parts(
    first: PromptPart, lines: AsyncIterator[dict[str, Any]]
) -> AsyncIterator[PromptPart]:
    if first.content:
        yield first
    async for fields in lines:
        yield part_of(fields)
