"""Text in, text out: ties tokenizer, checks and dispatcher together for both APIs.

Runs in the router's event loop. Knows nothing of HTTP or gRPC.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from kvrelay.errors import (
    InvalidRequest,
    ModelNotFound,
    NotAllowed,
    NotAuthenticated,
    RefusalReason,
    Refused,
)
from router.access.caller import Caller
from router.access.door import OPEN_DOOR, Door
from router.access.limits import Booking
from router.carried.continuation import VALID_S, Ticket
from router.carried.promise_token import PromiseToken
from router.carried.signing import UNSIGNED, ClusterKey
from router.chat.formats.choice import PLAIN, ChatFormats
from router.core.state.generation import (
    Dispatcher,
    Generation,
    GenerationRequest,
    ModelFacts,
    RefusedUntil,
)
from router.live.metrics import RouterMetrics
from router.live.refusal_log import RefusalLog
from router.text.bounds import MAX_MESSAGES, check_characters, check_count, check_depth
from router.text.choices import ChoiceText, choice_text, go_on
from router.text.generation import TextGeneration
from router.text.grammar.check import GrammarCheck
from router.text.request import ChatPrompt, PromptInput, TextRequest
from router.text.request_fields import ONE_FOR_ALL, TierRules
from router.text.sampling import GenerationDefaults, check_prompt, resolve
from router.text.tokenizer import LONG_CHARACTERS, TextTokenizer

log = logging.getLogger(__name__)

Counted = TypeVar("Counted")

INLINE_MESSAGES = 64
"""A longer chat is rendered on a thread: in the event loop it would delay every stream."""
INLINE_TOKENS = 64
"""So many delivered tokens of a continuation become text at once; more of them on a thread."""


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
        formats: ChatFormats = PLAIN,
        grammars: GrammarCheck | None = None,
        door: Door = OPEN_DOOR,
    ) -> None:
        """`grammars` None: no output can be constrained."""
        self.dispatcher = dispatcher
        self.tokenizer = tokenizer
        self.model_name = model_name
        self.defaults = defaults
        self.metrics = metrics
        self.tiers = tiers
        self.formats = formats
        self.door = door
        self._key = key
        self._grammars = grammars
        self.leaving = False  # it still takes requests, but tells balancers to send none
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
            tools=chat.tools,
        )
        check_count("messages", len(chat.messages), MAX_MESSAGES, "messages")
        check_depth(chat.template_kwargs, "chat_template_kwargs")
        check_depth(chat.tools, "tools")
        characters = sum(_characters(message) for message in chat.messages)
        check_characters(characters, self.facts().max_model_len, "messages")
        has_more = chat.template_kwargs or chat.tools
        is_short = characters <= LONG_CHARACTERS and not has_more
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
        if request.sampling.grammar:
            await self._check_grammar(request.sampling.grammar, request.tenant)
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
        known_tokens = len(prompt_ids) + sum(map(len, asked.delivered))
        booking.pay(known_tokens, time.monotonic())
        generation = await self._submit(asked, request.promise)
        timer = self.metrics.started(request.received_s, len(prompt_ids))
        ticket = self._ticket(request, asked, facts.fingerprint, valid_s=VALID_S)
        request = replace(request, booking=booking)
        return TextGeneration(
            self.metrics,
            request,
            prompt_ids,
            sampling,
            generation,
            timer,
            self._key.sign(ticket),
            choices,
        )

    async def close(self) -> None:
        if self._grammars is not None:
            await self._grammars.close()

    async def _check_grammar(self, grammar: str, tenant: str) -> None:
        """Raises InvalidRequest."""
        if self._grammars is None:
            told = "this router can't constrain outputs: leave response_format out"
            raise InvalidRequest(told, code="unsupported_parameter")
        await self._grammars.check(grammar, tenant)

    async def _choices(self, request: TextRequest, n: int) -> list[ChoiceText]:
        """Behind what another router has delivered of them."""
        choices = [choice_text(self.tokenizer, request.sampling, index) for index in range(n)]
        behind = request.continuation
        if behind is not None:
            replay = partial(go_on, choices, behind)
            if sum(len(one.token_ids) for one in behind.choices) <= INLINE_TOKENS:
                replay()
            else:
                await asyncio.to_thread(replay)
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
        now = self._ticket(request, asked, fingerprint, valid_s=0.0)
        if ticket is None or not ticket.admits(now):
            return request, goes_on
        request = replace(request, request_id=ticket.request_id)
        return request, replace(goes_on, request_id=request.own_id, admitted=True)

    def _ticket(
        self, request: TextRequest, asked: GenerationRequest, fingerprint: str, *, valid_s: float
    ) -> Ticket:
        return Ticket.of(
            request.request_id,
            asked.prompt_ids,
            request.tier,
            fingerprint,
            space=request.tenant,
            until_s=time.time() + valid_s,
            n=asked.sampling.n,
            max_tokens=asked.sampling.max_tokens,
        )


def _characters(message: Mapping[str, Any]) -> int:
    """Of its text and of the arguments of its calls."""
    calls = message.get("tool_calls") or ()
    texts = [message.get("content"), message.get("reasoning_content")]
    texts += [call["function"]["arguments"] for call in calls]
    return sum(len(text) for text in texts if isinstance(text, str))
