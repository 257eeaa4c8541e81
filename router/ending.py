"""How requests end before their time: stopped, aborted, too late, or on a worker that failed, from
where they go on elsewhere. Pure; part of a router's core."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from router import orders
from router.events import ChoiceStopped, Command, Fail
from router.legs import Legs
from router.refusal import Refusal
from router.refusing import Refusing
from router.request import Request
from router.seeking import Seeking

MAX_ATTEMPTS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    requests: dict[str, Request]
    legs: Legs
    seeking: Seeking
    refusing: Refusing
    attempts: Iterator[int]

    def ended(self, request: Request, now_s: float) -> None:
        """It has left a place to others."""
        self.seeking.leave(request)
        self.refusing.releases.released(now_s)

    def stopped(self, event: ChoiceStopped, now_s: float) -> list[Command]:
        request = self.requests.get(event.request_id)
        if request is None or request.choices[event.choice].finished:
            return []
        request.choices[event.choice].finished = True
        if request.done:
            return self.aborted(event.request_id, now_s)
        if request.placement is None:
            return []  # told to the next worker once it has taken the request
        decode = request.placement.decode
        return [orders.stop(request, decode, event.choice, event.valid_tokens)]

    def aborted(self, request_id: str, now_s: float) -> list[Command]:
        request = self.requests.get(request_id)
        if request is None:
            return []
        self.ended(request, now_s)
        return self.legs.abort(request, now_s)

    def too_late(self, request_id: str, now_s: float) -> list[Command]:
        request = self.requests.get(request_id)
        if request is None:
            return []
        deadline_s = request.objectives.deadline_s or 0.0
        message = f"its deadline of {deadline_s:.3f} s has passed"
        failure = Fail(request_id=request_id, reason="deadline_exceeded", message=message)
        return [*self.aborted(request_id, now_s), failure]

    def sent_back(self, request: Request, refusal: Refusal, now_s: float) -> list[Command]:
        """Its prefill worker takes no prompts any more: it is placed anew, which is no failure."""
        aborts = self.legs.abort(request, now_s)
        self.legs.forget(request, now_s)
        request.begin_again(next(self.attempts))
        return [*aborts, *self.seeking.place(request, refusal, now_s)]

    def leg_failed(
        self, request: Request, reason: str, message: str, now_s: float
    ) -> list[Command]:
        """Run it again elsewhere; what the old attempt still says is dropped."""
        aborts = self.legs.abort(request, now_s)
        if request.tries >= MAX_ATTEMPTS:
            return [*aborts, *self.seeking.fail(request, reason, message)]
        self.legs.forget(request, now_s)
        request.try_again(next(self.attempts))
        refusal = Refusal(reason=reason, message=message)
        return [*aborts, *self.seeking.place(request, refusal, now_s)]
