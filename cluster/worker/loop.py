"""The loop of a worker: receive, decide, keep the device busy, tell. One thread owns all state.

Both schedulers live here over one set of block tables; the role only tells routers what to send.
The simulator drives the same loop on a clock of its own, without the inbox.

Carries out what a worker's schedulers order: tells routers and peers, has KV moved.
"""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol, get_args

from cluster.process.trace import NO_TRACE, Trace
from cluster.worker.events import (
    Close,
    Crashed,
    FromRouter,
    Incoming,
    RouterJoined,
    RouterLost,
    RouterStream,
    RunOnLoop,
    Stepped,
)
from cluster.worker.pool.news import PoolNews
from cluster.worker.reports import BlockReports, Totals, count
from cluster.worker.streams import Preloads, RouterStreams
from cluster.worker.turns import PullTurns, StepDevice, StepTurns
from decode_worker.scheduler import DecodeScheduler
from engine.core.correction import StepPace
from engine.core.step import Command, Emit, Move, RunStep, StepDone, Tick
from kvpool.core.fetch.openings import Openings
from kvpool.core.fetch.pool_fetch import Restored
from kvpool.core.transfer.commands import (
    FromPeer,
    LayersWritten,
    LinkMeasured,
    PeerLost,
    PieceFetched,
    SendPeer,
    SlabReplaced,
    SlabScattered,
    SlabWritten,
)
from kvpool.core.transfer.messages import TO_PREFILL, BlocksDigested, Commit, PeerHello
from kvpool.core.transfer.pull import BlocksPulled, PullBlocks, PullMessage
from kvrelay.errors import RefusalReason
from kvrelay.messages import (
    Abort,
    Counters,
    Generate,
    LinkState,
    Prefill,
    Preload,
    Released,
    RequestFailed,
    Reserve,
    ReserveRefused,
    Stop,
    ToWorker,
    WorkerEvent,
)
from kvrelay.types import RequestKey
from prefill_worker.scheduler import PrefillScheduler

if TYPE_CHECKING:
    from cluster.worker.pool.turns import PoolOutcome, PoolTurns


log = logging.getLogger(__name__)


_LAST = (Released, ReserveRefused)
"""Of a request at this worker."""

MoveJob = Move | PullBlocks


class Links(Protocol):
    """To peers."""

    def send(self, command: SendPeer) -> None: ...

    def states(self) -> tuple[LinkState, ...]: ...


class Moves(Protocol):
    """Moves KV, in order; the outcome of each job comes back."""

    def put(self, job: MoveJob) -> None: ...


class Outlet:
    """`attach` comes before anything is ordered."""

    def __init__(
        self, streams: RouterStreams, preloads: Preloads, clock: Callable[[], float]
    ) -> None:
        self._streams = streams
        self._preloads = preloads
        self._now = clock

    def attach(self, links: Links, mover: Moves) -> None:
        self._links = links
        self._mover = mover

    def execute(self, commands: Iterable[Command | PullBlocks]) -> None:
        for command in commands:
            match command:
                case Emit(events=events):
                    self._emit(events)
                case SendPeer():
                    self._links.send(command)
                case RunStep():
                    raise AssertionError("a step that was not offered")
                case _:
                    self._mover.put(command)

    def _emit(self, events: Iterable[WorkerEvent]) -> None:
        for event in events:
            self._streams.tell(event)
            if isinstance(event, RequestFailed):
                request_id = {"request_id": event.key.request_id}
                log.warning(
                    "a request failed: %s: %s", event.reason, event.message, extra=request_id
                )
            if isinstance(event, _LAST):
                self._streams.end(event.key)
                self._preloads.ended(event, self._now())


TICK_S = 0.5
_TO_PREFILL = frozenset(TO_PREFILL)
_OF_PULLS = frozenset(get_args(PullMessage))


