"""What eviction policies keep, and what the learnt one learns."""

from __future__ import annotations

import itertools
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool.core.blocks import eviction
from kvpool.core.blocks.eviction import (
    LeastReuseDensity,
    ReuseDensity,
    open_policy,
    policies,
)
from kvpool.core.blocks.runs import RunPolicy, RunTree
from kvpool.core.layout.hashes import BlockHashes
from kvrelay.errors import ConfigError


class _Cache:
    """`size` blocks without common prefixes."""

    def __init__(self, policy: RunPolicy, size: int) -> None:
        self.tree, self.size = RunTree(policy), size

    def found(self, name: int) -> bool:
        """Ask for a block; it is cached afterwards."""
        names = BlockHashes(name.to_bytes(32, "big"))
        run, hit = self.tree.find(names)
        if run is None:
            if self.tree.blocks == self.size:
                self.tree.evict(1)
            run = self.tree.append(None, names.packed, (array("i", [0]),))
        else:
            self.tree.hold(run, 1)
        self.tree.release(run)
        return bool(hit)


def test_an_unknown_policy_is_refused_with_those_that_exist() -> None:
    with pytest.raises(ConfigError, match=r"'fifo'.*lru, reuse"):
        open_policy("fifo")


@pytest.mark.parametrize("policy", policies())
def test_the_block_that_was_used_again_stays(policy: str) -> None:
    cache = _Cache(open_policy(policy), 2)
    for name in (1, 2, 1, 3):
        cache.found(name)
    assert {int.from_bytes(run.first, "big") for run in cache.tree} == {1, 3}


def _hit_share(policy: str) -> float:
    """30 blocks asked for in turn, between each two of them three that never come again."""
    cache, once = _Cache(open_policy(policy), 60), itertools.count(1_000)
    hits = 0
    for turn in range(6_000):
        hits += cache.found(turn % 30)
        for _ in range(3):
            cache.found(next(once))
    return hits / 6_000


def test_the_learnt_policy_finds_out_what_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop of 30 with what comes between is 120 blocks: LRU never finds one in 60."""
    monkeypatch.setattr(eviction, "_EVENTS_PER_UPDATE", 512)
    assert _hit_share("lru") == 0
    assert _hit_share("reuse") > 0.9


def test_a_block_that_comes_back_after_eviction_teaches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eviction, "_EVENTS_PER_UPDATE", 8)
    policy = LeastReuseDensity()
    cache = _Cache(policy, 2)
    before = policy.history.densities[7][3]
    assert not any(cache.found(turn % 3) for turn in range(60))
    assert policy.history.densities[7][3] < before  # each came back sooner than that
    assert {run.uses for run in cache.tree} == {8}


_events = st.lists(st.tuples(st.booleans(), st.integers(0, 3), st.integers(0, 2**20)), max_size=60)


@given(_events)
def test_density_falls_with_idle_time_and_rises_with_uses(
    events: list[tuple[bool, int, int]],
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(eviction, "_EVENTS_PER_UPDATE", 5)
        history = ReuseDensity(4)
        for reused, level, idle_time in events:
            (history.saw_reuse if reused else history.saw_eviction)(level, idle_time, 1)
    assert len(history.densities) == 4
    for by_age in history.densities:
        assert by_age == sorted(by_age, reverse=True)
    for by_level in zip(*history.densities, strict=True):
        assert [*by_level] == sorted(by_level)


def test_a_run_that_goes_in_parts_is_remembered_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    policy, told = LeastReuseDensity(), list[tuple[int, int]]()
    monkeypatch.setattr(policy.history, "saw_reuse", lambda level, _, n: told.append((level, n)))
    tree = RunTree(policy)
    hashes = b"".join(name.to_bytes(32, "big") for name in range(9))
    for _ in range(2):
        run = tree.append(None, hashes, (array("i", range(9)),))
        tree.release(run)
        for blocks in (2, 3, 4):
            tree.evict(blocks)
    run = tree.append(None, hashes, (array("i", range(9)),))
    assert run.uses == 3
    assert told == [(1, 9), (2, 9)]
    tree.validate()


def test_every_policy_counts_what_it_holds() -> None:
    for name in policies():
        cache = _Cache(open_policy(name), 5)
        for block in (1, 2, 3, 1):
            cache.found(block)
        assert cache.tree.idle == 3
        cache.tree.validate()
