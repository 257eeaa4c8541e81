"""What the router's core hears, what it wants done, and what it tells workers. Pure."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping

from kvrelay.counters import Counters
from kvrelay.messages import (
    Abort,
    BlockChanges,
    Generate,
    PoolUpdate,
    Prefill,
    Preload,
    Reserve,
    Stop,
    ToWorker,
    WorkerEvent,
    WorkerHello,
)
from kvrelay.types import Incarnation, RequestSpec, Role, value
from router.core.faults.poison import Ending
from router.core.policy.admission import Admitted
from router.core.promises.refusal import Refusal
from router.core.request import Request
from router.core.state.candidate import Candidate
from router.core.state.demand import Demand
from router.core.state.generation import ChoiceTokens, GenerationRequest
from router.core.state.quarantine import Pair
from router.core.state.worker_view import WorkerView


@value
class Submitted:
    request: GenerationRequest


@value
class ChoiceStopped:
    request_id: str
    choice: int
    valid_tokens: int


@value
class Aborted:
    request_id: str


@value
class DeadlinePassed:
    request_id: str


@value
class WorkerJoined:
    hello: WorkerHello


@value
class WorkerSuspected:
    """It has not reported for a while. Its next report ends the suspicion."""

    incarnation: Incarnation


@value
class WorkerLost:
    """`was_silent`: its process may still live, and write to its peers. `was_rejected`: it said
    what can't be. `asked`: WorkerEnded follows."""

    incarnation: Incarnation
    was_silent: bool = False
    was_rejected: bool = False
    asked: bool = False


@value
class WorkerEnded:
    """How a worker that was lost has ended, as far as somebody knows."""

    incarnation: Incarnation
    ending: Ending


@value
class WorkerSaid:
    incarnation: Incarnation
    events: tuple[WorkerEvent, ...]
    counters: Counters
    blocks: tuple[BlockChanges, ...] = ()


@value
class TimePassed:
    """For those who wait: without any worker there are no reports."""


@value
class PoolNodeSaid:
    update: PoolUpdate


@value
class PoolNodeLost:
    """Its stream has ended."""

    node: Incarnation


Event = (
    Submitted
    | ChoiceStopped
    | Aborted
    | DeadlinePassed
    | WorkerJoined
    | WorkerSuspected
    | WorkerLost
    | WorkerEnded
    | WorkerSaid
    | TimePassed
    | PoolNodeSaid
    | PoolNodeLost
)


# --- commands ---------------------------------------------------------------------------------


@value
class Send:
    worker: Incarnation
    message: ToWorker


@value
class Admit:
    request_id: str


@value
class Refuse:
    """A `refusal` without `retry_after_s` is hopeless."""

    request_id: str
    refusal: Refusal


@value
class Deliver:
    request_id: str
    tokens: tuple[ChoiceTokens, ...]
    done: bool


@value
class Fail:
    request_id: str
    reason: str
    message: str


@value
class PairQuarantined:
    """A handoff failed: other pairs are preferred for so long."""

    pair: Pair
    seconds: float
    reason: str
    message: str


@value
class PairTrusted:
    """A handoff succeeded again."""

    pair: Pair


@value
class LadderStepped:
    """A tier's admission has become tighter, or less tight."""

    tier: str
    step: int
    cause: str


Command = Send | Admit | Refuse | Deliver | Fail | PairQuarantined | PairTrusted | LadderStepped


class Rejected(Exception):
    """An event of a worker can't be taken. `commands` came of those before it: they must be carried
    out, since the core has gone on as if they were."""

    def __init__(self, event: WorkerEvent, cause: Exception, commands: list[Command]) -> None:
        super().__init__(f"{type(event).__name__} of {event.key.request_id}: {cause!r}")
        self.commands = commands


# --- messages to workers --------------------------------------------------------------------------


def prefill(
    request: Request,
    candidate: Candidate,
    held_tokens: int,
    within_s: float | None,
    *,
    leaves: int | None = None,
    since: tuple[int, ...] = (),
) -> list[Command]:
    """Starts the prompt. The decode worker holds the KV of its first `held_tokens`. Choices that
    ended in an earlier attempt are not decoded again."""
    target = candidate.decode.hello
    stops: list[Command] = [
        stop_decoding(request, target.incarnation, order.choice, order.next_index)
        for order in request.choices
        if order.finished
    ]
    if candidate.prefill is None:
        return stops
    message = Prefill(
        spec=request.spec,
        target_addresses=target.transfer_addresses,
        target=target.incarnation,
        held_tokens=held_tokens,
        prefix_source=candidate.source,
        within_s=within_s,
        leaves=leaves,
        since=since,
    )
    return [*stops, Send(worker=candidate.prefill.incarnation, message=message)]


def stop_decoding(request: Request, decode: Incarnation, choice: int, valid_tokens: int) -> Send:
    message = Stop(key=request.key, choice=choice, valid_tokens=valid_tokens)
    return Send(worker=decode, message=message)


def preload(worker: WorkerHello, role: Role, specs: Iterable[RequestSpec]) -> list[Command]:
    """Every worker that prefills computes these prompts as soon as it joins, or prefills."""
    if role is Role.DECODE:
        return []
    return [Send(worker=worker.incarnation, message=Preload(spec=spec)) for spec in specs]


def abort_attempt(request: Request, connected: Container[Incarnation]) -> list[Command]:
    """Stops its attempt at those of its workers that are connected."""
    message = Abort(key=request.key)
    workers = [one for one in request.workers if one in connected]
    return [Send(worker=worker, message=message) for worker in workers]


def stop_idle_decode(
    request: Request, last: Incarnation, connected: Container[Incarnation]
) -> list[Command]:
    """The first token was the last. The prefill worker tells the decode worker, over a connection
    that may break; so the router tells it too."""
    assert request.placed is not None
    decode = request.placed.candidate.decode.incarnation
    if decode == last or decode not in connected:
        return []
    return [Send(worker=decode, message=Abort(key=request.key))]


def ask_for_slot(
    workers: Mapping[Incarnation, WorkerView],
    demand: Demand,
    admitted: Admitted,
    within_s: float | None,
) -> Send:
    """Asks the decode worker for a slot. A worker that prefills too begins at once, and so does
    the worker that computes a prompt of which no token is wanted."""
    spec, candidate = demand.spec, admitted.candidate
    decode = candidate.decode.incarnation
    if not spec.sampling.max_tokens:
        alone = Prefill(spec=spec, target_addresses=(), target=None, within_s=within_s)
        return Send(worker=decode, message=alone)
    if candidate.prefill is None:
        generate = Generate(
            spec=spec,
            prefix_source=candidate.source,
            within_s=within_s,
            displaced=demand.displaced,
        )
        return Send(worker=decode, message=generate)
    return ask_to_reserve(workers, demand, candidate.decode, candidate.prefill, admitted.counted)


def ask_to_reserve(
    workers: Mapping[Incarnation, WorkerView],
    demand: Demand,
    decode: WorkerView,
    prefill: WorkerView | None,
    counted: int | None,
) -> Send:
    message = Reserve(
        spec=demand.spec,
        source=None if prefill is None else prefill.incarnation,
        counted=counted,
        prefix_source=demand.held.handoff_source(workers, prefill, decode),
        displaced=demand.displaced,
    )
    return Send(worker=decode.incarnation, message=message)
