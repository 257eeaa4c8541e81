"""Text in, text out: ties tokenizer, checks and dispatcher together for both APIs.

Runs in the router's event loop. Knows nothing of HTTP or gRPC.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from kvrelay.errors import (
    FailureReason,
    InvalidRequest,
    ModelNotFound,
    NotAllowed,
    NotAuthenticated,
    RefusalReason,
    Refused,
    RequestFailedError,
)
from kvrelay.types import (
    NO_OBJECTIVES,
    FinishReason,
    Objectives,
    PromptLogprob,
    Sampling,
    TokenLogprobs,
)
from router.access.caller import ANYBODY, Caller
from router.access.door import OPEN_DOOR, Door
from router.access.limits import Booking
from router.core.state.generation import (
    ChoiceTokens,
    Dispatcher,
    Generation,
    GenerationRequest,
    ModelFacts,
    RefusedUntil,
)
from router.live.metrics import RequestTimer, RouterMetrics
from router.live.refusal_log import RefusalLog
from router.text.bounds import MAX_MESSAGES, check_characters, check_count, check_depth
from router.text.continuation import VALID_S, Continuation, Delivered, Ticket
from router.text.detokenizer import Delta, TextStream
from router.text.promise_token import PromiseToken
from router.text.request_fields import ONE_FOR_ALL, TierRules
from router.text.sampling import GenerationDefaults, RequestedSampling, check_prompt, resolve
from router.text.signing import UNSIGNED, ClusterKey
from router.text.tokenizer import LONG_CHARACTERS, TextTokenizer

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class TextDelta:
    """New text of one choice. The last delta of a choice has its finish reason.

    `token_ids` and `logprobs` run ahead of `text` while text is held back.
    """

    choice: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    completion_tokens: int
    finish_reason: FinishReason | None = None
    stop_string: str | None = None
    stop_token_id: int | None = None


class DeltaSum:
    """All deltas of a choice that isn't streamed, as one."""

    def __init__(self) -> None:
        self._deltas: list[TextDelta] = []

    def add(self, delta: TextDelta) -> None:
        self._deltas.append(delta)

    def total(self) -> TextDelta:
        return replace(
            self._deltas[-1],
            text="".join(delta.text for delta in self._deltas),
            token_ids=tuple(i for delta in self._deltas for i in delta.token_ids),
            logprobs=tuple(entry for delta in self._deltas for entry in delta.logprobs),
        )


class ChoiceText:
    def __init__(self, index: int, stream: TextStream, *, keep_stop_token: bool) -> None:
        self.index = index
        self.finished = False
        self.completion_tokens = 0
        self._stream = stream
        self._keep_stop_token = keep_stop_token

    def go_on_behind(self, delivered: Delivered) -> None:
        """Its text up to there was delivered by another router."""
        self.finished = delivered.finished
        if not delivered.finished:
            self._stream.push(delivered.token_ids)
        self.completion_tokens = len(delivered.token_ids)

    def push(self, tokens: ChoiceTokens) -> TextDelta:
        delta = self._text_of(tokens)
        if delta.stopped is not None:
            return self._stopped(tokens, delta)
        self.completion_tokens += len(tokens.token_ids)
        self.finished = tokens.finish_reason is not None
        return TextDelta(
            choice=self.index,
            text=delta.text,
            token_ids=tokens.token_ids,
            logprobs=tokens.logprobs,
            completion_tokens=self.completion_tokens,
            finish_reason=tokens.finish_reason,
            stop_token_id=tokens.stop_token_id,
        )

    def _text_of(self, tokens: ChoiceTokens) -> Delta:
        delta = self._stream.push(self._spoken_ids(tokens))
        if tokens.finish_reason is None or delta.stopped is not None:
            return delta
        rest = self._stream.finish()
        return Delta(text=delta.text + rest.text, stopped=rest.stopped)

    def _spoken_ids(self, tokens: ChoiceTokens) -> tuple[int, ...]:
        """Leaves out the token that stopped the choice: it counts, but isn't part of the text."""
        ids = tokens.token_ids
        if tokens.stop_token_id is None or self._keep_stop_token:
            return ids
        return ids[:-1] if ids and ids[-1] == tokens.stop_token_id else ids

    def _stopped(self, tokens: ChoiceTokens, delta: Delta) -> TextDelta:
        assert delta.stopped is not None
        valid = delta.stopped.valid_tokens - self.completion_tokens
        self.completion_tokens = delta.stopped.valid_tokens
        self.finished = True
        return TextDelta(
            choice=self.index,
            text=delta.text,
            token_ids=tokens.token_ids[:valid],
            logprobs=tokens.logprobs[:valid],
            completion_tokens=self.completion_tokens,
            finish_reason=FinishReason.STOP,
            stop_string=delta.stopped.stop_string,
        )


