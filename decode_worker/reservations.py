"""The requests that are reserved on this decode worker, and how their KV comes in. Pure.

A reservation holds a lease and blocks. Progress renews the lease: a message of the prefill worker
about its KV, or RenewLeases, which says that its prompt waits or is computed there, or that some of
its KV moves. If the prefill worker says that it waits for this worker, that must be so: for blocks,
a slab or a copy made here. The blocks:

    push   for the prompt and its first token, from the reservation on
    pull   the same, from its first announced piece on; requests get them in that order, so a large
           one is not passed by
    pool   none: the batch takes them; what is fetched ahead from the pool is only cached

A reservation ends in one of two ways: its KV is complete and it joins the batch, or it is given up.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import InitVar, dataclass, field

from decode_worker.incoming import Arrived, HandoffState, IncomingHandoff
from decode_worker.peers import PeerPools
from decode_worker.slab_grants import SlabGrants
from engine.core.step import Command, Emit, Tick
from kvpool.core.blocks.holding import Holder
from kvpool.core.blocks.leases import LeaseTable
from kvpool.core.blocks.pool import BlockState
from kvpool.core.blocks.tables import BlockTables
from kvpool.core.layout.hashes import NO_NAMES, Names
from kvpool.core.transfer.codec_choice import NO_CODEC, CodecOffer
from kvpool.core.transfer.commands import (
    FromPeer,
    LinkMeasured,
    PeerLost,
    PieceFetched,
    ScatterSlab,
    SendPeer,
    SlabReplaced,
    SlabScattered,
)
from kvpool.core.transfer.messages import (
    BlocksDigested,
    CancelTransfer,
    Commit,
    Committed,
    HandoffMode,
    PeerHello,
    PeerMessage,
    PieceComputed,
    PiecesAhead,
    PiecesAwaited,
    RenewLeases,
    SlabFilled,
    TransferCancelled,
    mismatch,
)
from kvpool.core.transfer.slabs import SlabId, SlabPool
from kvpool.core.transfer.write import SlabWrite
from kvrelay.errors import FailureReason, PeerError
from kvrelay.messages import Lifetime, LifetimeMoment, RequestFailed, Reserve
from kvrelay.types import Incarnation, RequestKey, RequestSpec

_CopyDone = SlabScattered | PieceFetched | BlocksDigested
IncomingEvent = FromPeer | _CopyDone | LinkMeasured | SlabReplaced | PeerLost | Tick


@dataclass(slots=True, kw_only=True)
class Reservations:
    """`regions` names the slabs' regions. `offer` are the codecs that this worker allows;
    its `ranks` share the heads.

    `awaiting_blocks` are in line for blocks. `arrived` and `freed` wait for the scheduler: what is
    to join the batch, and what was given up and holds nothing any more. `choices` counts the
    sequences that are reserved. `transfers` counts the pieces that have landed.
    """

    tables: BlockTables
    slabs: SlabPool
    regions: InitVar[dict[SlabId, str]]
    leases: LeaseTable[RequestKey]
    mode: HandoffMode = HandoffMode.PUSH
    offer: InitVar[CodecOffer] = NO_CODEC
    ranks: InitVar[int] = 1
    choices: int = 0
    awaiting_blocks: deque[IncomingHandoff] = field(default_factory=deque)
    arrived: list[Arrived] = field(default_factory=list)
    freed: list[RequestKey] = field(default_factory=list)
    transfers: int = 0
    transfer_bytes: int = 0
    transfer_s: float = 0.0
    canaries_passed: int = 0
    canaries_mismatched: int = 0
    peers: PeerPools = field(init=False)
    grants: SlabGrants = field(init=False)
    _incoming: dict[RequestKey, IncomingHandoff] = field(default_factory=dict)

    def __post_init__(self, regions: dict[SlabId, str], offer: CodecOffer, ranks: int) -> None:
        self.peers = PeerPools(
            layout=self.tables.layout,
            slab_bytes=self.slabs.slab_bytes,
            offer=offer,
            ranks=ranks,
        )
        self.grants = SlabGrants(slabs=self.slabs, regions=regions, ttl_s=self.leases.ttl_s)

    def __contains__(self, key: RequestKey) -> bool:
        return key in self._incoming

    def specs(self) -> Iterator[RequestSpec]:
        """Of the requests that are still to come."""
        return (one.message.spec for one in self._live())

    def _live(self) -> Iterator[IncomingHandoff]:
        """Those that were not given up; some may end while this is read."""
        here = [*self._incoming.values()]
        return (one for one in here if one.state is not HandoffState.DRAINING)

    def find(self, key: RequestKey) -> IncomingHandoff | None:
        """None also for one that was given up."""
        incoming = self._incoming.get(key)
        if incoming is None or incoming.state is HandoffState.DRAINING:
            return None
        return incoming

    # --- beginning ------------------------------------------------------------------------------

    def try_reserve(self, message: Reserve, now_s: float) -> int | None:
        """How many of its tokens are cached here. None, and nothing changed, when there are no
        blocks for it, or could never be."""
        spec = message.spec
        incoming = IncomingHandoff(
            message=message,
            holder=Holder("decode", spec.key),
            names=self.tables.names_of(spec),
            source=message.source,
        )
        prompt_tokens = incoming.prompt_tokens
        if self.mode is not HandoffMode.PUSH:
            if prompt_tokens >= self.tables.total_tokens:
                return None
        elif not self._try_lease(incoming, incoming.names.full(prompt_tokens), now_s):
            return None
        self._incoming[spec.key] = incoming
        self.choices += spec.sampling.n
        self.leases.grant(spec.key, now_s)
        return incoming.held_tokens

    def _try_lease(self, incoming: IncomingHandoff, hashes: Names, now_s: float) -> bool:
        """Blocks for the prompt and its first token."""
        held_tokens = self.tables.try_open(
            incoming.holder,
            incoming.prompt_tokens + 1,
            hashes=hashes,
            seen_from=incoming.prompt_tokens,
            now_s=now_s,
            leased=True,
        )
        if held_tokens is None:
            return False
        incoming.held_tokens = held_tokens
        return True

    def begin(self, incoming: IncomingHandoff, *, needs_blocks: bool) -> None:
        """Some of its KV is on its way: it receives now, or stands in line for blocks."""
        if incoming.state is not HandoffState.RESERVED:
            return
        if needs_blocks and incoming.holder not in self.tables:
            incoming.enter(HandoffState.AWAITING_BLOCKS)
            self.awaiting_blocks.append(incoming)
        else:
            incoming.enter(HandoffState.RECEIVING)

    def take_blocks(self, now_s: float) -> list[Command]:
        """Blocks for those in line, as far as they go. All their KV is on its way already, so what
        is cached here is of no use."""
        taken: list[IncomingHandoff] = []
        commands: list[Command] = []
        while self.awaiting_blocks and self._try_lease(self.awaiting_blocks[0], NO_NAMES, now_s):
            incoming = self.awaiting_blocks.popleft()
            incoming.enter(HandoffState.RECEIVING)
            taken.append(incoming)
            commands += self._choose_ways(incoming, now_s)
        return [*commands, *(one for incoming in taken for one in self.complete(incoming))]

    # --- events ---------------------------------------------------------------------------------

    def on_incoming_event(self, event: IncomingEvent, now_s: float) -> list[Command]:
        match event:
            case FromPeer(peer=peer, message=message):
                return self._on_message(peer, message, now_s)
            case SlabScattered():
                freed = self.grants.release(event.slab_id, event.lease_id, now_s)
                incoming = self._incoming[event.key]
                landed = self._on_landed(incoming, event, now_s)
                return [*freed, *landed, *self.complete(incoming)]
            case PieceFetched():
                return self._on_fetched(event, now_s)
            case BlocksDigested():
                return self._on_digested(event, now_s)
            case LinkMeasured(peer=peer, cost=cost):
                self.peers.measured(peer, cost)
                return []
            case SlabReplaced(slab_id=slab_id, region=region):
                return self.grants.replaced(slab_id, region, now_s)
            case PeerLost():
                return self._on_peer_lost(event, now_s)
            case Tick():
                return self._expire(now_s)

    def _on_message(self, peer: Incarnation, message: PeerMessage, now_s: float) -> list[Command]:
        match message:
            case PiecesAhead():
                return self._on_announced(peer, message, now_s)
            case SlabFilled():
                return self._on_filled(message, now_s)
            case PieceComputed():
                return self._on_computed(peer, message, now_s)
            case Commit():
                return self._on_commit(peer, message, now_s)
            case RenewLeases():
                self._renew(message, now_s)
            case TransferCancelled(key=key):
                return self._on_fenced(key, now_s)
            case PeerHello(kv=kv):
                self.peers.met(peer, kv)
            case _:
                pass
        return []

    # --- pieces ---------------------------------------------------------------------------------

    def _on_announced(self, peer: Incarnation, ahead: PiecesAhead, now_s: float) -> list[Command]:
        incoming = self.find(ahead.key)
        if incoming is None or not incoming.is_from(peer):
            return [_cancel(peer, ahead.key, "no such reservation")]
        if ahead.number in incoming.announced:
            return []
        end = incoming.prompt_tokens
        try:
            wanted = range(incoming.held_tokens, end)
            writes = self.peers.writes_of(peer, ahead, wanted, end)
        except PeerError as error:
            return [_cancel(peer, ahead.key, str(error))]
        self.leases.renew(ahead.key, now_s)
        incoming.announce(ahead, writes)
        self.begin(incoming, needs_blocks=True)
        if incoming.state is HandoffState.AWAITING_BLOCKS:
            return []
        return self._choose_ways(incoming, now_s)

    def _choose_ways(self, incoming: IncomingHandoff, now_s: float) -> list[Command]:
        """Each announced piece comes through a slab, or is read directly."""
        commands: list[Command] = []
        for ahead, writes in incoming.take_undecided():
            try:
                commands += self._choose(incoming, ahead, writes, now_s)
            except PeerError as error:
                commands.append(_cancel(incoming.sender, ahead.key, str(error)))
        return commands

    def _choose(
        self,
        incoming: IncomingHandoff,
        ahead: PiecesAhead,
        writes: Sequence[SlabWrite],
        now_s: float,
    ) -> list[Command]:
        peer, tables = incoming.sender, self.tables.tables(incoming.holder)
        ways = self.peers.ways(peer, ahead, writes, tables)
        by_slab, by_read = incoming.set_ways(ahead, ways)
        for number, write in by_slab:
            self.grants.ask(peer, ahead.key, number, write)
        commands = self.grants.grant(now_s)
        if by_read:
            message = PiecesAwaited(key=ahead.key, pieces=tuple(by_read))
            commands.append(SendPeer(peer=peer, message=message))
        return commands

    def _on_filled(self, filled: SlabFilled, now_s: float) -> list[Command]:
        """A writer whose lease is over is ignored."""
        number = self.grants.try_fill(filled)
        if number is None:
            return []
        incoming = self.find(filled.key)
        if incoming is None:
            return self.grants.release(filled.slab_id, filled.lease_id, now_s)
        self.leases.renew(filled.key, now_s)
        piece, write = incoming.begin_scatter(number)
        tables, peer = self.tables.tables(incoming.holder), incoming.sender
        return [ScatterSlab(peer=peer, filled=filled, piece=piece, write=write, tables=tables)]

    def _on_computed(
        self, peer: Incarnation, computed: PieceComputed, now_s: float
    ) -> list[Command]:
        """A piece that was awaited may be read."""
        incoming = self.find(computed.key)
        if incoming is None or not incoming.is_from(peer):
            return []
        fetch = incoming.try_begin_read(computed.piece)
        if fetch is None:
            return []
        self.leases.renew(computed.key, now_s)
        return [fetch]

    def _on_fetched(self, done: PieceFetched, now_s: float) -> list[Command]:
        incoming = self._incoming[done.key]
        is_live = incoming.state is not HandoffState.DRAINING
        commands = self._on_landed(incoming, done, now_s)
        if is_live and done.error is not None:
            self.peers.forget_cost(incoming.sender)
        elif is_live:
            commands += incoming.end_read(done.piece)
        return [*commands, *self.complete(incoming)]

    def landed(self, key: RequestKey) -> IncomingHandoff | None:
        """What was in flight has ended. None: the request was given up meanwhile."""
        incoming = self._incoming[key]
        incoming.in_flight -= 1
        if incoming.state is not HandoffState.DRAINING:
            return incoming
        self._free_if_quiet(incoming)
        return None

    def _on_landed(
        self, incoming: IncomingHandoff, done: SlabScattered | PieceFetched, now_s: float
    ) -> list[Command]:
        if self.landed(incoming.key) is None:
            return []
        if done.error is not None:
            cancel = self.cancel(done.key, done.error, now_s)
            return [*cancel, _failed(done.key, FailureReason.TRANSFER_FAILED, done.error, now_s)]
        incoming.landed += 1
        self.transfers += 1
        self.transfer_bytes += done.bytes
        self.transfer_s += done.seconds
        return []

    # --- joining the batch ----------------------------------------------------------------------

    def _on_commit(self, peer: Incarnation, commit: Commit, now_s: float) -> list[Command]:
        incoming = self._incoming.get(commit.key)
        if incoming is None:
            return [_cancel(peer, commit.key, "no such reservation")]
        if not self.leases.renew(commit.key, now_s) or not incoming.is_from(peer):
            return []
        incoming.commit = commit
        self.begin(incoming, needs_blocks=self.mode is not HandoffMode.POOL)
        return self.complete(incoming)

    def complete(self, incoming: IncomingHandoff) -> list[Command]:
        """When nothing is missing any more, it is checked, if it came with a digest, or joins."""
        if incoming.commit is None or not incoming.is_complete:
            return []
        if (digest := incoming.commit.digest) is not None:
            return [incoming.begin_check(digest.start, self.tables.tables(incoming.holder))]
        self._end(incoming)
        del self._incoming[incoming.key]
        if incoming.holder in self.tables:
            self.tables.activate(incoming.holder)
        self.arrived.append(incoming.arrive())
        return []

    def _on_digested(self, event: BlocksDigested, now_s: float) -> list[Command]:
        """Wrong KV is given up; its prefill worker has done its part."""
        incoming = self.landed(event.holder.key)
        if incoming is None:
            return []
        commit, key = incoming.commit, incoming.key
        assert commit is not None and commit.digest is not None, key
        allowed = self.peers.canary_distance(incoming.sender)
        problem = mismatch(commit.digest, event.digests, allowed)
        if problem is None:
            self.canaries_passed += 1
            incoming.pass_check()
            checked = Emit(events=(Lifetime(key=key, at_s=now_s, name=LifetimeMoment.KV_CHECKED),))
            return [checked, *self.complete(incoming)]
        self.canaries_mismatched += 1
        self._leave(incoming)
        answer = SendPeer(peer=incoming.sender, message=Committed(key=key))
        return [answer, _failed(key, FailureReason.KV_MISMATCH, problem, now_s)]

    def stop(self, key: RequestKey, choice: int) -> None:
        """A stop string ended this choice with its first token."""
        if key in self._incoming:
            self._incoming[key].stopped.add(choice)

    # --- giving up ------------------------------------------------------------------------------

    def cancel(self, key: RequestKey, reason: str, now_s: float) -> list[Command]:
        """The request won't come: its prefill worker is told to stop."""
        incoming = self.find(key)
        if incoming is None:
            return []
        self._leave(incoming)
        self.grants.begin_fence(key)
        return [] if incoming.source is None else [_cancel(incoming.source, key, reason)]

    def _leave(self, incoming: IncomingHandoff) -> None:
        """Gives back all that it holds; its blocks once nothing in flight touches them. Slabs that
        it was granted come back when their writer is fenced, or retired."""
        if incoming.state is HandoffState.AWAITING_BLOCKS:
            self.awaiting_blocks.remove(incoming)
        self._end(incoming)
        self.grants.withdraw(incoming.key)
        if incoming.in_flight:
            incoming.enter(HandoffState.DRAINING)
        self._free_if_quiet(incoming)

    def _end(self, incoming: IncomingHandoff) -> None:
        """It is not to come any more, or has come."""
        self.choices -= incoming.choices
        self.leases.end(incoming.key)

    def _free_if_quiet(self, incoming: IncomingHandoff) -> None:
        if incoming.in_flight == 0:
            incoming.enter(HandoffState.GONE)
            del self._incoming[incoming.key]
            self.tables.release(incoming.holder)
            self.freed.append(incoming.key)

    def take_freed(self) -> list[RequestKey]:
        freed, self.freed = self.freed, []
        return freed

    def take_arrived(self) -> list[Arrived]:
        arrived, self.arrived = self.arrived, []
        return arrived

    def _on_fenced(self, key: RequestKey, now_s: float) -> list[Command]:
        """The prefill worker has stopped, because it was told to or by itself."""
        if (incoming := self.find(key)) is not None:
            self._leave(incoming)
        return self.grants.fenced(key, now_s)

    def _renew(self, told: RenewLeases, now_s: float) -> None:
        asking = self.grants.asking() if told.waiting else ()
        waits = (one for one in map(self.find, told.waiting) if one is not None)
        here = [one.key for one in waits if one.waits_here or one.key in asking]
        for key in (*told.keys, *here):
            if self.leases.renew(key, now_s):
                self.grants.renew(key, now_s)

    def _expire(self, now_s: float) -> list[Command]:
        """Gives up what made no progress. A request that no prefill worker has come for yet is its
        router's, which gives it up when it goes."""
        for incoming in self._live():
            if incoming.source is None:
                self.leases.renew(incoming.key, now_s)
        commands, without_slab = self.grants.expire(now_s)
        silent = dict.fromkeys((*self.leases.expire(now_s), *without_slab))
        reason = f"no progress from the prefill worker in {self.leases.ttl_s:g} s"
        failures = []
        for key in silent:
            cancels = self.cancel(key, reason, now_s)
            if cancels:
                failures.append(_failure(key, FailureReason.HANDOFF_TIMEOUT, reason, now_s))
            commands += cancels
        return [*commands, Emit(events=tuple(failures))] if failures else commands

    def _on_peer_lost(self, event: PeerLost, now_s: float) -> list[Command]:
        self.peers.lost(event.peer)
        lost = [one for one in self._live() if one.source == event.peer]
        for incoming in lost:
            self._leave(incoming)
        commands = self.grants.peer_lost(event.peer)
        failures = tuple(_failure(one.key, event.failure, event.reason, now_s) for one in lost)
        return [*commands, Emit(events=failures)] if failures else commands

    def validate(self) -> None:
        """Each lease, leased block, slab and place in line belongs to one request."""
        live = {one.key: one for one in self._live()}
        assert self.choices == sum(one.choices for one in live.values())
        assert {*self.leases} == live.keys(), "a lease without a reservation, or none"
        waiting = [one for one in live.values() if one.state is HandoffState.AWAITING_BLOCKS]
        assert {*waiting} == {*self.awaiting_blocks}, "in line for blocks, and not awaiting them"
        assert len(waiting) == len(self.awaiting_blocks), "in line for blocks twice"
        holders = {one.holder for one in self._incoming.values()}
        held = {one.holder for one in self.tables.held() if one.state is BlockState.LEASED}
        assert held <= holders, "blocks are leased to no reservation"
        assert self.mode is not HandoffMode.PUSH or held == holders, "reserved without blocks"
        for one in self._incoming.values():
            needs = self.mode is not HandoffMode.POOL
            one.validate(holds_blocks=one.holder in held, needs_blocks=needs)
        self.grants.validate(live)


def _cancel(peer: Incarnation, key: RequestKey, reason: str) -> SendPeer:
    return SendPeer(peer=peer, message=CancelTransfer(key=key, reason=reason))


def _failed(key: RequestKey, reason: FailureReason, message: str, now_s: float) -> Emit:
    return Emit(events=(_failure(key, reason, message, now_s),))


def _failure(key: RequestKey, reason: FailureReason, message: str, now_s: float) -> RequestFailed:
    return RequestFailed(key=key, at_s=now_s, reason=reason, message=message)
