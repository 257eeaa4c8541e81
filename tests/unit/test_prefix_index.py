"""The prefix index beside the naive one, under each eviction policy."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvpool.core.blocks import eviction
from kvpool.core.blocks.eviction import CachedBlock, LeastReuseDensity, open_policy, policies
from kvpool.core.blocks.prefix_index import PrefixIndex
from kvpool.core.layout.hashes import BlockHash
from kvpool.core.layout.layout import BlockId
from tests.unit.naive_prefix_index import NaiveIndex, Path, hashes_of

_paths = st.lists(st.integers(0, 2), min_size=1, max_size=5).map(tuple)
Held = tuple[Path, list[CachedBlock]]


class _Machine(RuleBasedStateMachine):
    """Requests come, grow and go; blocks are evicted, also while a chain is kept."""

    policy = "lru"
    held = Bundle("held")

    def __init__(self) -> None:
        super().__init__()
        self.eviction = open_policy(self.policy)
        self.index = PrefixIndex(self.eviction)
        self.naive = NaiveIndex(self.policy)
        self.places = itertools.count()

    def _insert(self, block_hash: BlockHash, chain: list[CachedBlock]) -> None:
        place = (BlockId(next(self.places)),)
        parent = chain[-1] if chain else None
        known = block_hash in self.index
        block = self.index.insert(block_hash, parent=parent, place=place)
        assert (block.place == place) != known
        chain.append(block)

    @rule(target=held, path=_paths)
    def serve(self, path: Path) -> Held:
        hashes = hashes_of(path)
        chain = self.index.acquire(hashes)
        assert len(chain) == self.naive.match(path)
        for block_hash in hashes[len(chain) :]:
            self._insert(block_hash, chain)
        self.naive.hold(path)
        return path, chain

    @rule(target=held, path=_paths)
    def serve_what_is_cached(self, path: Path) -> Held:
        chain = self.index.acquire(hashes_of(path))
        found = path[: self.naive.match(path)]
        assert [block.hash for block in chain] == hashes_of(found)
        self.naive.hold(found)
        return found, chain

    @rule(target=held, request=consumes(held), token=st.integers(0, 2))
    def grow(self, request: Held, token: int) -> Held:
        """The request's answer fills a block that others may have filled before."""
        path, chain = request
        longer = (*path, token)
        self._insert(hashes_of(longer)[-1], chain)
        self.naive.hold_end(longer)
        return longer, chain

    @rule(target=held, request=consumes(held))
    def shrink(self, request: Held) -> Held:
        """Lets go of the chain's last block."""
        path, chain = request
        if chain:
            self.index.release(chain[-1:])
            self.naive.release_end(path)
        return path[:-1], chain[:-1]

    @rule(request=consumes(held))
    def finish(self, request: Held) -> None:
        path, chain = request
        self.index.release(chain)
        self.naive.release(path)

    @rule(path=_paths, data=st.data())
    def evict_while_a_chain_is_kept(self, path: Path, data: st.DataObject) -> None:
        chain = self.index.find(hashes_of(path))
        if not chain:
            return
        kept = path[: len(chain)]
        with self.index.kept(chain[-1]):
            self.naive.hold(kept, used=False)
            self.same()
            if self.index.idle:
                self._evict(data)
        self.naive.release(kept)

    @precondition(lambda self: self.index.idle)
    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        self._evict(data)

    def _evict(self, data: st.DataObject) -> None:
        count = data.draw(st.integers(1, self.index.idle))
        victims = self.index.try_evict(count)
        assert victims is not None
        assert [v.hash for v in victims] == [hashes_of(self.naive.evict())[-1] for _ in victims]

    @rule()
    def evict_too_much(self) -> None:
        assert self.index.try_evict(self.index.idle + 1) is None

    @invariant()
    def same(self) -> None:
        blocks = {block.hash: (block.uses, block.holders) for block in self.index}
        nodes = self.naive.nodes.items()
        assert blocks == {hashes_of(path)[-1]: (node.uses, node.holders) for path, node in nodes}
        assert self.index.idle == self.naive.idle
        self.index.validate()

    @invariant()
    def learnt_the_same(self) -> None:
        if isinstance(self.eviction, LeastReuseDensity):
            ours, theirs = self.eviction.history, self.naive.history
            for level, bits in itertools.product(range(8), range(10)):
                assert ours.density(level, 2**bits) == theirs.density(level, 2**bits)


@pytest.mark.parametrize("policy", policies())
def test_index_equals_the_naive_one(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eviction, "_EVENTS_PER_UPDATE", 8)
    monkeypatch.setattr(eviction, "_LEAST_REMEMBERED", 4)
    machine = type("_PolicyMachine", (_Machine,), {"policy": policy})
    limits = settings(max_examples=150, stateful_step_count=40)
    run_state_machine_as_test(machine, settings=limits)


def _serve(index: PrefixIndex, path: Path) -> list[CachedBlock]:
    """Every block of the path is cached and idle afterwards."""
    hashes = hashes_of(path)
    chain = index.acquire(hashes)
    for block_hash in hashes[len(chain) :]:
        parent = chain[-1] if chain else None
        chain.append(index.insert(block_hash, parent=parent, place=(BlockId(0),)))
    index.release(chain)
    return chain


def test_a_kept_chain_survives_a_full_eviction() -> None:
    index = PrefixIndex(open_policy("lru"))
    chain = _serve(index, (1, 2, 3))
    _serve(index, (1, 4))
    with index.kept(chain[1]):
        assert index.idle == 2
        assert index.try_evict(3) is None
        assert index.try_evict(2) is not None
        assert list(index) == chain[:2]
    assert index.try_evict(2) is not None
    assert len(index) == 0
    index.validate()


def test_a_block_needs_its_chain_held() -> None:
    index = PrefixIndex(open_policy("lru"))
    (root,) = _serve(index, (1,))
    with pytest.raises(AssertionError, match="held"):
        index.insert(hashes_of((1, 2))[-1], parent=root, place=(BlockId(0),))


@pytest.mark.parametrize("policy", policies())
def test_a_block_dropped_and_made_again_is_used_no_more_than_its_parent(policy: str) -> None:
    index = PrefixIndex(open_policy(policy))
    first, second = hashes_of((1, 2))
    root = index.insert(first, parent=None, place=(BlockId(0),))
    index.release([index.insert(second, parent=root, place=(BlockId(1),))])
    assert index.try_evict(1) is not None
    child = index.insert(second, parent=root, place=(BlockId(1),))
    index.validate()
    index.release([root, child])
    assert index.try_evict(2) == [child, root]
