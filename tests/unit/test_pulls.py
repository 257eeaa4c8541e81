"""Reads between two workers' caches: what each side says, in order, and under random schedules."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

import pytest

from kvpool.core.blocks.holding import Holder
from kvpool.core.blocks.leases import LeaseTable
from kvpool.core.blocks.tables import BlockTables
from kvpool.core.fetch.cost import RestoreCost
from kvpool.core.fetch.fetches import Restored
from kvpool.core.fetch.peer_pull import PeerSource, PullGrants
from kvpool.core.fetch.prefix_lookup import PoolUse, PrefixLookup
from kvpool.core.layout.block_names import HashChain
from kvpool.core.layout.hashes import BlockHash
from kvpool.core.layout.layout import NO_BLOCK, KvLayout, LayerGroup, Plane
from kvpool.core.transfer.commands import FromPeer, PeerLost, SendPeer
from kvpool.core.transfer.messages import PeerHello, PeerMessage
from kvpool.core.transfer.piece import paired_runs
from kvpool.core.transfer.pool_map import KvFacts
from kvpool.core.transfer.pull import (
    HASHES_MOST,
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
from tests.unit.pool_nodes_kit import PlayedNodes

SIZE = 4
P, H = Incarnation("p"), Incarnation("h")  # puller, holder of blocks
TTL_S, PATIENCE_S = 30.0, 5.0
Windows = tuple[int | None, ...]
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
    has_pool: bool = False
    pages: tuple[int, int] = (HASHES_MOST, 2**20)  # names and places of a message, at most
    content: dict[Place, object] = field(default_factory=dict)
    restored: list[Restored] = field(default_factory=list)
    numbers: int = 0

    def __post_init__(self) -> None:
        self.tables = BlockTables(self.layout, self.blocks)
        self.cost = RestoreCost(SIZE)
        self.peers = PeerSource(
            tables=self.tables,
            cost=self.cost,
            read_bytes=self.read_bytes,
            page_names=self.pages[0],
        )
        self.grants = PullGrants(
            tables=self.tables, leases=LeaseTable(TTL_S), page_blocks=self.pages[1]
        )
        self.lookup = PrefixLookup(
            tables=self.tables,
            cost=self.cost,
            pool=PoolUse(self.tables, self.cost) if self.has_pool else None,
            peers=self.peers,
            grants=self.grants,
        )

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
        hashes = self.chain(tokens).full(len(tokens) - 1)
        found = self.lookup.try_open(
            holder, len(tokens), hashes=hashes, ahead_tokens=SIZE, now_s=now_s, hint=source
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
        self.lookup.fetches.validate()
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


def _pair(*windows: int | None, **options: object) -> tuple[Worker, Worker]:
    layout = _layout(*windows)
    pages = {"pages": options["pages"]} if "pages" in options else {}
    puller, owner = Worker(P, layout, **options), Worker(H, layout, **pages)  # type: ignore[arg-type]
    puller.lookup.on_peer(FromPeer(peer=H, message=owner.hello), 0)
    return puller, owner


def _sent(worker: Worker) -> PeerMessage:
    (send,) = worker.peers.take_outbox()
    assert isinstance(send, SendPeer)
    return send.message


PROMPT = list(range(1, 23))  # five blocks and two tokens


def _asked(puller: Worker, blocks: int = 5) -> tuple[Holder, PullWanted]:
    holder = puller.open(PROMPT, blocks)
    assert holder is not None and puller.lookup.is_fetching(holder)
    wanted = _sent(puller)
    assert isinstance(wanted, PullWanted)
    return holder, wanted


def _grant(owner: Worker, wanted: PullWanted, now_s: float = 0) -> PullGranted:
    granted = owner.grants.wanted(P, wanted, now_s)
    assert granted is not None
    return granted


def _granted(puller: Worker, owner: Worker, wanted: PullWanted) -> PullBlocks:
    granted = _grant(owner, wanted)
    assert puller.lookup.on_peer(FromPeer(peer=H, message=granted), 1) == []
    (job,) = puller.peers.take_outbox()
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
    assert puller.lookup.on_peer(_done(job), 2) == []
    assert _sent(puller) == PullRead(pull=1, over=True)
    settled = owner.grants.read(P, PullRead(pull=1, over=True), 3)
    assert settled == PullSettled(pull=1, held=True)
    assert not list(owner.tables.held())
    restored = puller.lookup.on_peer(FromPeer(peer=H, message=settled), 3)
    assert restored == [Restored(holder=holder, tokens=20, origin=PrefixOrigin.PEER)]
    assert puller.lookup.origins == dict.fromkeys(PrefixOrigin, 0) | {PrefixOrigin.PEER: 1}
    assert (puller.peers.tokens, puller.cost.peer.seconds) == (20, pytest.approx(2 / 5))
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
        puller.lookup.on_peer(_done(job), 2)
        (command,) = puller.peers.take_outbox()
        if isinstance(command, SendPeer):
            break
        job, reads = command, reads + 1
    assert reads == 2
    settled = owner.grants.read(P, PullRead(pull=1, over=True), 3)
    (restored,) = puller.lookup.on_peer(FromPeer(peer=H, message=settled), 3)
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
    puller.lookup.on_peer(_done(job), 2)
    settled = owner.grants.read(P, PullRead(pull=1, over=True), 3)
    assert settled == PullSettled(pull=1, held=False)
    restored = puller.lookup.on_peer(FromPeer(peer=H, message=settled), 3)
    assert restored == [Restored.found_here(holder, 0)]
    puller.validate()
    assert not puller.tables.device.tree.blocks


def test_a_holder_without_it_ends_it_at_once() -> None:
    puller, owner = _pair(None)
    holder, wanted = _asked(puller)
    granted = _grant(owner, wanted)
    assert granted == PullGranted(pull=1)
    assert puller.lookup.on_peer(FromPeer(peer=H, message=granted), 1) == [
        Restored.found_here(holder, 0)
    ]
    owner.validate()


def test_a_late_grant_is_given_back() -> None:
    puller, owner = _pair(None)
    owner.compute(PROMPT)
    holder, wanted = _asked(puller)
    assert puller.lookup.expire(PATIENCE_S) == [Restored.found_here(holder, 0)]
    granted = _grant(owner, wanted, 6)
    puller.lookup.on_peer(FromPeer(peer=H, message=granted), 7)
    assert _sent(puller) == PullRead(pull=1, over=True)
    owner.grants.read(P, PullRead(pull=1, over=True), 3)
    assert not list(owner.tables.held())


def test_blocks_stay_while_they_are_written() -> None:
    """The request is over in the middle of a read."""
    puller, owner = _pair(None)
    owner.compute(PROMPT)
    holder, wanted = _asked(puller)
    job = _granted(puller, owner, wanted)
    assert puller.lookup.leave(holder)
    assert puller.lookup.expire(100) == []
    assert puller.lookup.on_peer(_done(job), 2) == [Restored.found_here(holder, 0)]
    assert _sent(puller) == PullRead(pull=1, over=True)


LOST = PeerLost(peer=H, reason="gone")


@pytest.mark.parametrize("windows", [(None,), (None, 6)])
def test_nobody_waits_for_a_read_from_a_lost_peer(windows: Windows) -> None:
    """It may never end. Its blocks stay held, and the request gets others."""
    puller, owner = _pair(*windows)
    owner.compute(PROMPT)
    puller.compute(PROMPT[:SIZE])
    holder, wanted = _asked(puller)
    job = _granted(puller, owner, wanted)
    room = puller.tables.capacity(holder)
    assert puller.lookup.on_peer(LOST, 1) == [Restored.found_here(holder, SIZE)]
    assert not puller.lookup.is_fetching(holder)
    assert puller.tables.capacity(holder) == room
    now = puller.tables.tables(holder)
    for group, (table, written) in enumerate(zip(now, job.tables, strict=True)):
        assert table[:1] == written[:1], "what was here before"
        assert not {*table[1:]} & ({*written[1:]} - {NO_BLOCK}), group
    puller.tables.release(holder)
    assert puller.tables.free_blocks < puller.tables.blocks
    assert puller.lookup.on_peer(_done(job), 60) == []
    assert puller.tables.free_blocks == puller.tables.blocks
    puller.validate()


def test_without_blocks_for_both_the_read_is_waited_for() -> None:
    puller, owner = _pair(None, blocks=8)
    owner.blocks = 32
    owner.compute(PROMPT)
    holder, wanted = _asked(puller)
    job = _granted(puller, owner, wanted)
    assert puller.lookup.on_peer(LOST, 1) == []
    assert puller.lookup.is_fetching(holder)
    assert puller.lookup.on_peer(_done(job), 2) == [Restored.found_here(holder, 0)]
    puller.tables.release(holder)
    assert puller.tables.free_blocks == puller.tables.blocks


def test_a_request_that_ends_before_anything_is_read_waits_for_nothing() -> None:
    puller, _ = _pair(None)
    holder, _ = _asked(puller)
    assert not puller.lookup.leave(holder)
    assert not puller.lookup.is_fetching(holder)


def test_a_link_that_cannot_read_the_peer_is_not_used() -> None:
    puller, owner = _pair(None)
    owner.compute(PROMPT)
    puller.lookup.on_peer(PeerLost(peer=H, reason="it connects anew"), 0)
    holder, wanted = _asked(puller)
    granted = _grant(owner, wanted)
    restored = puller.lookup.on_peer(FromPeer(peer=H, message=granted), 1)
    assert restored == [Restored.found_here(holder, 0)]
    assert _sent(puller) == PullRead(pull=1, over=True)


# --- several pages ------------------------------------------------------------------------------


def _named(puller: Worker, owner: Worker, now_s: float = 0) -> PullGranted:
    """The puller names the chain in several messages; the answer to the last one."""
    answers = [
        owner.grants.wanted(P, send.message, now_s)
        for send in puller.peers.take_outbox()
        if isinstance(send, SendPeer) and isinstance(send.message, PullWanted)
    ]
    *others, last = answers
    assert len(answers) > 1 and not any(others) and last is not None
    return last


def _copy_page(puller: Worker, owner: Worker, granted: PullGranted, now_s: float) -> PullRead:
    """What the puller says when the page is read."""
    assert puller.lookup.on_peer(FromPeer(peer=H, message=granted), now_s) == []
    while True:
        (command,) = puller.peers.take_outbox()
        if isinstance(command, SendPeer):
            assert isinstance(command.message, PullRead)
            return command.message
        _read(command, puller, owner)
        assert puller.lookup.on_peer(_done(command), now_s) == []


@pytest.mark.parametrize("windows", [(None,), (None, 6), (5, None), (9,)])
def test_a_long_prefix_comes_in_pages(windows: tuple[int | None, ...]) -> None:
    puller, owner = _pair(*windows, pages=(2, 2))
    owner.compute(PROMPT)
    holder = puller.open(PROMPT, 5)
    assert holder is not None
    answer: PullGranted | PullSettled = _named(puller, owner)
    ends = []
    while isinstance(answer, PullGranted):
        ends.append((answer.end, answer.blocks))
        read = _copy_page(puller, owner, answer, 1)
        assert read.over == (answer.end == 5)
        answer = owner.grants.read(P, read, 2)
    assert ends == [(2, 5), (4, 5), (5, 5)]
    assert not list(owner.tables.held())
    restored = puller.lookup.on_peer(FromPeer(peer=H, message=answer), 3)
    assert restored == [Restored(holder=holder, tokens=20, origin=PrefixOrigin.PEER)]
    puller.tables.release(holder)
    puller.validate()
    hashes = puller.chain(PROMPT).full(20).hashes()
    assert puller.tables.try_open(puller.holder(), 22, hashes=hashes, now_s=4) == 20


def test_a_peer_that_loses_the_second_page_spoils_the_first() -> None:
    """Nothing is used; the puller hears of it before it reads on."""
    puller, owner = _pair(None, pages=(2, 2))
    owner.compute(PROMPT)
    holder = puller.open(PROMPT, 5)
    assert holder is not None
    first = _copy_page(puller, owner, _named(puller, owner), 1)
    second = owner.grants.read(P, first, 2)
    assert isinstance(second, PullGranted)
    read = _copy_page(puller, owner, second, 3)
    owner.grants.expire(2 + TTL_S)
    assert owner.compute([7] * 32 * SIZE)
    settled = owner.grants.read(P, read, 2 + TTL_S)
    assert settled == PullSettled(pull=1, held=False)
    restored = puller.lookup.on_peer(FromPeer(peer=H, message=settled), 50)
    assert restored == [Restored.found_here(holder, 0)]
    assert not puller.peers.take_outbox()
    puller.validate()
    assert not puller.tables.device.tree.blocks


def test_a_peer_that_grants_no_second_page_gives_nothing() -> None:
    puller, owner = _pair(None, pages=(2, 2))
    owner.compute(PROMPT)
    holder = puller.open(PROMPT, 5)
    assert holder is not None
    assert not _copy_page(puller, owner, _named(puller, owner), 1).over
    settled = PullSettled(pull=1, held=True)
    restored = puller.lookup.on_peer(FromPeer(peer=H, message=settled), 2)
    assert restored == [Restored.found_here(holder, 0)]
    puller.validate()


def test_the_lease_begins_anew_with_each_page() -> None:
    puller, owner = _pair(None, pages=(2, 2))
    owner.compute(PROMPT)
    assert puller.open(PROMPT, 5) is not None
    read = _copy_page(puller, owner, _named(puller, owner), 1)
    assert isinstance(owner.grants.read(P, read, TTL_S - 1), PullGranted)
    owner.grants.expire(TTL_S + 1)
    assert list(owner.tables.held())
    owner.grants.expire(2 * TTL_S - 1)
    assert not list(owner.tables.held())


@pytest.mark.parametrize(
    ("blocks", "end"), [(4, 4), (5, 2), (5, 6)], ids=["another chain", "no page", "too far"]
)
def test_a_next_page_that_does_not_follow_is_refused(blocks: int, end: int) -> None:
    puller, owner = _pair(None, pages=(2, 2))
    owner.compute(PROMPT)
    holder = puller.open(PROMPT, 5)
    assert holder is not None
    first = _named(puller, owner)
    read = _copy_page(puller, owner, first, 1)
    second = owner.grants.read(P, read, 2)
    assert isinstance(second, PullGranted)
    wrong = replace(second, blocks=blocks, end=end)
    restored = puller.lookup.on_peer(FromPeer(peer=H, message=wrong), 3)
    assert restored == [Restored.found_here(holder, 0)]
    assert _sent(puller) == PullRead(pull=1, over=True)
    puller.validate()


def test_a_long_pull_fits_into_its_messages() -> None:
    """However scattered the blocks: several messages of names and of places."""
    layout, count = _layout(None, 64), 8000
    owner, puller = (Worker(name, layout, blocks=3 * count) for name in (H, P))
    tokens = [*range(count * SIZE)]
    names, kept = owner.chain(tokens), owner.holder()
    assert owner.tables.try_open(kept, 0, now_s=0) == 0
    for end in range(SIZE, len(tokens) + 1, SIZE):
        assert owner.tables.try_grow(kept, end, now_s=0)
        assert owner.tables.try_grow(owner.holder(), SIZE, now_s=0)  # takes the block between
    owner.tables.fill(kept, names.full(len(tokens)).hashes())
    puller.lookup.on_peer(FromPeer(peer=H, message=owner.hello), 0)
    holder = puller.open(tokens, count)
    assert holder is not None
    for one in (*puller.peers.outbox,):
        assert isinstance(one, SendPeer)
        _check_size(one.message)
    answer: PullGranted | PullSettled = _named(puller, owner)
    pages = 0
    while isinstance(answer, PullGranted):
        _check_size(answer)
        pages += 1
        answer = owner.grants.read(P, _copy_page(puller, owner, answer, 1), 2)
    assert pages > 2
    (restored,) = puller.lookup.on_peer(FromPeer(peer=H, message=answer), 3)
    assert restored.tokens == (count - 1) * SIZE, "the last token is computed"


def _check_size(message: PeerMessage) -> None:
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
    puller, _ = _pair(None, has_pool=True)
    nodes = PlayedNodes(puller.lookup)
    holder = puller.open(PROMPT, peer)
    assert holder is not None and not puller.peers.take_outbox()
    nodes.sought()
    assert nodes.found(host) == []
    assert puller.lookup.is_fetching(holder)
    return "peer" if puller.peers.take_outbox() else "pool"


# --- random schedules ---------------------------------------------------------------------------


class Schedule:
    """Messages in order per direction, reads in two halves, links that break; any order between."""

    def __init__(self, seed: int, windows: Windows, pages: tuple[int, int]) -> None:
        self.draw, self.now_s = random.Random(seed), 0.0
        self.puller, self.owner = _pair(*windows, blocks=24, read_bytes=200, pages=pages)
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
        if self.puller.lookup.is_fetching(holder):
            self.waiting.add(holder)
            if self.draw.random() < 0.2:
                self._drop(holder)
        else:
            self.puller.tables.release(holder)

    def _drop(self, holder: Holder) -> None:
        if not self.puller.lookup.leave(holder):
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
            self._end(self.puller.lookup.on_peer(FromPeer(peer=H, message=message), self.now_s))
            return
        match message:
            case PullWanted():
                granted = self.owner.grants.wanted(P, message, self.now_s)
                self.wires[P] += [] if granted is None else [granted]
            case PullRead():
                self.wires[P].append(self.owner.grants.read(P, message, self.now_s))

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
        self._end(self.puller.lookup.on_peer(_done(job, error), self.now_s))

    def _collect(self) -> None:
        for command in self.puller.peers.take_outbox():
            if isinstance(command, PullBlocks):
                self.jobs.append((command, False))
            else:
                self.wires[H].append(command.message)

    def _break(self) -> None:
        """Each side notices; what was on its way is lost. They connect anew."""
        self.wires = {P: [], H: []}
        self.owner.grants.lost(P)
        self._end(self.puller.lookup.on_peer(PeerLost(peer=H, reason="broken"), self.now_s))
        self.wires[P].append(self.owner.hello)

    def _tick(self) -> None:
        self.owner.grants.expire(self.now_s)
        self._end(self.puller.lookup.expire(self.now_s))

    def _end(self, restored: list[Restored]) -> None:
        for one in restored:
            assert one.holder in self.waiting, "restored twice, or never opened"
            self.waiting.discard(one.holder)
            self.peer_tokens += one.tokens if one.origin is PrefixOrigin.PEER else 0
            self.puller.tables.release(one.holder)


@pytest.mark.parametrize("windows", [(None,), (None, 6), (9, None, 5)])
@pytest.mark.parametrize(("pages", "least"), [((HASHES_MOST, 2**20), 300), ((2, 3), 100)])
def test_any_schedule_ends_every_pull_and_names_nothing_wrong(
    windows: Windows, pages: tuple[int, int], least: int
) -> None:
    pulled = 0
    for seed in range(8):
        schedule = Schedule(seed, windows, pages)
        schedule.run(300)
        assert not schedule.waiting
        for worker in (schedule.puller, schedule.owner):
            worker.validate()
            assert not list(worker.tables.held())
            assert worker.tables.free_blocks == worker.tables.blocks
        pulled += schedule.peer_tokens
    assert pulled > least, "hardly anything was pulled"