Counted = TypeVar("Counted")

INLINE_MESSAGES = 64
"""A longer chat is rendered on a thread: in the event loop it would delay every stream."""
INLINE_TOKENS = 64
"""So many delivered tokens of a continuation become text at once; more of them on a thread."""


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    messages: Sequence[Mapping[str, Any]]
    add_generation_prompt: bool = True
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    add_special_tokens: bool = False


PromptInput = str | tuple[int, ...] | ChatPrompt


@dataclass(frozen=True, slots=True, kw_only=True)
class TextRequest:
    """`tier` is the QoS tier. `tenant` names the part of the cache that it uses: what its caller's
    `space` says. `received_s`: perf_counter at the request's first byte. `continuation`: another
    router has begun with it. `promise`: what it was told with a refusal. `booking`: what its key
    has paid for it already."""

    request_id: str
    prompt: PromptInput
    sampling: RequestedSampling
    model: str = ""
    caller: Caller = ANYBODY
    tenant: str = ""
    tier: str = ""
    objectives: Objectives = NO_OBJECTIVES
    add_special_tokens: bool = True
    continuation: Continuation | None = None
    promise: bytes = b""
    booking: Booking | None = None
    received_s: float = field(default_factory=time.perf_counter)

    @property
    def own_id(self) -> str:
        """Its id inside the cluster."""
        return self.caller.own_id(self.request_id)


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
        key: ClusterKey = UNSIGNED,
        door: Door = OPEN_DOOR,
    ) -> None:
        self.dispatcher = dispatcher
        self.tokenizer = tokenizer
        self.model_name = model_name
        self.defaults = defaults
        self.metrics = metrics
        self.tiers = tiers
        self.door = door
        self._key = key
        self.draining = False
        self.refusals = RefusalLog()

    def caller_of(self, headers: Mapping[str, str], request_id: str = "") -> Caller:
        """By the key that the headers bring. Raises NotAuthenticated."""
        try:
            return self.door.caller(headers)
        except NotAuthenticated as stranger:
            self.metrics.invalid(stranger.code, "")
            self.refusals.refused(stranger.code, "", request_id)
            raise

    def tier_of(self, asked: str, headers: Mapping[str, str], caller: Caller) -> str:
        """The tier of a call. Raises InvalidRequest, and NotAllowed for one that its key may not
        use."""
        try:
            return self.tiers.tier_of(asked, headers, caller.tiers)
        except NotAllowed as denied:
            self.metrics.invalid(denied.code, "")
            raise

    async def start(self, request: TextRequest) -> TextGeneration:
        """Raises InvalidRequest, ModelNotFound or Refused. When it returns, the request runs."""
        return await self.counted(request, self._start(request))

    async def counted(self, request: TextRequest, starting: Awaitable[Counted]) -> Counted:
        """What it raises stands in the metrics."""
        try:
            return await starting
        except Refused as refusal:
            after_s = time.perf_counter() - request.received_s
            self.metrics.refused(refusal.reason, request.tier, after_s)
            refusal.tier = request.tier
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
        """Raises Refused until a worker has joined."""
        facts = self.dispatcher.model()
        if facts is None:
            raise Refused(RefusalReason.NO_CAPACITY, "no worker has joined yet", retry_after_s=1.0)
        return facts

    async def prompt_ids(
        self, prompt: PromptInput, *, add_special_tokens: bool = True
    ) -> tuple[int, ...]:
        match prompt:
            case tuple():
                return prompt
            case ChatPrompt() as chat:
                text = await self._rendered(chat)
                return await self._encode(text, add_special_tokens=chat.add_special_tokens)
            case str():
                return await self._encode(prompt, add_special_tokens=add_special_tokens)

    async def _rendered(self, chat: ChatPrompt) -> str:
        render = partial(
            self.tokenizer.render_chat,
            chat.messages,
            add_generation_prompt=chat.add_generation_prompt,
            template_kwargs=chat.template_kwargs,
        )
        check_count("messages", len(chat.messages), MAX_MESSAGES, "messages")
        check_depth(chat.template_kwargs, "chat_template_kwargs")
        characters = sum(len(message.get("content") or "") for message in chat.messages)
        check_characters(characters, self.facts().max_model_len, "messages")
        is_short = characters <= LONG_CHARACTERS and not chat.template_kwargs
        if is_short and len(chat.messages) <= INLINE_MESSAGES:
            return render()
        return await asyncio.to_thread(render)

    async def _encode(self, text: str, *, add_special_tokens: bool) -> tuple[int, ...]:
        if len(text) <= LONG_CHARACTERS:
            return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        check_characters(len(text), self.facts().max_model_len)
        return await asyncio.to_thread(
            self.tokenizer.encode, text, add_special_tokens=add_special_tokens
        )

    def check_open(self, model: str) -> ModelFacts:
        """Raises Refused or ModelNotFound where no request is taken."""
        if self.draining:
            raise Refused(RefusalReason.DRAINING, "this router is stopping", retry_after_s=1.0)
        self.check_model(model)
        return self.facts()

    async def _start(self, request: TextRequest) -> TextGeneration:
        facts = self.check_open(request.model)
        booking = request.booking or Booking(request.caller.meter)
        if request.continuation is None:
            booking.begin(time.monotonic())
        try:
            return await self._start_booked(request, facts, booking)
        except BaseException:
            booking.cancel(time.monotonic())
            raise

    async def _start_booked(
        self, request: TextRequest, facts: ModelFacts, booking: Booking
    ) -> TextGeneration:
        parsed_s = time.perf_counter()
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
        asked = GenerationRequest(
            request_id=request.own_id,
            prompt_ids=prompt_ids,
            sampling=sampling,
            tenant=request.tenant,
            qos_tier=request.tier,
            objectives=request.objectives,
            phases_s=phases_s,
        )
        if request.continuation is not None:
            request.continuation.check(sampling.n, sampling.max_tokens, facts.vocab_size)
            request, asked = self._continued(request, asked, facts.fingerprint)
        choices = await self._choices(request, sampling.n)
        booking.begin(time.monotonic(), goes_on=asked.admitted)
        booking.pay(len(prompt_ids), time.monotonic())
        generation = await self._submit(asked, request.promise)
        timer = self.metrics.started(request.received_s, len(prompt_ids))
        ticket = self._ticket(request, prompt_ids, facts.fingerprint, valid_s=VALID_S)
        request = replace(request, booking=booking)
        return TextGeneration(
            self, request, prompt_ids, sampling, generation, timer, self._key.sign(ticket), choices
        )

    async def _choices(self, request: TextRequest, n: int) -> list[ChoiceText]:
        """Behind what another router has delivered of them."""
        choices = [_choice_text(self.tokenizer, request.sampling, index) for index in range(n)]
        behind = request.continuation
        if behind is not None:
            go_on = partial(_go_on, choices, behind)
            if sum(len(one.token_ids) for one in behind.choices) <= INLINE_TOKENS:
                go_on()
            else:
                await asyncio.to_thread(go_on)
        return choices

    async def _submit(self, asked: GenerationRequest, promise: bytes) -> Generation:
        """Raises InvalidRequest or Refused, with a signed promise if there is one."""
        token = self._key.open(PromiseToken, promise) if promise else None
        if token is not None:
            asked = replace(asked, promise=token.told_to(asked, time.time()))
        try:
            return await self.dispatcher.submit(asked)
        except RefusedUntil as refused:
            told = PromiseToken.of(asked, refused.told, time.time())
            refused.promise = self._key.sign(told)
            raise

    def _continued(
        self, request: TextRequest, asked: GenerationRequest, fingerprint: str
    ) -> tuple[TextRequest, GenerationRequest]:
        """With its ticket it is the admitted request again, by its id; without one it is like a
        new one to admission."""
        behind = request.continuation
        assert behind is not None, "it goes on"
        goes_on = replace(
            asked,
            delivered=tuple(one.token_ids for one in behind.choices),
            finished=frozenset(i for i, one in enumerate(behind.choices) if one.finished),
        )
        ticket = self._key.open(Ticket, behind.ticket)
        now = self._ticket(request, asked.prompt_ids, fingerprint, valid_s=0.0)
        if ticket is None or not ticket.admits(now):
            return request, goes_on
        request = replace(request, request_id=ticket.request_id)
        return request, replace(goes_on, request_id=request.own_id, admitted=True)

    def _ticket(
        self, request: TextRequest, prompt_ids: Sequence[int], fingerprint: str, *, valid_s: float
    ) -> Ticket:
        return Ticket.of(
            request.request_id,
            prompt_ids,
            request.tier,
            fingerprint,
            space=request.tenant,
            until_s=time.time() + valid_s,
        )


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
        ticket: bytes,
        choices: list[ChoiceText],
    ) -> None:
        self.request_id = request.request_id
        self.ticket = ticket
        self.prompt = request.prompt
        self.prompt_ids = prompt_ids
        self.sampling = sampling
        self._generation = generation
        self._timer = timer
        self._metrics = service.metrics
        self._tier = request.tier
        self._booking = request.booking
        self._last_token_s = request.received_s
        self._ended = False
        self._cut = False  # by a stop string: the dispatcher may have more to say
        self._choices = choices
        self._delivered_tokens = self.completion_tokens

    @property
    def completion_tokens(self) -> int:
        return sum(choice.completion_tokens for choice in self._choices)

    @property
    def prompt_logprobs(self) -> Sequence[PromptLogprob]:
        """For each token of the prompt but the first, once the first token is known."""
        return self._generation.prompt_logprobs

    @property
    def cached_tokens(self) -> int:
        """Cached tokens of the prompt, once the first token is known."""
        return self._generation.cached_tokens

    @property
    def tier(self) -> str:
        """The QoS tier that was applied."""
        return self._tier

    @property
    def capped_tokens(self) -> int | None:
        """Output was cut to this many tokens to serve the request; None: it wasn't."""
        return self._generation.capped_tokens

    def abort(self) -> None:
        """Does nothing if the generation has ended."""
        if not self._ended:
            self._generation.abort()
            self._end("abort")

    def withdraw(self) -> None:
        """As `abort`, and its key pays nothing: others of its call were refused."""
        if self._booking is not None:
            self._booking.cancel(time.monotonic())
        self.abort()

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
                raise RequestFailedError(FailureReason.ABORTED, "the request was aborted")
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
        asked_for = failure.reason in (FailureReason.ABORTED, FailureReason.DEADLINE_EXCEEDED)
        level = logging.DEBUG if asked_for else logging.WARNING
        log.log(level, "a request failed: %s", failure, extra={"request_id": self.request_id})

    def _end(self, reason: str) -> None:
        if not self._ended:
            self._ended = True
            if self._booking is not None:
                generated = self.completion_tokens - self._delivered_tokens
                self._booking.settle(generated, time.monotonic())
            log.debug(
                "a request ended: %s, %d tokens in, %d out",
                reason,
                len(self.prompt_ids),
                self.completion_tokens,
                extra={"request_id": self.request_id},
            )
            self._timer.finished(reason, self._generation.ledger())
            self._metrics.predicted(self._generation.prediction_errors())


def _choice_text(tokenizer: TextTokenizer, asked: RequestedSampling, index: int) -> ChoiceText:
    keep = asked.include_stop_str_in_output
    return ChoiceText(index, _text_stream(tokenizer, asked), keep_stop_token=keep)


def _go_on(choices: Sequence[ChoiceText], behind: Continuation) -> None:
    for choice, delivered in zip(choices, behind.choices, strict=True):
        choice.go_on_behind(delivered)


def _text_stream(tokenizer: TextTokenizer, asked: RequestedSampling) -> TextStream:
    return TextStream(
        tokenizer,
        stop_strings=asked.stop,
        skip_special_tokens=asked.skip_special_tokens,
        include_stop_str_in_output=asked.include_stop_str_in_output,
        min_tokens=asked.min_tokens,
    )
