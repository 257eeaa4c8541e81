"""What the router tells the workers of a request. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from kvrelay.messages import (
    Abort,
    Generate,
    Prefill,
    Preload,
    Reserve,
    Stop,
    WorkerHello,
)
from kvrelay.types import Incarnation, RequestSpec, Role
from router.admitting.policy import Admitted
from router.candidate import Candidate
from router.events import Command, Send
from router.request import Request
from router.view import WorkerView


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
