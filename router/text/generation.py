"""One admitted request as text. Runs in the router's event loop."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncGenerator, Sequence

from kvrelay.errors import (
    FailureReason,
    RefusalReason,
    RequestFailedError,
)
from kvrelay.types import (
    PromptLogprob,
    Sampling,
)
from router.core.state.generation import (
    ChoiceTokens,
    Generation,
)
from router.live.metrics import RequestTimer, RouterMetrics
from router.text.choices import ChoiceText, TextDelta
from router.text.request import TextRequest

log = logging.getLogger(__name__)


class TextGeneration:
    """One admitted request as text. Iterate `deltas` once; closing it early aborts the request."""

    def __init__(
        self,
        metrics: RouterMetrics,
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
        self._metrics = metrics
        self._tier = request.tier
        self._booking = request.booking
        self._last_token_s = request.received_s
        self.was_sent_away = False
        self._ended = False
        self._cut = False  # by a stop string: the dispatcher may have more to say
        self._choices = choices
        self._delivered_tokens = self.completion_tokens

    @property
    def delivered_texts(self) -> list[str]:
        """What another router delivered of each choice."""
        return [choice.delivered_text for choice in self._choices]

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

    def send_away(self) -> None:
        """Its client goes on at another router. Does nothing if the generation has ended."""
        if not self._ended:
            self.was_sent_away = True
            self._generation.abort()
            self._end(RefusalReason.DRAINING)

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
