"""What one worker decides: events go in, and commands come out as a list.

Both schedulers live here, over one set of block tables. The worker's role only tells routers what
to send, so it can change at any time. A turn of a worker is: `handle` each event, `proceed`, and
`report` if there is news.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any, get_args

from cluster.core.worker.events import (
    CoreEvent,
    DropPeer,
    FromRouter,
    RouterJoined,
    RouterLost,
    WorkerCommand,
)
from cluster.core.worker.prefixes import PrefixExchange, PrefixOutcome
from cluster.core.worker.reports import BlockReports, Totals, count
from cluster.core.worker.routers import Preloads, RouterQueues
from cluster.core.worker.steps import StepTurns
from decode_worker.scheduler import DecodeScheduler
from engine.core.correction import StepPace
from engine.core.step import Command, Emit, StepDone, Tick
from kvpool.core.blocks.tables import BlockTables
from kvpool.core.fetch.client_events import NodeEvent
from kvpool.core.fetch.fetches import Restored
from kvpool.core.fetch.peer_pull import PullEvent
from kvpool.core.fetch.prefix_lookup import PrefixLookup
from kvpool.core.transfer.commands import (
    FromPeer,
    LayersWritten,
    LinkMeasured,
    PeerLost,
    PieceFetched,
    SlabReplaced,
    SlabScattered,
    SlabWritten,
)
from kvpool.core.transfer.copy_watch import CopyEnd, CopyWatch, PeerCopy
from kvpool.core.transfer.messages import TO_PREFILL, BlocksDigested, PeerHello, PeerMessage
from kvpool.core.transfer.pull import BlocksPulled, PullMessage
from kvrelay.counters import Counters, LinkState
from kvrelay.errors import FailureReason, RefusalReason
from kvrelay.messages import (
    Abort,
    Generate,
    Prefill,
    Preload,
    Released,
    RequestFailed,
    Reserve,
    ReserveRefused,
    RouterLeaving,
    Stop,
    Suspect,
    Tokens,
    WorkerEvent,
)
from kvrelay.types import RequestKey, Role
from prefill_worker.scheduler import PrefillScheduler

log = logging.getLogger(__name__)

LAST_EVENTS = (Released, ReserveRefused)
"""After one of these the worker holds nothing for the request."""
_COPIES, _COPY_ENDS = get_args(PeerCopy), get_args(CopyEnd)
_WITH_MESSAGE = (FromPeer, FromRouter)
"""Handlers of these are chosen by the type of their message."""

Handler = Callable[[Any, float], list[Any]]


class WorkerCore:
    """Complete as `build_worker_core` returns it."""

    def __init__(
        self,
        lookup: PrefixLookup,
        prefill: PrefillScheduler,
        decode: DecodeScheduler,
        pace: StepPace,
        *,
        max_model_len: int,
        role: Role,
        chunk_tokens: Callable[[Role], int],
        most_steps: int = 1,
        launches_ahead: bool = False,
        prompt_steps: int = 1,
    ) -> None:
        """`chunk_tokens`: of a prompt beside running requests, by role. `most_steps`,
        `launches_ahead` and `prompt_steps` are those of StepTurns."""
        self.lookup = lookup
        self.prefill = prefill
        self.decode = decode
        self.pace = pace
        self.draining = False
        self.empty = False
        """It drains, has no request, and has stored what is worth keeping: it may end."""
        self.role, self.role_epoch = role, 0
        self._chunk_tokens = chunk_tokens
        self.reports = BlockReports(lookup.tables.device)
        self.prefixes = PrefixExchange(lookup)
        self.copies = CopyWatch()
        self._steps = StepTurns(
            decode,
            prefill,
            pace,
            most_steps=most_steps,
            launches_ahead=launches_ahead,
            prompt_steps=prompt_steps,
        )
        self._routers = RouterQueues(self.reports)
        self._preloads = Preloads(lookup.tables, max_model_len)
        self._totals = Totals()
        self._handlers = self._all_handlers()

    def _all_handlers(self) -> dict[type, Handler]:
        """# event, or the message in it |-> who hears it"""
        prefill, decode = self.prefill.handle, self.decode.handle
        handlers: dict[type, Handler] = dict.fromkeys(get_args(PeerMessage), decode)
        handlers |= dict.fromkeys(TO_PREFILL, prefill)
        handlers |= dict.fromkeys(get_args(PullMessage), self._pulled)
        handlers |= dict.fromkeys(get_args(NodeEvent), self._pool_node)
        handlers |= dict.fromkeys((Reserve, Generate, Prefill), self._asked)
        handlers |= dict.fromkeys((PieceFetched, SlabScattered, SlabReplaced), decode)
        return handlers | {
            Preload: self._preload,
            Stop: self._stop,
            Abort: self._abort,
            Suspect: self._suspect,
            RouterJoined: self._router_joined,
            RouterLost: self._router_lost,
            RouterLeaving: self._router_leaves,
            PeerHello: self._peer_came_or_went,
            PeerLost: self._peer_came_or_went,
            LinkMeasured: self._link_measured,
            SlabWritten: prefill,
            BlocksPulled: self._pulled,
            BlocksDigested: self._digested,
            LayersWritten: prefill,
            StepDone: self._step_done,
        }

    @property
    def tables(self) -> BlockTables:
        return self.lookup.tables

    @property
    def idle(self) -> bool:
        return self._routers.idle

    @property
    def stepping(self) -> DecodeScheduler | PrefillScheduler | None:
        """Whose step the device runs."""
        return self._steps.stepping

    def take_role(self, role: Role) -> None:
        """All routers hear of it with this turn. What came under the old one is served: both
        schedulers are there."""
        if role is not self.role:
            self.role, self.role_epoch = role, self.role_epoch + 1
            self.decode.batch.chunk_tokens = self._chunk_tokens(role)
            self._routers.report_all()

    def drain(self) -> None:
        """Take nothing new. All routers hear of it with this turn, and lead away what is here. What
        is preloaded ends: nobody would be served from it. The pool gets what is new here."""
        self.draining = True
        self.prefixes.store_at_once()
        self._routers.report_all()

    # --- a turn ---------------------------------------------------------------------------------

    def handle(self, event: CoreEvent, now_s: float) -> list[WorkerCommand]:
        kind: type = type(event)
        if kind in _WITH_MESSAGE:
            kind = type(event.message)  # type: ignore[union-attr]
        elif kind in _COPY_ENDS:
            self.copies.end(event, now_s)  # type: ignore[arg-type]
        commands = self._handlers[kind](event, now_s)
        return self._without_events(commands, now_s) if commands else commands

    def proceed(self, now_s: float) -> list[WorkerCommand]:
        """Keep the device busy, and ask pools and peers."""
        steps, prefixes = self._steps, self.prefixes
        commands: list[Any] = []
        if self.draining and self._preloads.running:
            for key in self._preloads.give_up():
                commands += self._both(Abort(key=key), now_s)
        if self.decode.reservations.awaiting_blocks:
            commands += self.decode.settle_reservations(now_s)  # offers and pulls free blocks too
        if steps.stepping is None:
            commands += steps.start(now_s)
        if prefixes.pool is not None:
            commands += self._ask_pools(now_s)
        if steps.looks_ahead:
            commands += steps.start_ahead(now_s)
        if steps.stepping is None:
            self.pace.idle()
        if prefixes.outbox or (prefixes.peers is not None and prefixes.peers.outbox):
            commands += prefixes.take_commands()
        kept = self._without_events(commands, now_s) if commands else commands
        self.empty = self.draining and self.idle and prefixes.stored
        return kept

    def _ask_pools(self, now_s: float) -> list[Command]:
        """An answer at once may give the device a step."""
        commands: list[Command] = []
        is_busy = self._steps.stepping is not None
        while outcomes := self.prefixes.ask_pools(now_s, is_busy=is_busy):
            commands += self._restored(outcomes, now_s)
            if self._steps.stepping is None:
                commands += self._steps.start(now_s)
        return commands

    def tick(self, links: tuple[LinkState, ...], now_s: float) -> list[WorkerCommand]:
        """Time has passed: leases may have ended, and copies taken too long. Every router hears
        that the worker lives."""
        commands: list[Any] = self._both(Tick(), now_s)
        self.pace.rest(now_s)
        commands += self.copies.overdue(self.decode.reservations.peers.predicted_s, now_s)
        self._totals.orphaned_blocks = self.tables.orphaned()
        commands += self._restored(self.prefixes.tick(now_s), now_s)
        kept = self._without_events(commands, now_s)
        return [*kept, *self._routers.heartbeats(self.counters(links))]

    @property
    def has_news(self) -> bool:
        """Routers have something to hear."""
        return self._routers.changed or bool(self.tables.device.changes)

    def report(self, links: tuple[LinkState, ...], now_s: float) -> list[WorkerCommand]:
        """What each router hears of this turn. `links` are those to peers."""
        return [*self._routers.flush(self.counters(links), now_s)]

    def counters(self, links: tuple[LinkState, ...]) -> Counters:
        parts = (self.lookup, self.prefill, self.decode, self._totals, self.pace)
        found = count(*parts, links, self.draining, self._routers.count)
        found.role, found.role_epoch = self.role, self.role_epoch
        return found

    def _without_events(self, commands: Iterable[Any], now_s: float) -> list[WorkerCommand]:
        """Events for routers wait for `report`."""
        kept: list[WorkerCommand] = []
        for command in commands:
            if type(command) is Emit:
                self._emit(command.events, now_s)
                continue
            if type(command) in _COPIES:
                self.copies.begin(command, now_s)
            kept.append(command)
        return kept

    def _emit(self, events: tuple[WorkerEvent, ...], now_s: float) -> None:
        self._routers.add(events)
        for event in [one for one in events if type(one) is not Tokens]:
            if isinstance(event, LAST_EVENTS):
                self._routers.end(event.key)
                self._preloads.ended(event, now_s)
            elif isinstance(event, RequestFailed):
                _log_failure(event)

    # --- routers --------------------------------------------------------------------------------

    def _router_joined(self, event: RouterJoined, now_s: float) -> list[Command]:
        self._routers.join(event.stream)
        return []

    def _router_lost(self, event: RouterLost, now_s: float) -> list[Command]:
        """Its requests end, but for what is preloaded."""
        keys = [key for key in self._routers.leave(event.stream) if key not in self._preloads]
        return [command for key in keys for command in self._both(Abort(key=key), now_s)]

    def _router_leaves(self, event: FromRouter, now_s: float) -> list[Command]:
        self._routers.will_leave(event.stream)
        return []

    def _asked(self, event: FromRouter, now_s: float) -> list[Command]:
        message = event.message
        assert isinstance(message, Reserve | Generate | Prefill)
        key = message.spec.key
        if key in self._routers:
            return self._refuse(event, key, "duplicate_request", now_s)
        leaves = message.leaves if isinstance(message, Prefill) else None
        if self.draining and leaves is None:
            return self._refuse(event, key, RefusalReason.DRAINING, now_s)
        self._routers.begin(event.stream, key)
        if not isinstance(message, Prefill):
            return self.decode.handle(message, now_s)
        ended = [] if leaves is None else self._end(event, key._replace(attempt=leaves), now_s)
        return [*ended, *self.prefill.handle(message, now_s)]

    def _end(self, event: FromRouter, key: RequestKey, now_s: float) -> list[Command]:
        """Only the router that a request came from may."""
        if not self._routers.is_from(event.stream, key):
            return []
        return self._both(Abort(key=key), now_s)

    def _refuse(
        self, event: FromRouter, key: RequestKey, reason: str, now_s: float
    ) -> list[Command]:
        refused = ReserveRefused(key=key, at_s=now_s, reason=reason)
        self._routers.answer(event.stream, refused)
        return []

    def _preload(self, event: FromRouter, now_s: float) -> list[Command]:
        assert isinstance(event.message, Preload)
        spec = event.message.spec
        if self.draining or not self._preloads.begin(spec):
            return []
        self._routers.begin(event.stream, spec.key)
        return self.decode.handle(Generate(spec=spec), now_s)

    def _stop(self, event: FromRouter, now_s: float) -> list[Command]:
        """Only the router that a request came from may stop it."""
        assert isinstance(event.message, Stop)
        if not self._routers.is_from(event.stream, event.message.key):
            return []
        return self.decode.handle(event.message, now_s)

    def _abort(self, event: FromRouter, now_s: float) -> list[Command]:
        assert isinstance(event.message, Abort)
        return self._end(event, event.message.key, now_s)

    def _suspect(self, event: FromRouter, now_s: float) -> list[WorkerCommand]:
        """Without a connection to it no copy waits for it, and PeerLost takes its slabs back."""
        assert isinstance(event.message, Suspect)
        peer = event.message.incarnation
        return [DropPeer(peer, f"a router has heard nothing from worker {peer}")]

    # --- peers, pools and moves -----------------------------------------------------------------

    def _peer_came_or_went(self, event: FromPeer | PeerLost, now_s: float) -> list[Command]:
        if isinstance(event, PeerLost):
            self.copies.lost(event.peer)
        return [*self._both(event, now_s), *self._pulled(event, now_s)]

    def _pulled(self, event: PullEvent, now_s: float) -> list[Command]:
        return self._restored(self.prefixes.on_peer(event, now_s), now_s)

    def _pool_node(self, event: NodeEvent, now_s: float) -> list[Command]:
        return self._restored(self.prefixes.on_node(event, now_s), now_s)

    def _restored(self, outcomes: Iterable[PrefixOutcome], now_s: float) -> list[Command]:
        commands: list[Command] = []
        for event in outcomes:
            if isinstance(event, Restored) and event.holder.side != "prefill":
                commands += self.decode.handle(event, now_s)
            else:
                commands += self.prefill.handle(event, now_s)
        return commands

    def _link_measured(self, event: LinkMeasured, now_s: float) -> list[Command]:
        commands = self.decode.handle(event, now_s)
        if choice := self.decode.reservations.peers.choice(event.peer).reason:
            log.info("KV from %s: %s", event.name, choice)
        return commands

    def _digested(self, event: BlocksDigested, now_s: float) -> list[Command]:
        if event.holder.side == "prefill":
            return self.prefill.handle(event, now_s)
        return self.decode.handle(event, now_s)

    def _both(self, event: Abort | FromPeer | PeerLost | Tick, now_s: float) -> list[Command]:
        return [*self.prefill.handle(event, now_s), *self.decode.handle(event, now_s)]

    # --- steps ----------------------------------------------------------------------------------

    def _step_done(self, done: StepDone, now_s: float) -> list[Command]:
        self._totals.steps += 1
        self._totals.busy_s += done.seconds
        return self._steps.ended(done, now_s)

    def validate(self) -> None:
        """The conservation laws."""
        self.copies.validate()
        self.prefixes.validate()
        self.prefill.validate()
        self.decode.validate()


def _log_failure(failed: RequestFailed) -> None:
    """Where a client has gone away, its decode worker cancels the handoff: nothing is wrong."""
    cancelled = failed.reason == FailureReason.TRANSFER_CANCELLED
    level = logging.DEBUG if cancelled else logging.WARNING
    request_id = {"request_id": failed.key.request_id}
    log.log(level, "a request failed: %s: %s", failed.reason, failed.message, extra=request_id)
