"""Reads between two workers' caches: what each side says, in order, and under random schedules."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from kvpool.core.blocks.holding import Holder
from kvpool.core.blocks.leases import LeaseTable
from kvpool.core.blocks.tables import BlockTables
from kvpool.core.fetch.client_events import PrefixFound
from kvpool.core.fetch.cost import RestoreCost
from kvpool.core.fetch.openings import Openings
from kvpool.core.fetch.peer_pull import PullGrants, Pulls
from kvpool.core.fetch.pool_fetch import Restored, Restores
from kvpool.core.layout.block_names import HashChain
from kvpool.core.layout.hashes import BlockHash
from kvpool.core.layout.layout import NO_BLOCK, KvLayout, LayerGroup, Plane
from kvpool.core.transfer.commands import FromPeer, PeerLost, SendPeer
from kvpool.core.transfer.messages import PeerHello, PeerMessage
from kvpool.core.transfer.piece import paired_runs
from kvpool.core.transfer.pool_map import KvFacts
from kvpool.core.transfer.pull import (
    BlocksPulled,
    PullBlocks,
    PullGranted,
    PullRead,
    PullSettled,
    PullWanted,
)
from kvpool.core.transfer.write import Side
from kvpool.transport.peer.base import MAX_MESSAGE_BYTES
from kvpool.wire.peer import decode, encode
from kvrelay.messages import PrefixSource
from kvrelay.types import Incarnation, PrefixOrigin, RequestKey

SIZE = 4
P, H = Incarnation("p"), Incarnation("h")  # puller, holder of blocks
TTL_S, PATIENCE_S = 30.0, 5.0
Place = tuple[int, int]
"""layer group, slot"""


def _layout(*windows: int | None) -> KvLayout:
    planes = (Plane(name="k", heads=1, dim=2),)
    groups = tuple(
        LayerGroup(layers=(2 * i, 2 * i + 1), planes=planes, window=window)
        for i, window in enumerate(windows)
    )
    return KvLayout(groups=groups, dtype="float32", block_size=SIZE)


@dataclass
class Worker:
    """A cache, and what lies in its slots: (hash of the block, place in it)."""

    name: Incarnation
    layout: KvLayout
    blocks: int = 32
    read_bytes: int = 2**30
    content: dict[Place, object] = field(default_factory=dict)
    restored: list[Restored] = field(default_factory=list)
    numbers: int = 0

    def __post_init__(self) -> None:
        self.tables = BlockTables(self.layout, self.blocks)
        pulls = Pulls(tables=self.tables, cost=RestoreCost(SIZE), read_bytes=self.read_bytes)
        grants = PullGrants(tables=self.tables, leases=LeaseTable(TTL_S))
        self.openings = Openings(tables=self.tables, pulls=pulls, grants=grants)
        self.pulls, self.grants = pulls, grants

    @property
    def hello(self) -> PeerHello:
        facts = KvFacts(
            block_size=SIZE, dtype="float32", blocks=self.blocks, slab_bytes=1, region="pool"
        )
        return PeerHello(wire_version=1, incarnation=self.name, fingerprint="f", kv=facts)

    def holder(self) -> Holder:
        self.numbers += 1
        return Holder("prefill", RequestKey(str(self.numbers), 0))

    def chain(self, tokens: list[int]) -> HashChain:
        names = self.tables.chain("", len(tokens))
        names.extend(tokens, len(tokens))
        return names

    def compute(self, tokens: list[int], now_s: float = 0) -> bool:
        """A prompt that comes, is computed and goes."""
        names, holder = self.chain(tokens), self.holder()
        hashes = names.full(len(tokens)).hashes()
        found = self.tables.try_open(holder, len(tokens), hashes=hashes, now_s=now_s)
        if found is None:
            return False
        self.write(holder, hashes, found // SIZE)
        self.tables.fill(holder, hashes)
        self.tables.trim(holder, len(tokens))
        self.tables.release(holder)
        return True

    def write(self, holder: Holder, hashes: list[BlockHash], first: int) -> None:
        for group, table in enumerate(self.tables.tables(holder)):
            for index in range(first, len(hashes)):
                if table[index] != NO_BLOCK:
                    for at in range(SIZE):
                        slot = table[index] * SIZE + at
                        self.content[group, slot] = (hashes[index], at)

    def open(self, tokens: list[int], blocks: int, now_s: float = 0) -> Holder | None:
        """A prompt of which H seems to have so much."""
        holder = self.holder()
        source = PrefixSource(peer=H, addresses=("sim:h",), blocks=blocks)
        hashes = self.chain(tokens).full(len(tokens) - 1).hashes()
        found = self.openings.try_open(
            holder, len(tokens), hashes=hashes, ahead_tokens=SIZE, now_s=now_s, source=source
        )
        return None if found is None else holder

    def check_named(self) -> None:
        """Whatever is found under a name is what the name says."""
        for run in self.tables.device.tree:
            for group, column in enumerate(run.columns):
                for depth, part in enumerate(column, start=run.start):
                    for at in range(SIZE) if part != NO_BLOCK else ():
                        assert self.content[group, part * SIZE + at] == (run.at(depth), at)

    def validate(self) -> None:
        self.tables.validate()
        self.pulls.validate()
        self.grants.validate()
        self.check_named()


def _read(job: PullBlocks, puller: Worker, owner: Worker) -> None:
    target = Side(tables=job.tables, block_size=SIZE)
    for section in job.write.sections:
        group = section.part.group
        for run in paired_runs(section, job.source, target):
            for i in range(run.tokens):
                value = owner.content.get((group, run.source + i), "noise")
                puller.content[group, run.target + i] = value


def _pair(*windows: int | None, **options: int) -> tuple[Worker, Worker]:
    layout = _layout(*windows)
    puller, owner = Worker(P, layout, **options), Worker(H, layout)
    puller.pulls.handle(FromPeer(peer=H, message=owner.hello), 0)
    return puller, owner


def _sent(worker: Worker) -> PeerMessage:
    (send,) = worker.openings.take_pulls()
    assert isinstance(send, SendPeer)
    return send.message


PROMPT = list(range(1, 23))  # five blocks and two tokens


def _asked(puller: Worker, blocks: int = 5) -> tuple[Holder, PullWanted]:
    holder = puller.open(PROMPT, blocks)
    assert holder is not None and puller.openings.waits(holder)
    wanted = _sent(puller)
    assert isinstance(wanted, PullWanted)
    return holder, wanted


def _granted(puller: Worker, owner: Worker, wanted: PullWanted) -> PullBlocks:
    granted = owner.grants.wanted(P, wanted, 0)
    assert puller.openings.pulled(FromPeer(peer=H, message=granted), 1) == []
    (job,) = puller.openings.take_pulls()
    assert isinstance(job, PullBlocks)
    return job


def _done(job: PullBlocks, error: str | None = None) -> BlocksPulled:
    return BlocksPulled(pull=job.pull, bytes=job.write.nbytes, seconds=0.1, error=error)


@pytest.mark.parametrize("windows", [(None,), (None, 6), (5, None), (9,)])
def test_a_prefix_comes_whole_and_is_named_here_too(windows: tuple[int | None, ...]) -> None:
    puller, owner = _pair(*windows)
    owner.compute(PROMPT)
    holder, wanted = _asked(puller)
    job = _granted(puller, owner, wanted)
    assert [str(held.holder) for held in owner.tables.held()] == ["pulled p#1/0"]
    _read(job, puller, owner)
    assert puller.openings.pulled(_done(job), 2) == []
    assert _sent(puller) == PullRead(pull=1)
    settled = owner.grants.read(P, PullRead(pull=1))
    assert settled == PullSettled(pull=1, held=True)
    assert not list(owner.tables.held())
    restored = puller.openings.pulled(FromPeer(peer=H, message=settled), 3)
    assert restored == [Restored(holder=holder, tokens=20, origin=PrefixOrigin.PEER)]
    assert puller.openings.origins == dict.fromkeys(PrefixOrigin, 0) | {PrefixOrigin.PEER: 1}
    assert (puller.pulls.tokens, puller.pulls.cost.peer.seconds) == (20, pytest.approx(2 / 5))
    puller.tables.release(holder)
    puller.validate()
    hashes = puller.chain(PROMPT).full(20).hashes()
    assert puller.tables.try_open(puller.holder(), 22, hashes=hashes, now_s=4) == 20


def test_only_what_is_not_here_is_read_and_in_pieces() -> None:
    puller, owner = _pair(None, read_bytes=2 * 2 * 2 * 4 * SIZE)
    owner.compute(PROMPT)
    puller.compute(PROMPT[:9])
    _, wanted = _asked(puller)
    assert (wanted.skip, len(wanted.hashes)) == (2, 5)
    job = _granted(puller, owner, wanted)
    reads = 1
    while True:
        _read(job, puller, owner)
        puller.openings.pulled(_done(job), 2)
        (command,) = puller.openings.take_pulls()
        if isinstance(command, SendPeer):
            break
        job, reads = command, reads + 1
    assert reads == 2
    settled = owner.grants.read(P, PullRead(pull=1))
    (restored,) = puller.openings.pulled(FromPeer(peer=H, message=settled), 3)
    assert restored.tokens == 20
    puller.validate()


def test_what_was_freed_while_it_was_read_is_not_used() -> None:
    puller, owner = _pair(None)
    owner.compute(PROMPT)
    holder, wanted = _asked(puller)
    job = _granted(puller, owner, wanted)
    owner.grants.expire(TTL_S)
    assert owner.compute([7] * 32 * SIZE)
    _read(job, puller, owner)
    puller.openings.pulled(_done(job), 2)
    settled = owner.grants.read(P, PullRead(pull=1))
    assert settled == PullSettled(pull=1, held=False)
    restored = puller.openings.pulled(FromPeer(peer=H, message=settled), 3)
    assert restored == [Restored.found_here(holder, 0)]
    puller.validate()
    assert not puller.tables.device.tree.blocks


def test_a_holder_without_it_ends_it_at_once() -> None:
    puller, owner = _pair(None)
    holder, wanted = _asked(puller)
    granted = owner.grants.wanted(P, wanted, 0)
    assert granted == PullGranted(pull=1)
    assert puller.openings.pulled(FromPeer(peer=H, message=granted), 1) == [
        Restored.found_here(holder, 0)
    ]
    owner.validate()


def test_a_late_grant_is_given_back() -> None:
    puller, owner = _pair(None)
    owner.compute(PROMPT)
    holder, wanted = _asked(puller)
    assert puller.openings.expire(PATIENCE_S) == [Restored.found_here(holder, 0)]
    granted = owner.grants.wanted(P, wanted, 6)
    puller.openings.pulled(FromPeer(peer=H, message=granted), 7)
    assert _sent(puller) == PullRead(pull=1)
    owner.grants.read(P, PullRead(pull=1))
    assert not list(owner.tables.held())


def test_blocks_stay_while_they_are_written() -> None:
    """The request is over, or the peer is lost, in the middle of a read."""
    for lost in (True, False):
        puller, owner = _pair(None)
        owner.compute(PROMPT)
        holder, wanted = _asked(puller)
        job = _granted(puller, owner, wanted)
        if lost:
            assert puller.openings.pulled(PeerLost(peer=H, reason="gone"), 1) == []
        else:
            assert puller.openings.drop(holder)
        assert puller.openings.expire(100) == []
        assert puller.openings.pulled(_done(job), 2) == [Restored.found_here(holder, 0)]
        assert _sent(puller) == PullRead(pull=1)


def test_a_request_that_ends_before_anything_is_read_waits_for_nothing() -> None:
    puller, _ = _pair(None)
    holder, _ = _asked(puller)
    assert not puller.openings.drop(holder)
    assert not puller.openings.waits(holder)


def test_a_link_that_cannot_read_the_peer_is_not_used() -> None:
    puller, owner = _pair(None)
    owner.compute(PROMPT)
    puller.pulls.handle(PeerLost(peer=H, reason="it connects anew"), 0)
    holder, wanted = _asked(puller)
    granted = owner.grants.wanted(P, wanted, 0)
    restored = puller.openings.pulled(FromPeer(peer=H, message=granted), 1)
    assert restored == [Restored.found_here(holder, 0)]
    assert _sent(puller) == PullRead(pull=1)


def test_the_longest_pull_fits_into_its_messages() -> None:
    """However scattered the blocks."""
    layout = _layout(None, 64)
    owner, puller = Worker(H, layout, blocks=8000), Worker(P, layout, blocks=8000)
    tokens = [*range(3000 * SIZE)]
    names, kept = owner.chain(tokens), owner.holder()
    assert owner.tables.try_open(kept, 0, now_s=0) == 0
    for end in range(SIZE, len(tokens) + 1, SIZE):
        assert owner.tables.try_grow(kept, end, now_s=0)
        assert owner.tables.try_grow(owner.holder(), SIZE, now_s=0)  # takes the block between
    owner.tables.fill(kept, names.full(len(tokens)).hashes())
    puller.pulls.handle(FromPeer(peer=H, message=owner.hello), 0)
    assert puller.open(tokens, 3000) is not None
    wanted = _sent(puller)
    assert isinstance(wanted, PullWanted)
    granted = owner.grants.wanted(P, wanted, 0)
    assert granted.blocks == len(wanted.hashes) > 1500
    assert len(granted.held[0].runs) == granted.blocks
    for message in (wanted, granted):
        payload = encode(message)
        assert len(payload) <= MAX_MESSAGE_BYTES
        assert decode(payload) == message


# --- which source -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("peer", "host", "chosen"),
    [(5, 0, "peer"), (3, 5, "pool"), (5, 5, "pool"), (5, 3, "peer")],
)
def test_untimed_sources_are_tried_where_there_is_most(peer: int, host: int, chosen: str) -> None:
    assert _choose(peer, host) == chosen


def test_timed_sources_are_compared() -> None:
    cost = RestoreCost(SIZE)
    cost.computed(4, 4.0)
    cost.restored(1, 0, 1.0)
    cost.pulled(1, 0.5)
    assert cost.prefers(cost.peer, 5, 5, 0)
    assert not cost.prefers(cost.peer, 1, 5, 0)
    cost.peer.seconds = 5.0
    assert not cost.prefers(cost.peer, 5, 0, 0), "computing is faster"


def _choose(peer: int, host: int) -> str:
    puller, _ = _pair(None)
    puller.openings.restores = Restores(tables=puller.tables, cost=puller.pulls.cost)
    holder = puller.open(PROMPT, peer)
    assert holder is not None and not puller.openings.take_pulls()
    found = PrefixFound(key=holder.key, host_blocks=host, disk_blocks=0)
    assert puller.openings.answer(found, 1) is None
    assert puller.openings.waits(holder)
    return "peer" if puller.openings.take_pulls() else "pool"


# --- random schedules ---------------------------------------------------------------------------


class Schedule:
    """Messages in order per direction, reads in two halves, links that break; any order between."""

    def __init__(self, seed: int, *windows: int | None) -> None:
        self.draw, self.now_s = random.Random(seed), 0.0
        self.puller, self.owner = _pair(*windows, blocks=24, read_bytes=200)
        self.wires: dict[Incarnation, list[PeerMessage]] = {P: [], H: []}  # on the way to
        self.jobs: list[tuple[PullBlocks, bool]] = []
        self.waiting: set[Holder] = set()
        self.peer_tokens = 0

    def run(self, turns: int) -> None:
        actions = [self._open, self._compute, self._deliver, self._deliver, self._move, self._move]
        for _ in range(turns):
            self.now_s += self.draw.random() * self.draw.choice([0.01, 1.0])
            self.draw.choice(actions)()
            if self.draw.random() < 0.02:
                self._break()
            if self.draw.random() < 0.05:
                self._tick()
            self._collect()
            self.puller.validate()
            self.owner.validate()
        while self.jobs or any(self.wires.values()):
            self._deliver()
            self._move()
            self._collect()
        self.now_s += TTL_S
        self._tick()
        self._collect()

    def _tokens(self) -> list[int]:
        """Prompts share prefixes."""
        family = self.draw.randrange(3)
        return [family * 100 + i for i in range(self.draw.randint(5, 40))]

    def _open(self) -> None:
        tokens = self._tokens()
        holder = self.puller.open(tokens, self.draw.randint(1, 10), self.now_s)
        if holder is None:
            return
        if self.puller.openings.waits(holder):
            self.waiting.add(holder)
            if self.draw.random() < 0.2:
                self._drop(holder)
        else:
            self.puller.tables.release(holder)

    def _drop(self, holder: Holder) -> None:
        if not self.puller.openings.drop(holder):
            self.waiting.discard(holder)
            self.puller.tables.release(holder)

    def _compute(self) -> None:
        worker = self.draw.choice([self.owner, self.owner, self.puller])
        worker.compute(self._tokens(), self.now_s)

    def _deliver(self) -> None:
        to = self.draw.choice([P, H])
        if not self.wires[to]:
            return
        message = decode(encode(self.wires[to].pop(0)))
        if to == P:
            self._end(self.puller.openings.pulled(FromPeer(peer=H, message=message), self.now_s))
            return
        match message:
            case PullWanted():
                self.wires[P].append(self.owner.grants.wanted(P, message, self.now_s))
            case PullRead():
                self.wires[P].append(self.owner.grants.read(P, message))

    def _move(self) -> None:
        """Half of a read; each byte is what it was then."""
        if not self.jobs:
            return
        job, begun = self.jobs[0]
        if not begun and self.draw.random() < 0.5:
            self.jobs[0] = (job, True)
            return
        del self.jobs[0]
        error = "broken" if self.draw.random() < 0.1 else None
        if error is None:
            _read(job, self.puller, self.owner)
        self._end(self.puller.openings.pulled(_done(job, error), self.now_s))

    def _collect(self) -> None:
        for command in self.puller.openings.take_pulls():
            if isinstance(command, PullBlocks):
                self.jobs.append((command, False))
            else:
                self.wires[H].append(command.message)

    def _break(self) -> None:
        """Each side notices; what was on its way is lost. They connect anew."""
        self.wires = {P: [], H: []}
        self.owner.grants.lost(P)
        self._end(self.puller.openings.pulled(PeerLost(peer=H, reason="broken"), self.now_s))
        self.wires[P].append(self.owner.hello)

    def _tick(self) -> None:
        self.owner.grants.expire(self.now_s)
        self._end(self.puller.openings.expire(self.now_s))

    def _end(self, restored: list[Restored]) -> None:
        for one in restored:
            assert one.holder in self.waiting, "restored twice, or never opened"
            self.waiting.discard(one.holder)
            self.peer_tokens += one.tokens if one.origin is PrefixOrigin.PEER else 0
            self.puller.tables.release(one.holder)


@pytest.mark.parametrize("windows", [(None,), (None, 6), (9, None, 5)])
def test_any_schedule_ends_every_pull_and_names_nothing_wrong(
    windows: tuple[int | None, ...],
) -> None:
    pulled = 0
    for seed in range(12):
        schedule = Schedule(seed, *windows)
        schedule.run(300)
        assert not schedule.waiting
        for worker in (schedule.puller, schedule.owner):
            worker.validate()
            assert not list(worker.tables.held())
            assert worker.tables.free_blocks == worker.tables.blocks
        pulled += schedule.peer_tokens
    assert pulled > 500, "hardly anything was pulled"
