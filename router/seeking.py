"""From a request's submission, or a failure of what it ran on, until a decode worker is asked for
it. Pure; part of a router's core.

    place -> a decode worker is asked
         `-> waits, and is placed again; or is refused; or fails, if it was admitted before
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from router.admitting.policy import Admitted, Deferred
from router.deciding import Deciding
from router.dispatching import Dispatch
from router.events import Command, Fail, Refuse
from router.refusal import Refusal
from router.refusing import Refusing
from router.request import Request
from router.waiting import PATIENCE_S, WaitingRoom
from router.workers import Workers


@dataclass(slots=True, kw_only=True)
class Seeking:
    deciding: Deciding
    dispatch: Dispatch
    refusing: Refusing
    waiting: WaitingRoom
    workers: Workers
    requests: dict[str, Request]

    def place(self, request: Request, otherwise: Refusal, now_s: float) -> list[Command]:
        """Ask the next decode worker; refuse for the last reason when none is left."""
        demand, verdict = self.deciding.consider(request, otherwise, now_s)
        match verdict:
            case Refusal() as refusal:
                return self._refuse(request, refusal, now_s)
            case Deferred(refusal=refusal, patience_s=patience_s):
                return self._wait(request, refusal, patience_s, now_s)
            case Admitted() as admitted:
                admitted.note_trial(now_s)
                return self.dispatch.place(request, demand, admitted, now_s)

    def ask_again(self, now_s: float) -> list[Command]:
        """Whoever is refused again waits on, and its line with it."""
        commands: list[Command] = []
        due_s = now_s if self.workers else inf
        while (turn := self.waiting.take_next(due_s)) is not None:
            request_id, refusal = turn
            request = self.requests[request_id]
            request.tried.clear()
            commands += self.place(request, refusal, now_s)
            self.waiting.follow(request_id, now_s)
        return commands

    def fail(self, request: Request, reason: str, message: str) -> list[Command]:
        self.leave(request)
        return [Fail(request_id=request.request_id, reason=reason, message=message)]

    def leave(self, request: Request) -> None:
        """It seeks nothing any more."""
        del self.requests[request.request_id]
        self.waiting.leave(request.request_id)
        self.dispatch.forget(request)

    def _refuse(self, request: Request, refusal: Refusal, now_s: float) -> list[Command]:
        if request.admitted:
            return self._wait(request, refusal, PATIENCE_S, now_s)
        self.leave(request)
        told = self.refusing.told(request, refusal, now_s)
        return [Refuse(request_id=request.request_id, refusal=told)]

    def _wait(
        self, request: Request, refusal: Refusal, patience_s: float, now_s: float
    ) -> list[Command]:
        """Without any worker there is nothing to wait for."""
        line = "" if request.admitted else request.tier.name
        waits = self.workers and self.waiting.try_wait(
            request.request_id, line, refusal, patience_s, now_s
        )
        if waits:
            request.placed = None
            return []
        if not request.admitted:
            return self._refuse(request, refusal, now_s)
        return self.fail(request, refusal.reason, f"can't go on: {refusal.message}")
