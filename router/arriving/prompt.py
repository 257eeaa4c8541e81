"""A request whose prompt arrives in parts: from the first part to the running generation."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace

from kvrelay.errors import InvalidRequest, Refused
from kvrelay.types import Sampling
from router.access.limits import Booking
from router.arriving.ahead import Ahead
from router.arriving.parts import PartsSoFar, PromptPart
from router.core.state.generation import GenerationRequest, ModelFacts
from router.text.generation import TextGeneration
from router.text.request import TextRequest
from router.text.service import TextService

IDLE_S = 60.0
"""A prompt of which nothing has come for so long is given up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arriving:
    """`request.prompt` is not looked at. `most_characters`: of a text."""

    request: TextRequest
    parts: AsyncIterator[PromptPart]
    most_characters: int
    expected_tokens: int = 0
    idle_s: float = IDLE_S


async def start_arriving(service: TextService, arriving: Arriving) -> TextGeneration:
    """Returns when the last part has come and the request runs; its times count from there.

    Raises InvalidRequest, ModelNotFound or Refused, and what the parts raise.
    """
    request = arriving.request
    booking = Booking(request.caller.meter)
    request = replace(request, booking=booking)
    ahead = Ahead(service, request)
    try:
        prompt = await service.counted(request, _arrived(service, arriving, ahead, booking))
        whole = replace(request, prompt=prompt, received_s=time.perf_counter())
        await ahead.settle()
        return await _started(service, whole, ahead.computed_tokens)
    except BaseException:
        booking.cancel(time.monotonic())
        raise
    finally:
        await ahead.close()


async def _arrived(
    service: TextService, arriving: Arriving, ahead: Ahead, booking: Booking
) -> str | tuple[int, ...]:
    """The whole prompt."""
    facts = service.check_open(arriving.request.model)
    booking.begin(time.monotonic())
    _check_expected(service, arriving, facts)
    so_far = PartsSoFar(most_characters=arriving.most_characters, most_tokens=facts.max_model_len)
    while (part := await _next(arriving.parts, arriving.idle_s)) is not None:
        ahead.add(so_far.add(part))
    return so_far.whole()


async def _next(parts: AsyncIterator[PromptPart], idle_s: float) -> PromptPart | None:
    try:
        async with asyncio.timeout(idle_s):
            return await anext(parts, None)
    except TimeoutError:
        raise InvalidRequest(
            f"no part of the prompt has come for {idle_s:g} s: send it again, what was computed "
            "may still be cached",
            code="prompt_stalled",
            param="prompt",
        ) from None


def _check_expected(service: TextService, arriving: Arriving, facts: ModelFacts) -> None:
    """Raises InvalidRequest or Refused where so long a prompt could never be served."""
    request, expected_tokens = arriving.request, arriving.expected_tokens
    if not expected_tokens:
        return
    if expected_tokens >= facts.max_model_len:
        raise InvalidRequest(
            f"expected_tokens is {expected_tokens}, but the model's context is "
            f"{facts.max_model_len} tokens: shorten the prompt",
            code="context_length_exceeded",
            param="expected_tokens",
        )
    asked = GenerationRequest(
        request_id=request.own_id,
        prompt_ids=(0,) * expected_tokens,
        sampling=Sampling(max_tokens=1, seed=0, n=request.sampling.n),
        tenant=request.tenant,
        qos_tier=request.tier,
        objectives=request.objectives,
    )
    refused = service.dispatcher.appraise(asked)
    if refused is not None and refused.retry_after_s is None:
        raise refused


async def _started(
    service: TextService, whole: TextRequest, computed_tokens: int
) -> TextGeneration:
    """A refusal tells what it has cost."""
    try:
        return await service.start(whole)
    except Refused as refused:
        if computed_tokens:
            refused.message += f"; {computed_tokens} tokens of its prompt were computed ahead"
        raise
