"""The messages that the router sends to workers for a request. Pure; they change nothing."""

from __future__ import annotations

from collections.abc import Container, Iterable

from kvrelay.messages import Abort, Generate, Prefill, Preload, Reserve, Stop, WorkerHello
from kvrelay.types import Incarnation, RequestSpec, Role
from router.core.events import Command, Send
from router.core.policy.admission import Admitted
from router.core.request import Request
from router.core.state.candidate import Candidate
from router.core.state.worker_view import WorkerView


def ask(spec: RequestSpec, admitted: Admitted, within_s: float | None) -> Send:
    """Asks the decode worker for a slot. A worker that prefills too begins at once, and so does
    the worker that computes a prompt of which no token is wanted."""
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
    """Starts the prompt. The decode worker holds the KV of its first `held_tokens`. Choices that
    ended in an earlier attempt are not decoded again."""
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
    """Every worker that prefills computes these prompts as soon as it joins."""
    if worker.role is Role.DECODE:
        return []
    return [Send(worker=worker.incarnation, message=Preload(spec=spec)) for spec in specs]


def abort(request: Request, connected: Container[Incarnation]) -> list[Command]:
    """Stops its attempt at those of its workers that are connected."""
    message = Abort(key=request.key)
    return [Send(worker=leg, message=message) for leg in request.legs if leg in connected]
