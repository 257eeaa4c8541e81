"""Text in, text out: ties tokenizer, validation and the dispatcher together for both faces.

Runs in the router's event loop. Knows nothing of HTTP or gRPC.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvrelay.errors import InvalidRequest, ModelNotFound, Refused, RequestFailedError
from kvrelay.types import NO_OBJECTIVES, Objectives, PromptLogprob, Sampling
from router.choice_text import ChoiceText, TextDelta
from router.generation import (
    ChoiceTokens,
    Dispatcher,
    Generation,
    GenerationRequest,
    ModelFacts,
)
from router.metrics import RequestTimer, RouterMetrics
from router.refusal_log import RefusalLog
from router.sampling_defaults import (
    GenerationDefaults,
    RequestedSampling,
    check_prompt,
    resolve,
)
from router.text_stream import TextStream
from router.tier_rules import ONE_FOR_ALL, TierRules
from router.tokenizer import TextTokenizer

log = logging.getLogger(__name__)

INLINE_CHARACTERS = 20_000
"""A longer text is tokenized on a thread: it would hold up every stream."""


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    messages: Sequence[Mapping[str, Any]]
    add_generation_prompt: bool = True
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    add_special_tokens: bool = False


Prompt = str | tuple[int, ...] | ChatPrompt


@dataclass(frozen=True, slots=True, kw_only=True)
class TextRequest:
    """`tier` is that of QoS. `received_s`: perf_counter when the face got the request's first
    byte."""

    request_id: str
    prompt: Prompt
    sampling: RequestedSampling
    model: str = ""
    tenant: str = ""
    tier: str = ""
    objectives: Objectives = NO_OBJECTIVES
    add_special_tokens: bool = True
    received_s: float = field(default_factory=time.perf_counter)


class TextService:
    def __init__(
        self,
        dispatcher: Dispatcher,
        tokenizer: TextTokenizer,
        *,
        model_name: str,
        defaults: GenerationDefaults,
        metrics: RouterMetrics,
        tiers: TierRules = ONE_FOR_ALL,
    ) -> None:
        self.dispatcher = dispatcher
        self.tokenizer = tokenizer
        self.model_name = model_name
        self.defaults = defaults
        self.metrics = metrics
        self.tiers = tiers
        self.draining = False
        self.refusals = RefusalLog()

    async def start(self, request: TextRequest) -> TextGeneration:
        """Raises InvalidRequest, ModelNotFound or Refused; the request runs once it returns."""
        try:
            return await self._start(request)
        except Refused as refusal:
            after_s = time.perf_counter() - request.received_s
            self.metrics.refused(refusal.reason, request.tier, after_s)
            self.refusals.refused(refusal.reason, request.tier, request.request_id)
            raise
        except InvalidRequest as invalid:
            self.metrics.invalid(invalid.code, request.tier)
            raise

    def check_model(self, model: str) -> None:
        if model and model != self.model_name:
            raise ModelNotFound(
                f"the model {model!r} does not exist: this cluster serves {self.model_name!r}",
                code="model_not_found",
                param="model",
            )

    def facts(self) -> ModelFacts:
        """Raises Refused while no worker has said what it serves."""
        facts = self.dispatcher.model()
        if facts is None:
            raise Refused("no_capacity", "no worker has joined yet", retry_after_s=1.0)
        return facts

    async def prompt_ids(
        self, prompt: Prompt, *, add_special_tokens: bool = True
    ) -> tuple[int, ...]:
        match prompt:
            case tuple():
                return prompt
            case ChatPrompt() as chat:
                text = self.tokenizer.render_chat(
                    chat.messages,
                    add_generation_prompt=chat.add_generation_prompt,
                    template_kwargs=chat.template_kwargs,
                )
                return await self._encode(text, add_special_tokens=chat.add_special_tokens)
            case str():
                return await self._encode(prompt, add_special_tokens=add_special_tokens)

    async def _encode(self, text: str, *, add_special_tokens: bool) -> tuple[int, ...]:
        if len(text) <= INLINE_CHARACTERS:
            return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return await asyncio.to_thread(
            self.tokenizer.encode, text, add_special_tokens=add_special_tokens
        )

    async def _start(self, request: TextRequest) -> TextGeneration:
        parsed_s = time.perf_counter()
        if self.draining:
            raise Refused("draining", "this router stops and takes nothing new", retry_after_s=1.0)
        self.check_model(request.model)
        facts = self.facts()
        if request.prompt == "":
            raise InvalidRequest("the prompt is empty: send some text", param="prompt")
        prompt_ids = await self.prompt_ids(
            request.prompt, add_special_tokens=request.add_special_tokens
        )
        check_prompt(prompt_ids, facts)
        sampling = resolve(
            request.sampling, prompt_tokens=len(prompt_ids), defaults=self.defaults, facts=facts
        )
        phases_s = {
            "receive": parsed_s - request.received_s,
            "tokenize": time.perf_counter() - parsed_s,
        }
        generation = await self.dispatcher.submit(
            GenerationRequest(
                request_id=request.request_id,
                prompt_ids=prompt_ids,
                sampling=sampling,
                tenant=request.tenant,
                qos_tier=request.tier,
                objectives=request.objectives,
                phases_s=phases_s,
            )
        )
        timer = self.metrics.started(request.received_s, len(prompt_ids))
        return TextGeneration(self, request, prompt_ids, sampling, generation, timer)


class TextGeneration:
    """One admitted request as text. Iterate `deltas` once; closing it early aborts the request."""

    def __init__(
        self,
        service: TextService,
        request: TextRequest,
        prompt_ids: tuple[int, ...],
        sampling: Sampling,
        generation: Generation,
        timer: RequestTimer,
    ) -> None:
        self.request_id = request.request_id
        self.prompt = request.prompt
        self.prompt_ids = prompt_ids
        self.sampling = sampling
        self._generation = generation
        self._timer = timer
        self._metrics = service.metrics
        self._last_token_s = request.received_s
        self._ended = False
        self._cut = False  # by a stop string: the dispatcher may have more to say
        asked = request.sampling
        keep = asked.include_stop_str_in_output
        self._choices = [
            ChoiceText(index, _text_stream(service.tokenizer, asked), keep_stop_token=keep)
            for index in range(sampling.n)
        ]

    @property
    def completion_tokens(self) -> int:
        return sum(choice.completion_tokens for choice in self._choices)

    @property
    def prompt_logprobs(self) -> Sequence[PromptLogprob]:
        """Of each token of the prompt but the first, once the first token is here."""
        return self._generation.prompt_logprobs

    @property
    def cached_tokens(self) -> int:
        """Of the prompt, once the first token is here."""
        return self._generation.cached_tokens

    @property
    def capped_tokens(self) -> int | None:
        """What its max_tokens were cut to, so as to serve it; None: they weren't."""
        return self._generation.capped_tokens

    def abort(self) -> None:
        """Nothing happens when it has ended already."""
        if not self._ended:
            self._generation.abort()
            self._end("abort")

    def ledger_ms(self) -> dict[str, float]:
        """# phase |-> milliseconds, in order, up to now"""
        phases = {name: 1000 * s for name, s in self._generation.ledger().items()}
        phases["respond"] = 1000 * (time.perf_counter() - self._last_token_s)
        return phases

    async def deltas(self) -> AsyncGenerator[TextDelta]:
        """Raises RequestFailedError when the workers could not finish it."""
        arriving = aiter(self._generation)
        try:
            async for tokens in arriving:
                choice = self._choices[tokens.choice]
                if choice.finished:
                    continue
                delta = self._push(choice, tokens)
                yield delta
                if self._ended and self._cut:
                    return
            if not self._ended:
                raise RequestFailedError("aborted", "the request was aborted")
        except RequestFailedError as failure:
            self._log_failure(failure)
            self._end("error")
            raise
        finally:
            if isinstance(arriving, AsyncGenerator):
                await arriving.aclose()
            self.abort()

    def _push(self, choice: ChoiceText, tokens: ChoiceTokens) -> TextDelta:
        self._last_token_s = time.perf_counter()
        delta = choice.push(tokens)
        self._timer.tokens(choice.index, len(delta.token_ids), self._last_token_s)
        if delta.stop_string is not None and tokens.finish_reason is None:
            self._cut = True
            self._generation.stop(choice.index, choice.completion_tokens)
        if delta.finish_reason is not None and all(c.finished for c in self._choices):
            self._end(delta.finish_reason.value)
        return delta

    def _log_failure(self, failure: RequestFailedError) -> None:
        asked_for = failure.reason in ("aborted", "deadline_exceeded")
        level = logging.DEBUG if asked_for else logging.WARNING
        log.log(level, "a request failed: %s", failure, extra={"request_id": self.request_id})

    def _end(self, reason: str) -> None:
        if not self._ended:
            self._ended = True
            log.debug(
                "a request ended: %s, %d tokens in, %d out",
                reason,
                len(self.prompt_ids),
                self.completion_tokens,
                extra={"request_id": self.request_id},
            )
            self._timer.finished(reason, self._generation.ledger())
            self._metrics.predicted(self._generation.prediction_errors())


def _text_stream(tokenizer: TextTokenizer, asked: RequestedSampling) -> TextStream:
    return TextStream(
        tokenizer,
        stop_strings=asked.stop,
        skip_special_tokens=asked.skip_special_tokens,
        include_stop_str_in_output=asked.include_stop_str_in_output,
        min_tokens=asked.min_tokens,
    )
