"""The tree of runs beside a naive tree of single blocks, under each eviction policy."""

from __future__ import annotations

import itertools
from array import array

import pytest
from hypothesis import given, settings
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
from kvpool.core.blocks.eviction import open_policy, policies
from kvpool.core.blocks.news import Strand
from kvpool.core.blocks.runs import Run, RunTree, common_end, path
from kvpool.core.layout.hashes import BlockHash, BlockHashes
from tests.unit.naive_tree import NaiveTree, Path, hashes_of, names_of

_paths = st.lists(st.integers(0, 1), min_size=1, max_size=9).map(tuple)
Held = tuple[Path, Run | None]


def _append(tree: RunTree, tail: Run | None, names: BlockHashes, places: range) -> Run:
    """Holds the chain `names` to its end; what is missing behind `tail` gets these places."""
    while (depth := tail.end if tail is not None else 0) < len(names):
        known = tree.child(tail, names.at(depth))
        if known is not None:
            tail = tree.hold_next(known, common_end(names, known.hashes, depth))
        else:
            tail = tree.append(tail, names[depth:].packed, (array("i", places[depth:]),))
    assert tail is not None
    return tail


def _serve(tree: RunTree, path_: Path) -> Run:
    """The chain, held; its blocks have their depth as place."""
    names = names_of(path_)
    run, depth = tree.find(names)
    tail = tree.hold(run, depth) if run is not None else None
    return _append(tree, tail, names, range(len(names)))


class _Machine(RuleBasedStateMachine):
    """Requests come, grow and go; blocks are evicted, also while a chain is kept."""

    policy = "lru"
    held = Bundle("held")

    def __init__(self) -> None:
        super().__init__()
        self.tree = RunTree(open_policy(self.policy))
        self.naive = NaiveTree()

    @rule(target=held, path_=_paths)
    def serve(self, path_: Path) -> Held:
        assert self.tree.find(names_of(path_))[1] == self.naive.match(path_)
        tail = _serve(self.tree, path_)
        self.naive.hold(path_)
        return path_, tail

    @rule(target=held, path_=_paths)
    def serve_what_is_cached(self, path_: Path) -> Held:
        run, depth = self.tree.find(names_of(path_))
        found = path_[: self.naive.match(path_)]
        assert depth == len(found)
        self.naive.hold(found)
        return found, self.tree.hold(run, depth) if run is not None else None

    @rule(target=held, request=consumes(held), more=_paths)
    def grow(self, request: Held, more: Path) -> Held:
        """The request's answer fills blocks that others may have filled before."""
        path_, tail = request
        longer = (*path_, *more[:3])
        tail = _append(self.tree, tail, names_of(longer), range(len(longer)))
        for end in range(len(path_) + 1, len(longer) + 1):
            self.naive.hold_end(longer[:end])
        return longer, tail

    @rule(request=consumes(held))
    def finish(self, request: Held) -> None:
        path_, tail = request
        if tail is not None:
            self.tree.release(tail)
        self.naive.release(path_)

    @rule(path_=_paths, data=st.data())
    def evict_while_a_chain_is_kept(self, path_: Path, data: st.DataObject) -> None:
        run, depth = self.tree.find(names_of(path_))
        if run is None:
            return
        tail = self.tree.hold(run, depth, used=False)
        self.naive.hold(path_[:depth], used=False)
        self.same()
        if self.tree.idle:
            self._evict(data)
        self.tree.release(tail)
        self.naive.release(path_[:depth])

    @precondition(lambda self: self.tree.idle)
    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        self._evict(data)

    def _evict(self, data: st.DataObject) -> None:
        count = data.draw(st.integers(1, self.tree.idle))
        gone = self.tree.evict(count)
        victims = [name for one in gone for name in reversed(BlockHashes(one.hashes))]
        assert len(victims) == count
        if self.policy == "lru":
            assert victims == [hashes_of(self.naive.evict())[-1] for _ in victims]
            return
        for victim in victims:
            self.naive.evict_leaf(victim)

    @invariant()
    def same(self) -> None:
        holders, uses = _blocks(self.tree)
        nodes = {hashes_of(path_)[-1]: node for path_, node in self.naive.nodes.items()}
        assert holders == {name: node.holders for name, node in nodes.items()}
        if self.policy == "lru":
            assert uses == {name: node.uses for name, node in nodes.items()}
        assert self.tree.idle == self.naive.idle
        self.tree.validate()
        for run in self.tree:
            assert list(run.columns[0]) == list(range(run.start, run.end))

    @invariant()
    def strands_are_ranges_below_older_ones(self) -> None:
        seen = 0
        for number in self.tree.strands():
            strand = self.tree.strand(number)
            assert strand is not None and strand.parent < number
            hashes = self.tree.hashes(number, strand.begin, strand.end)
            assert len(BlockHashes(hashes)) == strand.end - strand.begin
            seen += strand.end - strand.begin
        assert seen == self.tree.blocks


