"""Tokens, from whoever decodes a request to its client: in order, each once. Pure; part of a
router's core."""

from __future__ import annotations

from dataclasses import dataclass

from kvrelay.messages import Tokens
from router.ending import Ending
from router.events import Command, Deliver
from router.learning import Learning
from router.request import Request
from router.view import WorkerView
from router.workers import Workers


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivering:
    workers: Workers
    learning: Learning
    ending: Ending

    def said(
        self, request: Request, worker: WorkerView, event: Tokens, now_s: float
    ) -> list[Command]:
        worker.outlook.grown(event.key, event.first_index + len(event.token_ids))
        if event.first_index == request.choices[event.choice].resumed:
            self._begun(request, event, now_s)
        request.ledger.mark("last_token", event.at_s)
        request.ledger.mark("last_token_received", now_s)
        ready = request.take(event)
        if not ready:
            return []
        self.learning.choice_grown(request, event)
        if request.done:
            self.learning.ended(request, now_s)
            self.ending.ended(request, now_s)
        return [Deliver(request_id=request.request_id, tokens=tuple(ready), done=request.done)]

    def _begun(self, request: Request, event: Tokens, now_s: float) -> None:
        request.ledger.mark("first_token", event.at_s)
        request.ledger.mark("first_token_received", now_s)
        self.workers.prefilled(request.key, request.legs, now_s)
        self.learning.begun(request, now_s)
