"""One tier of a pool node over random schedules, against a model that searches everything."""

from __future__ import annotations

from array import array
from random import Random

import pytest

from kvpool.core.blocks.eviction import open_policy, policies
from kvpool.core.blocks.runs import path as runs_of
from kvpool.core.layout.hashes import BlockHash, BlockHashes, TenantBlocks
from kvpool.core.node import changes
from kvpool.core.node.block_index import BlockAt
from kvpool.core.node.changes import Changes
from kvpool.core.node.events import DropRouter, RouterCall
from kvpool.core.node.restored import RestoredBlock, restore
from kvpool.core.node.tier_blocks import (
    HeldChain,
    NewChain,
    PoolPlace,
    StrandPart,
    TierBlocks,
    blocks_of,
    places_of,
)
from kvrelay.messages import PoolUpdate
from kvrelay.types import Incarnation, Tier
from router.core.state.directory import Directory
from tests.unit.directory_kit import known
from tests.unit.naive_tree import Path, hashes_of

NODE = Incarnation("node")
PLACES = 24


class World:
    """A host tier, and what must be in it: path |-> (place, whether it is sound)."""

    def __init__(self, seed: int, policy: str) -> None:
        self.random = Random(seed)
        self.tier = TierBlocks(PLACES, open_policy(policy))
        self.model: dict[Path, tuple[int, bool]] = {}
        self.held: list[tuple[Path, HeldChain]] = []
        self.changes = Changes(host=self.tier, disk=TierBlocks(0, open_policy(policy)))
        self.directory = Directory()
        self.call: RouterCall | None = None
        self.calls = self.now_s = self.healed = self.evicted = 0

    def path(self) -> Path:
        return tuple(self.random.choice((0, 0, 0, 1)) for _ in range(self.random.randint(1, 12)))

    def step(self) -> None:
        self.now_s += 1
        actions = [self.hold, self.release, self.release, self.spoil, self.router]
        actions += [self.store] * 3
        self.random.choice(actions)()
        self.check()

    # --- what happens ---------------------------------------------------------------------------

    def store(self) -> None:
        """The missing and the spoiled blocks of a chain, as one chain, or only its end."""
        spoiled = [path for path, (_, sound) in self.model.items() if not sound]
        path = self.random.choice([self.path(), self.path(), *spoiled])
        start = min(self._sound(path), self.random.randrange(len(path)))
        parent = path[:start]
        if parent and parent not in self.model:
            return
        names = hashes_of(path)[start:]
        below = hashes_of(parent)[-1] if parent else None
        before = set(self.model)
        places = self.tier.reserve(len(names), below=[below])
        self._evicted()
        assert not parent or parent in self.model, "room is not made of what is continued"
        self.evicted += len(before) - len(self.model)
        names = names[: len(places)]
        chain = NewChain(
            parent=below,
            hashes=BlockHashes.of(names),
            places=array("i", places),
            tenant=str(path[0]),
        )
        new = [
            self.tier.hash_at(BlockAt(strand, depth))
            for strand, start, end in self.tier.adopt(chain, self.now_s)
            for depth in range(start, end)
        ]
        expected = []
        for depth, (name, place) in enumerate(zip(names, places, strict=True)):
            at = path[: start + depth + 1]
            if at not in self.model or not self.model[at][1]:
                self.healed += at in self.model
                self.model[at] = (place, True)
                expected.append(name)
        assert new == expected

    def hold(self) -> None:
        path = self.path()
        chain = self.tier.hold(BlockHashes.of(hashes_of(path)))
        assert blocks_of(chain) == self._sound(path)
        self.held.append((path[: blocks_of(chain)], chain))

    def release(self) -> None:
        if self.held:
            _, chain = self.held.pop(self.random.randrange(len(self.held)))
            self.tier.release(chain)

    def spoil(self) -> None:
        path = self.random.choice([self.path(), *self.model])
        held = any(path == chain[: len(path)] for chain, _ in self.held)
        if not held:
            there = path in self.model and self.model[path][1]
            assert self.tier.spoil(hashes_of(path)[-1]) == there
            if there:
                self.model[path] = (self.model[path][0], False)

    def router(self) -> None:
        """It calls, or has taken its last message."""
        if self.call is None:
            self.calls += 1
            self.call = RouterCall(self.calls)
            self.changes.called(self.call)
        else:
            self.changes.took(self.call)
        self.tell()

    def tell(self) -> int:
        """Returns the number of messages."""
        commands = self.changes.flush()
        for command in commands:
            if isinstance(command, DropRouter):
                self.call = None
                self.directory.lost(NODE)
                continue
            sizes = [sum(len(s.hashes) for s in b.stored) // 32 for b in command.blocks]
            assert all(size <= changes.PAGE_BLOCKS for size in sizes)
            update = PoolUpdate(sequence=command.sequence, node=NODE, blocks=command.blocks)
            self.directory.updated(update)
            self.directory.validate()
        return len(commands)

    # --- what must be ---------------------------------------------------------------------------

    def _sound(self, path: Path) -> int:
        for length in range(len(path)):
            if not self.model.get(path[: length + 1], (0, False))[1]:
                return length
        return len(path)

    def _evicted(self) -> None:
        """Takes from the model what the tier has evicted: never a parent, never what is held."""
        self.model = {
            path: block for path, block in self.model.items() if hashes_of(path)[-1] in self.tier
        }
        assert all(path[:-1] in self.model for path in self.model if len(path) > 1)

    def check(self) -> None:
        self.tier.validate()
        assert self.tier.cached == len(self.model) == len(set(self.tier))
        for path, (place, sound) in self.model.items():
            names = hashes_of(path)
            at = self.tier.find(names[-1])
            assert at is not None and at.depth == len(path) - 1
            assert self.tier.place(at) == place
            assert self.tier.serves(names[-1]) == sound != self.tier.is_spoiled(at)
            assert self.tier.parent(at) == (names[-2] if len(path) > 1 else None)
        path = self.path()
        assert self.tier.match(BlockHashes.of(hashes_of(path))) == self._sound(path)
        for path, chain in self.held:
            blocks = [self.model[path[: end + 1]] for end in range(len(path))]
            assert places_of(chain, 1) == tuple(place for place, _ in blocks[1:])
        held = {part for _, chain in self.held for part in runs_of(chain)}
        assert self.tier.held == sum(part.blocks for part in held)

    def check_router(self) -> None:
        if self.call is None:
            self.router()
        self.changes.took(self.call or RouterCall(0))
        while self.tell() and self.call is not None:
            self.changes.took(self.call)
        if self.call is not None:
            served = {hashes_of(path)[-1] for path in self.model if self._sound(path) == len(path)}
            assert known(self.directory).get(NODE, {}).get(Tier.HOST, set()) == served


@pytest.mark.parametrize("policy", policies())
@pytest.mark.parametrize("seed", range(5))
def test_random_schedules(seed: int, policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changes, "PAGE_BLOCKS", 3)
    world = World(seed, policy)
    for step in range(600):
        world.step()
        if step % 20 == 19:
            world.check_router()
    assert world.healed > 10 and world.evicted > 100, "the schedule does something"


def _store(tier: TierBlocks, path: Path, skip: int, tenant: str, now_s: float) -> None:
    names = hashes_of(path)
    places = tier.reserve(len(path) - skip, below=())
    chain = NewChain(
        parent=names[skip - 1] if skip else None,
        hashes=BlockHashes.of(names[skip:]),
        places=array("i", places),
        tenant=tenant,
    )
    tier.adopt(chain, now_s)


def test_blocks_are_told_by_tenant_with_their_ages() -> None:
    tier = TierBlocks(4, open_policy("lru"))
    _store(tier, (1,), 0, "x", 1.0)
    _store(tier, (1, 2), 1, "", 2.0)
    _store(tier, (3,), 0, "", 3.0)
    of_x = TenantBlocks(tenant="x", blocks=2, oldest_s=9.0, newest_s=8.0)
    nobodys = TenantBlocks(tenant="", blocks=1, oldest_s=7.0, newest_s=7.0)
    assert tier.ages.cached(10.0) == [of_x, nobodys], "a chain is of one tenant"
    _store(tier, (5, 6, 7), 0, "y", 4.0)
    of_y = TenantBlocks(tenant="y", blocks=3, oldest_s=6.0, newest_s=6.0)
    assert tier.ages.cached(10.0) == [of_y, nobodys]


def test_a_block_that_is_elsewhere_ends_the_chain() -> None:
    tier = TierBlocks(8, open_policy("lru"))
    _store(tier, (1, 2), 0, "", 0.0)
    strange = BlockHashes.of([*hashes_of((7,)), hashes_of((1, 2))[-1], *hashes_of((8,))])
    places = tier.reserve(3, below=())
    chain = NewChain(parent=None, hashes=strange, places=array("i", places))
    assert tier.adopt(chain, 0.0) == [StrandPart(strand=2, start=0, end=1)]
    tier.validate()
    assert tier.free == 5 and BlockHash(strange.at(2)) not in tier


@pytest.mark.parametrize(
    ("written", "evicted"),
    [
        ((1, 2, 3, 4), [(1, 2), (1, 3), (1,), (5,)]),
        ((9, 2, 3, 4), [(1, 2), (1, 3), (5,), (1,)]),
        ((1, 8, 3, 4), [(1, 3), (5,), (1, 2), (1,)]),
    ],
)
def test_restored_blocks_leave_in_the_order_of_writing(
    written: tuple[int, ...], evicted: list[Path]
) -> None:
    """A block leaves after all below it. One whose parent is lost is not restored."""
    paths = [(1,), (1, 2), (1, 3), (5,)]
    tier = TierBlocks(5, open_policy("lru"))
    blocks = [_restored(path, place, written[place]) for place, path in enumerate(paths)]
    assert restore(tier, [*blocks, _restored((7, 8), 4, 5)]) == 4
    tier.validate()
    assert tier.free == 1
    tier.reserve(1, below=())
    gone = []
    while tier.cached:
        before = set(tier)
        tier.reserve(1, below=())
        tier.validate()
        (name,) = before - set(tier)
        gone += [path for path in paths if hashes_of(path)[-1] == name]
    assert gone == evicted


def _restored(path: Path, place: int, written: int) -> RestoredBlock:
    names = hashes_of(path)
    parent = names[-2] if len(path) > 1 else None
    return RestoredBlock(hash=names[-1], parent=parent, place=PoolPlace(place), written=written)