def _blocks(tree: RunTree) -> tuple[dict[BlockHash, int], dict[BlockHash, int]]:
    holders, uses = {}, {}
    for run in tree:
        for depth in range(run.start, run.end):
            holders[run.at(depth)], uses[run.at(depth)] = run.holders, run.uses
    return holders, uses


@pytest.mark.parametrize("policy", policies())
def test_the_tree_equals_the_naive_one(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eviction, "_EVENTS_PER_UPDATE", 8)
    monkeypatch.setattr(eviction, "_LEAST_REMEMBERED", 4)
    machine = type("_PolicyMachine", (_Machine,), {"policy": policy})
    limits = settings(max_examples=150, stateful_step_count=40)
    run_state_machine_as_test(machine, settings=limits)


def test_what_one_request_appends_is_one_run() -> None:
    tree = RunTree(open_policy("lru"))
    tail = _append(tree, None, names_of((1, 2, 3)), range(3))
    assert _append(tree, tail, names_of((1, 2, 3, 4, 5)), range(5)) is tail
    assert [run.blocks for run in tree] == [5]
    tree.release(tail)
    again = _serve(tree, (1, 2, 3, 4, 5, 6))
    assert [run.blocks for run in path(again)] == [1, 5], "others have seen the first five alone"
    tree.validate()


def test_a_run_is_split_where_prompts_diverge_and_its_end_stays_the_same_object() -> None:
    tree = RunTree(open_policy("lru"))
    first = _serve(tree, (1, 2, 3, 4))
    second = _serve(tree, (1, 2, 9))
    assert (first.start, first.end, second.start, second.end) == (2, 4, 2, 3)
    upper = first.parent
    assert upper is not None and second.parent is upper
    assert (upper.holders, first.holders, second.holders) == (2, 1, 1)
    assert upper.number == first.number < second.number
    assert tree.strand(second.number) == Strand(first.number, 2, 3)
    tree.validate()


def test_a_held_chain_survives_a_full_eviction() -> None:
    tree = RunTree(open_policy("lru"))
    for path_ in ((1, 2, 3), (1, 4)):
        tree.release(_serve(tree, path_))
    run, depth = tree.find(names_of((1, 2)))
    assert run is not None
    kept = tree.hold(run, depth)
    assert tree.idle == 2
    with pytest.raises(AssertionError, match="3 of 2 idle"):
        tree.evict(3)
    tree.evict(2)
    assert tree.blocks == 2
    tree.release(kept)
    tree.evict(2)
    assert tree.blocks == 0
    tree.validate()


def test_a_block_needs_its_chain_held() -> None:
    tree = RunTree(open_policy("lru"))
    root = _serve(tree, (1,))
    tree.release(root)
    with pytest.raises(AssertionError, match="held"):
        tree.append(root, hashes_of((1, 2))[-1], (array("i", [0]),))


def test_no_name_far_behind_the_first_different_one_is_asked_for() -> None:
    class Asked:
        def __init__(self, names: BlockHashes) -> None:
            self.names, self.most = names, 0

        def __len__(self) -> int:
            return len(self.names)

        def at(self, depth: int) -> BlockHash:
            self.most = max(self.most, depth)
            return self.names.at(depth)

    tree = RunTree(open_policy("lru"))
    _serve(tree, tuple(range(1000)))
    for common in (1, 15, 16, 17, 100, 500):
        asked = Asked(names_of((*range(common), *itertools.repeat(-1 % 2**32, 1000 - common))))
        assert tree.find(asked)[1] == common
        assert asked.most <= 3 * common + 32
    assert tree.find(names_of(tuple(range(1000))))[1] == 1000


class _Asked(BlockHashes):
    """Knows which of its hashes were asked for."""

    __slots__ = ("depths",)

    def __init__(self, packed: bytes) -> None:
        super().__init__(packed)
        self.depths: list[int] = []

    def at(self, depth: int) -> BlockHash:
        self.depths.append(depth)
        return super().at(depth)


@given(st.integers(0, 40), st.integers(1, 300), st.integers(0, 300), st.integers(0, 300))
def test_names_are_followed_to_where_they_differ(
    start: int, common: int, others: int, more: int
) -> None:
    """Along hashes of `common` + `others` blocks, by names that go on for `more` blocks."""
    shared = [b"s%031d" % index for index in range(start + common)]
    hashes = b"".join([*shared[start:], *(b"o%031d" % index for index in range(others))])
    names = _Asked(b"".join([*shared, *(b"m%031d" % index for index in range(more))]))
    assert common_end(names, bytearray(hashes), start) == start + common
    assert max(names.depths, default=start) < start + 2 * common + 16
    assert len(names.depths) <= 2 * common.bit_length() + 3
