"""Handoffs as a decode worker sees them: from peers' messages to sequences that run. Pure.

reserved -> received -> checked, if it came with a digest -> joins the batch, or failed
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from decode_worker.batch import Batch
from decode_worker.receiver import Receiver
from decode_worker.reservation import Failure
from engine.step import Command, Emit, Tick
from kvpool.canary import BlocksDigested
from kvpool.handoff import (
    Commit,
    PeerHello,
    PieceComputed,
    PiecesAhead,
    RenewLeases,
    SlabFilled,
    TransferCancelled,
)
from kvpool.handoff_events import (
    FromPeer,
    LinkMeasured,
    PeerLost,
    PieceFetched,
    SlabReplaced,
    SlabScattered,
)
from kvrelay.messages import Lifetime, Released, RequestFailed
from kvrelay.types import RequestKey

Moved = PieceFetched | SlabScattered | SlabReplaced | BlocksDigested
Event = FromPeer | PeerLost | LinkMeasured | Moved | Tick


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrivals:
    receiver: Receiver
    batch: Batch

    def handle(self, event: Event, now_s: float) -> list[Command]:
        match event:
            case FromPeer():
                return self._from_peer(event, now_s)
            case SlabScattered(key=key):
                commands, failures = self.receiver.scattered(event, now_s)
                return [*commands, *_failed(failures, now_s), *self._join_complete([key], now_s)]
            case PieceFetched(key=key):
                commands, failures = self.receiver.fetched(event, now_s)
                return [*commands, *_failed(failures, now_s), *self._join_complete([key], now_s)]
            case BlocksDigested():
                return self._digested(event, now_s)
            case LinkMeasured(peer=peer, cost=cost):
                self.receiver.pools.measured(peer, cost)
                return []
            case SlabReplaced():
                return self.receiver.replaced(event, now_s)
            case PeerLost(peer=peer, reason=reason):
                commands, failures = self.receiver.peer_lost(peer, reason)
                return [*commands, *_failed(failures, now_s)]
            case Tick():
                commands, failures = self.receiver.expire(now_s)
                return [*commands, *_failed(failures, now_s)]

    def _from_peer(self, event: FromPeer, now_s: float) -> list[Command]:
        match event.message:
            case PeerHello(kv=kv):
                self.receiver.pools.met(event.peer, kv)
                return []
            case PiecesAhead() as ahead:
                return self.receiver.ahead(event.peer, ahead, now_s)
            case PieceComputed() as computed:
                return self.receiver.computed(event.peer, computed, now_s)
            case SlabFilled() as filled:
                return self.receiver.filled(filled, now_s)
            case Commit() as commit:
                commands = self.receiver.commit(event.peer, commit, now_s)
                return [*commands, *self._join_complete([commit.key], now_s)]
            case TransferCancelled(key=key):
                return self.receiver.fenced(key, now_s)
            case RenewLeases(keys=keys):
                self.receiver.renew(keys, now_s)
                return []
            case _:
                return []

    def settle(self, now_s: float) -> list[Command]:
        """After every event: blocks for those that await them, and who holds nothing any more."""
        commands: list[Command] = []
        if self.receiver.awaits_blocks and not self.batch.roster.lacks_blocks:
            taken, keys = self.receiver.take_blocks(now_s)
            commands = [*taken, *self._join_complete(keys, now_s)]
        if freed := self.receiver.take_freed():
            commands.append(Emit(events=tuple(Released(key=key, at_s=now_s) for key in freed)))
        return commands

    # --- joining --------------------------------------------------------------------------------

    def _join_complete(self, keys: Iterable[RequestKey], now_s: float) -> list[Command]:
        return [command for key in keys for command in self._join_if_complete(key, now_s)]

    def _join_if_complete(self, key: RequestKey, now_s: float) -> list[Command]:
        if (check := self.receiver.check(key)) is not None:
            return [check]
        arrived = self.receiver.take_complete(key)
        if arrived is None:
            return []
        committed = Lifetime(key=key, at_s=now_s, name="handoff_committed")
        self.batch.join(arrived, now_s)
        ended = self.batch.roster.released_if_done(key, now_s)
        return [arrived.answer, Emit(events=(committed, *ended))]

    def _digested(self, event: BlocksDigested, now_s: float) -> list[Command]:
        key = event.holder.key
        commands, failures = self.receiver.digested(event)
        if failures or key not in self.receiver:
            return [*commands, *_failed(failures, now_s)]
        checked = Emit(events=(Lifetime(key=key, at_s=now_s, name="kv_checked"),))
        return [checked, *self._join_if_complete(key, now_s)]


def _failed(failures: list[Failure], now_s: float) -> list[Command]:
    events = tuple(_failure(failure, now_s) for failure in failures)
    return [Emit(events=events)] if events else []


def _failure(failure: Failure, now_s: float) -> RequestFailed:
    return RequestFailed(
        key=failure.key, at_s=now_s, reason=failure.reason, message=failure.message
    )
