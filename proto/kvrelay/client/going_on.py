"""A stream that has begun goes on at another router when its own is gone, and a refused request
comes back at the time that the refusal names."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf

from kvrelay.client.routers import Stub, Tour, is_gone
from kvrelay.errors import KvrelayError, Refused
from kvrelay.v1 import inference_pb2 as pb

RECONNECT_FOR_S = 10.0
"""For so long a stream is tried again when no router answers. A router that was killed is back
before."""
NO_WORKER_FOR_S = 600.0
"""For so long a stream is tried again while routers know no worker, as they themselves wait for one
(`failover_patience`)."""
RECONNECT_EVERY_S = 0.25


@dataclass(slots=True, kw_only=True)
class SoFar:
    """What a stream has delivered, so that it can go on at another router when its own is gone.

    `routers` are how many may be asked. `has_begun`: something was delivered."""

    routers: int
    has_begun: bool = False
    _answer: pb.GenerateResponse = field(default_factory=pb.GenerateResponse)
    _ticket: bytes = b""
    _choices: dict[int, pb.Delivered] = field(default_factory=dict)
    _losses: int = 0  # since something was delivered
    _lost_s: float = 0.0  # when each router had been asked once
    _answered_s: float = -inf  # when a router has refused last

    def add(self, response: pb.GenerateResponse) -> None:
        self.has_begun, self._losses = True, 0
        self._ticket = self._ticket or response.ticket
        self._answer = response
        choice = self._choices.setdefault(response.index, pb.Delivered())
        choice.token_ids.extend(response.token_ids)
        choice.finished |= bool(response.finish_reason)

    def is_whole(self, request: pb.GenerateRequest) -> bool:
        """All choices have ended."""
        finished = sum(choice.finished for choice in self._choices.values())
        return self.has_begun and finished == _choices_of(request)

    def try_again(
        self,
        tour: Tour[Stub],
        retries: Retries,
        request: pb.GenerateRequest,
        error: KvrelayError,
        now_s: float,
    ) -> float | None:
        """After how many seconds to send the request once more; None: not at all."""
        if self.has_begun:
            return self.try_go_on(tour, request, error, now_s)
        return 0.0 if tour.try_next(error) else retries.delay_s(error, now_s)

    def try_go_on(
        self, tour: Tour[Stub], request: pb.GenerateRequest, error: KvrelayError, now_s: float
    ) -> float | None:
        """At the next router, after this many seconds; None: not at all."""
        delay_s = self.delay_s(error, now_s)
        if delay_s is not None:
            tour.go_on()
            self.go_on(request)
        return delay_s

    def delay_s(self, error: KvrelayError, now_s: float) -> float | None:
        """When to ask the next router; None: not, since another one would say the same, or all have
        been gone, or without workers, for long."""
        is_refused = isinstance(error, Refused) and error.retry_after_s is not None
        if not (is_refused or is_gone(error)):
            return None
        self._losses += 1
        if is_refused:
            self._answered_s = now_s
        if self._losses < self.routers:
            return 0.0
        if self._losses == self.routers:
            self._lost_s = now_s
        return RECONNECT_EVERY_S if self._is_hoped_for(now_s) else None

    def _is_hoped_for(self, now_s: float) -> bool:
        silent_s = now_s - max(self._lost_s, self._answered_s)
        return silent_s < RECONNECT_FOR_S and now_s - self._lost_s < NO_WORKER_FOR_S

    def go_on(self, request: pb.GenerateRequest) -> None:
        """The request becomes one that goes on behind all that was delivered."""
        asked, answer = request.sampling_params, self._answer
        asked.seed = answer.seed
        asked.ClearField("prompt_logprobs")
        request.ClearField("promise")
        if answer.HasField("capped_tokens"):
            asked.max_tokens = answer.capped_tokens
        choices = [self._choices.get(i, pb.Delivered()) for i in range(_choices_of(request))]
        request.continuation.CopyFrom(pb.Continuation(choices=choices, ticket=self._ticket))


def _choices_of(request: pb.GenerateRequest) -> int:
    asked = request.sampling_params
    return asked.n if asked.HasField("n") else 1


@dataclass(slots=True, kw_only=True)
class Retries:
    """The retries of one request: at most `left` more, all of them by `until_s` if it has a
    deadline."""

    left: int
    until_s: float | None = None

    def delay_s(self, error: KvrelayError, now_s: float) -> float | None:
        """None: coming back won't help, or isn't allowed. A returned delay counts as a retry."""
        if not isinstance(error, Refused) or error.retry_after_s is None or not self.left:
            return None
        if self.until_s is not None and now_s + error.retry_after_s >= self.until_s:
            return None
        self.left -= 1
        return error.retry_after_s

    def remaining_s(self, now_s: float) -> float | None:
        """The rest of the deadline; None without one."""
        return None if self.until_s is None else max(0.0, self.until_s - now_s)