class WorkerLoop:
    def __init__(
        self,
        device: StepDevice,
        openings: Openings,
        prefill: PrefillScheduler,
        decode: DecodeScheduler,
        inbox: queue.SimpleQueue[Incoming],
        *,
        max_model_len: int,
        pace: StepPace,
        most_steps: int = 1,
        launches_ahead: bool = False,
        clock: Callable[[], float] | None = None,
        trace: Trace = NO_TRACE,
    ) -> None:
        """`most_steps` and `launches_ahead` are those of StepTurns. `clock` None: the machine's."""
        self._now = clock or time.monotonic
        self._pace = pace
        self._openings = openings
        self.prefill = prefill
        self.decode = decode
        self.inbox = inbox
        self.draining = False
        self._trace = trace
        self._preloads = Preloads(openings.tables, max_model_len)
        self._pool: PoolTurns | None = None
        self._pulls = PullTurns(openings, self._now)
        self.reports = BlockReports(openings.tables.cache)
        self._streams = RouterStreams(self.reports, self.counters)
        self._outlet = Outlet(self._streams, self._preloads, self._now)
        self._next_tick_s = 0.0
        self._closing = False
        self._turns = StepTurns(
            device,
            decode,
            prefill,
            pace,
            self._now,
            self._outlet.execute,
            most_steps=most_steps,
            launches_ahead=launches_ahead,
        )
        self._totals = Totals()
        self._link_states: Callable[[], tuple[LinkState, ...]] = tuple

    def attach(self, links: Links, mover: Moves, pool: PoolTurns | None) -> None:
        self._link_states = links.states
        self._outlet.attach(links, mover)
        self._pool = pool

    @property
    def idle(self) -> bool:
        return self._streams.idle

    def drain(self) -> None:
        """Finish what is here and take nothing new; all routers hear of it with this turn."""
        self.draining = True
        self._streams.tell_all()

    def run(self) -> None:
        """Until Close; raises what a thread beside it raised."""
        while not self._closing:
            self.turn()

    def turn(self) -> None:
        """Wait for something to happen, settle all that has, keep the device busy, tell."""
        self._receive()
        self.act()

    def act(self) -> None:
        """Keep the device busy, tell."""
        self._turns.start()
        while self._pool is not None and self._pooled(self._pool.turn()):
            self._turns.start()
        self._turns.start_behind()
        if self._turns.stepping is None:
            self._pace.idle()
        self._outlet.execute(self._pulls.take_commands())
        self._streams.flush()

    # --- receive --------------------------------------------------------------------------------

    def _receive(self) -> None:
        timeout_s = max(0.0, self._next_tick_s - self._now())
        with suppress(queue.Empty):
            self.settle(self.inbox.get(timeout=timeout_s))
        while not self.inbox.empty():
            self.settle(self.inbox.get_nowait())
        if self._now() >= self._next_tick_s:
            self.tick()

    def tick(self) -> None:
        self._next_tick_s = self._now() + TICK_S
        self._both(Tick())
        self._totals.orphaned_blocks = self._openings.tables.orphaned()
        if self._pool is not None:
            self._pooled(self._pool.tick())
        self._pooled(self._pulls.tick())
        self._streams.tick()

    def settle(self, event: Incoming) -> None:
        match event:
            case FromPeer():
                self._from_peer(event)
            case Stepped(done=done):
                self._stepped(done)
            case FromRouter(stream=stream, message=message):
                self._from_router(stream, message)
            case PieceFetched() | SlabScattered() | SlabReplaced():
                self._outlet.execute(self.decode.handle(event, self._now()))
            case BlocksDigested(holder=holder):
                scheduler = self.prefill if holder.side == "prefill" else self.decode
                self._outlet.execute(scheduler.handle(event, self._now()))
            case SlabWritten():
                self._outlet.execute(self.prefill.handle(event, self._now()))
            case BlocksPulled():
                self._pooled(self._pulls.handle(event))
            case PeerLost():
                self._both(event)
                self._pooled(self._pulls.handle(event))
            case LinkMeasured(peer=peer, name=name):
                self._outlet.execute(self.decode.handle(event, self._now()))
                if choice := self.decode.reservations.peers.choice(peer).reason:
                    log.info("KV from %s: %s", name, choice)
            case LayersWritten():
                if self._turns.stepping is self.prefill:
                    self._outlet.execute(self.prefill.handle(event, self._now()))
            case _ if isinstance(event, PoolNews):
                self._from_pool(event)
            case RouterJoined(stream=stream):
                self._streams.join(stream)
            case RouterLost(stream=stream):
                for key in self._streams.leave(stream):
                    if key not in self._preloads:
                        self._both(Abort(key=key))
            case RunOnLoop(function=function):
                function()
            case Crashed(error=error):
                raise error
            case Close():
                self._closing = True

    def _from_peer(self, event: FromPeer) -> None:
        kind = type(event.message)
        if kind in _TO_PREFILL:
            self._outlet.execute(self.prefill.handle(event, self._now()))
        elif kind is PeerHello:
            self._both(event)
            self._pooled(self._pulls.handle(event))
        elif kind in _OF_PULLS:
            self._pooled(self._pulls.handle(event))
        elif isinstance(event.message, Commit):
            with self._trace.span("commit", request=event.message.key.request_id):
                self._outlet.execute(self.decode.handle(event, self._now()))
        else:
            self._outlet.execute(self.decode.handle(event, self._now()))

    def _pooled(self, outcomes: Iterable[PoolOutcome]) -> bool:
        """Whether a step may be possible now that was not."""
        for event in outcomes:
            if isinstance(event, Restored) and event.holder.side != "prefill":
                self._outlet.execute(self.decode.handle(event, self._now()))
            else:
                self._outlet.execute(self.prefill.handle(event, self._now()))
        return any(isinstance(event, Restored) for event in outcomes)

    def _from_pool(self, event: PoolNews) -> None:
        assert self._pool is not None, "there is no pool"
        self._pooled(self._pool.handle(event))

    def _from_router(self, stream: RouterStream, message: ToWorker) -> None:
        match message:
            case Preload(spec=spec):
                if not self.draining and self._preloads.begin(spec):
                    self._start(stream, Generate(spec=spec))
            case Reserve(spec=spec) | Generate(spec=spec) | Prefill(spec=spec):
                if spec.key in self._streams:
                    self._refuse(stream, spec.key, "duplicate_request")
                elif self.draining:
                    self._refuse(stream, spec.key, RefusalReason.DRAINING)
                else:
                    self._start(stream, message)
            case Stop(key=key) if self._streams.is_from(stream, key):
                self._outlet.execute(self.decode.handle(message, self._now()))
            case Abort(key=key) if self._streams.is_from(stream, key):
                self._both(message)
            case Stop() | Abort():
                pass  # nothing of it is held for this router

    def _start(self, stream: RouterStream, message: Reserve | Generate | Prefill) -> None:
        self._streams.begin(stream, message.spec.key)
        if isinstance(message, Prefill):
            self._outlet.execute(self.prefill.handle(message, self._now()))
        else:
            self._outlet.execute(self.decode.handle(message, self._now()))

    def _refuse(self, stream: RouterStream, key: RequestKey, reason: str) -> None:
        self._streams.answer(stream, ReserveRefused(key=key, at_s=self._now(), reason=reason))

    def _both(self, event: Abort | FromPeer | PeerLost | Tick) -> None:
        self._outlet.execute(self.prefill.handle(event, self._now()))
        self._outlet.execute(self.decode.handle(event, self._now()))

    # --- run ------------------------------------------------------------------------------------

    def _stepped(self, done: StepDone) -> None:
        self._totals.steps += 1
        self._totals.busy_s += done.seconds
        self._outlet.execute(self._turns.ended(done))

    def counters(self) -> Counters:
        links = self._link_states()
        parts = (self._openings, self.prefill, self.decode, self._totals, self._pace)
        return count(*parts, links, self.draining)
