"""What the workers of a request's attempt hold for it, and how that is given up. Pure; part of a
router's core."""

from __future__ import annotations

from dataclasses import dataclass

from router import orders
from router.dispatching import Dispatch
from router.events import Command
from router.request import Request
from router.workers import Workers


@dataclass(frozen=True, slots=True, kw_only=True)
class Legs:
    workers: Workers
    dispatch: Dispatch

    def abort(self, request: Request, now_s: float) -> list[Command]:
        """The workers say Released once nothing is held; until then the places stay taken. Of a
        prompt that has not been sent yet a prefill worker says nothing."""
        self.workers.prefilled(request.key, request.legs, now_s)
        self.dispatch.forget(request)
        return [send for send in orders.abort(request) if send.worker in self.workers]

    def forget(self, request: Request, now_s: float) -> None:
        """Nothing is held any more, or nobody will say so."""
        self.workers.forget(request.key, request.legs, now_s)
        self.dispatch.forget(request)
        request.placed = None
