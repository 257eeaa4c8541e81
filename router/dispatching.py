"""When an admitted prompt goes to a prefill worker, and to which. Pure; part of a router's core.

`Direct` sends it to the worker that it was placed with, as soon as its decode worker has taken it.
`router.shared_queue` keeps it at the router until a prefill worker is about to be free.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from kvrelay.qos import QosTiers
from router import orders
from router.admitting.policy import Admitted
from router.deciding import Deciding
from router.demand import Demand
from router.events import Command
from router.request import Request
from router.workers import Workers


class Dispatch(Protocol):
    @property
    def waiting(self) -> int:
        """Prompts that wait at the router."""

    def turn_in_s(self, priority: int, now_s: float) -> float:
        """Until a new prompt leaves the router."""

    def place(
        self, request: Request, demand: Demand, admitted: Admitted, now_s: float
    ) -> list[Command]:
        """Its decode worker is asked."""

    def reserved(self, request: Request, held_tokens: int, now_s: float) -> list[Command]:
        """Its decode worker has taken it."""

    def forget(self, request: Request) -> None:
        """It waits here no more, if it did."""

    def stranded(self, deciding: Deciding, now_s: float) -> list[Request]:
        """Those that wait here, and that no prefill worker could take any more."""

    def give(self, deciding: Deciding, now_s: float) -> list[Command]:
        """To all workers that are about to be free."""

    def validate(self) -> None: ...


OpenDispatch = Callable[[Workers, QosTiers], Dispatch]


@dataclass(frozen=True, slots=True)
class Direct:
    workers: Workers
    waiting: int = 0

    def turn_in_s(self, priority: int, now_s: float) -> float:
        return 0.0

    def place(
        self, request: Request, demand: Demand, admitted: Admitted, now_s: float
    ) -> list[Command]:
        request.place(admitted, now_s)
        self.workers.book(demand, admitted, now_s)
        return [orders.ask(request.spec, admitted, request.within_s(now_s))]

    def reserved(self, request: Request, held_tokens: int, now_s: float) -> list[Command]:
        assert request.placed is not None
        within_s = request.within_s(now_s)
        return orders.begin(request, request.placed.candidate, held_tokens, within_s)

    def forget(self, request: Request) -> None:
        return

    def stranded(self, deciding: Deciding, now_s: float) -> list[Request]:
        return []

    def give(self, deciding: Deciding, now_s: float) -> list[Command]:
        return []

    def validate(self) -> None:
        return


def open_direct(workers: Workers, tiers: QosTiers) -> Direct:
    return Direct(workers)
