"""When an admitted prompt goes to a prefill worker, and to which. Pure; part of a router's core.

`Direct` sends it to the worker that it was placed with, as soon as its decode worker has taken it.
`router.core.shared_queue` keeps it at the router until a prefill worker is about to be free.

What the router tells the workers of a request. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from kvrelay.messages import Abort, Generate, Prefill, Preload, Reserve, Stop, WorkerHello
from kvrelay.qos import QosTiers
from kvrelay.types import Incarnation, RequestSpec, Role
from router.core.decision import Deciding
from router.core.events import Command, Send
from router.core.policy.admission import Admitted
from router.core.request import Request
from router.core.state.candidate import Candidate
from router.core.state.demand import Demand
from router.core.state.story import Moment
from router.core.state.worker_view import WorkerView
from router.core.workers import Workers


def ask(spec: RequestSpec, admitted: Admitted, within_s: float | None) -> Send:
    """Will the decode worker take it? If it prefills too, it begins at once; so does whoever is to
    compute a prompt of which no token is wanted."""
    candidate = admitted.candidate
    decode = candidate.decode.incarnation
    if not spec.sampling.max_tokens:
        alone = Prefill(spec=spec, target_addresses=(), target=None, within_s=within_s)
        return Send(worker=decode, message=alone)
    if candidate.prefill is None:
        return Send(worker=decode, message=Generate(spec=spec, within_s=within_s))
    return reserve(spec, candidate.decode, candidate.prefill.incarnation, admitted.counted)


def reserve(
    spec: RequestSpec, decode: WorkerView, source: Incarnation | None, counted: int | None = None
) -> Send:
    message = Reserve(spec=spec, source=source, counted=counted)
    return Send(worker=decode.incarnation, message=message)


def begin(
    request: Request, candidate: Candidate, held_tokens: int, within_s: float | None
) -> list[Command]:
    """The decode worker has taken it, and holds the KV of the first `held_tokens`. Choices that
    ended in an earlier attempt need no decoding in this one."""
    target = candidate.decode.hello
    stops: list[Command] = [
        stop(request, target.incarnation, order.choice, order.next_index)
        for order in request.choices
        if order.finished
    ]
    if candidate.prefill is None:
        return stops
    prefill = Prefill(
        spec=request.spec,
        target_addresses=target.transfer_addresses,
        target=target.incarnation,
        held_tokens=held_tokens,
        prefix_source=candidate.source,
        within_s=within_s,
    )
    return [*stops, Send(worker=candidate.prefill.incarnation, message=prefill)]


def stop(request: Request, decode: Incarnation, choice: int, valid_tokens: int) -> Send:
    message = Stop(key=request.key, choice=choice, valid_tokens=valid_tokens)
    return Send(worker=decode, message=message)


def preload(worker: WorkerHello, specs: Iterable[RequestSpec]) -> list[Command]:
    """What every worker that prefills is to have, as soon as it joins."""
    if worker.role is Role.DECODE:
        return []
    return [Send(worker=worker.incarnation, message=Preload(spec=spec)) for spec in specs]


def abort(request: Request) -> list[Send]:
    message = Abort(key=request.key)
    return [Send(worker=leg, message=message) for leg in request.legs]


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
        request.story.note(Moment.ASKED, now_s, request.worker_names)
        self.workers.book(demand, admitted, now_s)
        return [ask(request.spec, admitted, request.within_s(now_s))]

    def reserved(self, request: Request, held_tokens: int, now_s: float) -> list[Command]:
        assert request.placed is not None
        within_s = request.within_s(now_s)
        if request.prefill_worker is not None:
            request.story.note(Moment.SENT_TO_PREFILL, now_s, request.worker_names)
        return begin(request, request.placed.candidate, held_tokens, within_s)

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
