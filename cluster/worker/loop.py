"""The loop of a worker: a queue, a clock, and an executor of what its core decides.

One thread runs the loop and owns the core. Everything else reaches it through the inbox.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, NoReturn, Protocol, get_args

from cluster.core.worker.core import WorkerCore
from cluster.core.worker.events import (
    CoreEvent,
    DropPeer,
    FromRouter,
    MoveJob,
    SendToRouter,
    WorkerCommand,
)
from cluster.process.trace import NO_TRACE, Trace
from cluster.worker.events import Close, Crashed, Incoming, RunOnLoop
from engine.core.step import RunStep, StepDone
from kvpool.core.fetch.client_events import NodeOrder
from kvpool.core.transfer.commands import DropLink, FromPeer, SendPeer
from kvpool.core.transfer.messages import Commit
from kvrelay.counters import LinkState
from kvrelay.messages import Generate, Prefill, Reserve

TICK_S = 0.5


def _ignore(grammar: str) -> None:
    pass


class StepDevice(Protocol):
    """Runs a step; its end comes back as StepDone. It gets another step while one runs only where
    the core was told that the device launches ahead."""

    def submit(self, step: RunStep) -> None: ...


class Links(Protocol):
    """To peers. Nothing here waits for one."""

    def send(self, command: SendPeer) -> None: ...

    def part(self, command: DropPeer) -> None: ...

    def drop(self, command: DropLink) -> None: ...

    def states(self) -> tuple[LinkState, ...]: ...


class MoveQueue(Protocol):
    """Moves KV, in order; the outcome of each job comes back."""

    def put(self, job: MoveJob) -> None: ...


class Pools(Protocol):
    """To the pool nodes of this host and of others; what comes of it comes back as events."""

    def execute(self, order: NodeOrder) -> None: ...


class WorkerLoop:
    def __init__(
        self,
        core: WorkerCore,
        device: StepDevice,
        links: Links,
        mover: MoveQueue,
        pools: Pools | None,
        inbox: queue.SimpleQueue[Incoming],
        *,
        clock: Callable[[], float] = time.monotonic,
        trace: Trace = NO_TRACE,
        prepare_grammar: Callable[[str], object] = _ignore,
    ) -> None:
        """`prepare_grammar` begins to compile one, on a thread, before a step needs it."""
        self.core = core
        self.inbox = inbox
        self._links = links
        self._now = clock
        self._trace = trace
        self._prepare_grammar = prepare_grammar
        self._next_tick_s = 0.0
        self._closing = False
        self.handled: CoreEvent | None = None
        """The event that the core is being told of: it may be why the worker dies."""
        self._move = mover.put
        self._executors: dict[type, Callable[[Any], None]] = {
            RunStep: device.submit,
            SendPeer: links.send,
            DropPeer: links.part,
            DropLink: links.drop,
            SendToRouter: _tell,
        }
        self._own_events: dict[type, Callable[[Any], None]] = {
            FromRouter: self._asked,
            RunOnLoop: lambda event: event.function(),
            Crashed: _die,
            Close: self._close,
        }
        if pools is not None:
            self._executors |= dict.fromkeys(get_args(NodeOrder), pools.execute)
        if trace is not NO_TRACE:
            self._own_events |= {FromPeer: self._traced, StepDone: self._stepped}

    def run(self) -> None:
        """Until Close; raises what a thread beside it raised."""
        while not self._closing:
            self.turn()

    def turn(self) -> None:
        """Wait for something to happen, settle all that has, and act on it."""
        timeout_s = max(0.0, self._next_tick_s - self._now())
        first: Incoming | None = None
        with suppress(queue.Empty):
            first = self.inbox.get(timeout=timeout_s)
        begun_s = self._now()
        if first is not None:
            self._settle(first)
        while not self.inbox.empty():
            self._settle(self.inbox.get_nowait())
        if self._now() >= self._next_tick_s:
            self._tick()
        self._act()
        if self._trace is not NO_TRACE:
            self._trace.took("turn", begun_s)

    def _settle(self, event: Incoming) -> None:
        own = self._own_events.get(type(event))
        if own is None:
            self._tell_core(event)  # type: ignore[arg-type]
        else:
            own(event)

    def _tell_core(self, event: CoreEvent) -> None:
        self.handled = event
        self._execute(self.core.handle(event, self._now()))
        self.handled = None

    def _tick(self) -> None:
        now_s = self._now()
        self._next_tick_s = now_s + TICK_S
        self._execute(self.core.tick(self._links.states(), now_s))

    def _act(self) -> None:
        """Keep the device busy, ask pools and peers, and tell routers."""
        self._execute(self.core.proceed(self._now()))
        if self.core.has_news:
            self._execute(self.core.report(self._links.states(), self._now()))

    def _execute(self, commands: Iterable[WorkerCommand]) -> None:
        for command in commands:
            self._executors.get(type(command), self._move)(command)

    def _asked(self, event: FromRouter) -> None:
        if isinstance(event.message, Reserve | Generate | Prefill):
            grammar = event.message.spec.sampling.grammar
            if grammar:
                self._prepare_grammar(grammar)
        self._tell_core(event)

    def _traced(self, event: FromPeer) -> None:
        if not isinstance(event.message, Commit):
            self._tell_core(event)
            return
        with self._trace.span("commit", request=event.message.key.request_id):
            self._tell_core(event)

    def _stepped(self, event: StepDone) -> None:
        """With what its worker's profile says of it: the simulator replays the ratio."""
        work, predicted_s = self.core.pace.work, self.core.pace.predicted_s
        if work is not None and predicted_s:
            self._trace.took(
                "stepped",
                self._now() - event.seconds,
                kind="prefill" if work.prefill_tokens else "decode",
                steps=event.steps,
                predicted_ns=round(1e9 * predicted_s * event.steps),
            )
        self._tell_core(event)

    def _close(self, _: Close) -> None:
        self._closing = True


def _tell(command: SendToRouter) -> None:
    command.stream.send(command.events, command.counters, command.blocks)


def _die(event: Crashed) -> NoReturn:
    raise event.error
