"""The slab table: what each actor may do in which state, and no slab ever lost."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvpool.core.transfer.slabs import Expired, LeaseId, Lent, SlabId, SlabPool, SlabState


def _pool(count: int = 2) -> SlabPool:
    return SlabPool(slab_bytes=1024, count=count)


def _lend(pool: SlabPool, holder: str = "p0") -> Lent:
    lent = pool.try_lend(holder, 1024, 0.0, 10.0)
    assert lent is not None
    return lent


def _state(pool: SlabPool, slab_id: SlabId) -> SlabState:
    held = {slab.slab_id: slab.state for slab in pool.held(0.0)}
    return held.get(slab_id, SlabState.FREE)


def test_lend_fill_release() -> None:
    pool = _pool(1)
    lent = _lend(pool)
    assert pool.mark_filled(lent.slab_id, lent.lease_id)
    pool.release(lent.slab_id, lent.lease_id)
    assert pool.counts()[SlabState.FREE] == 1
    pool.validate()


def test_none_is_free_is_back_pressure_not_an_error() -> None:
    pool = _pool(2)
    _lend(pool)
    lent = _lend(pool)
    assert pool.try_lend("p1", 1, 0.0, 10.0) is None
    assert pool.fence_acknowledged(lent.slab_id, lent.lease_id)
    assert pool.try_lend("p1", 1, 0.0, 10.0) is not None


def test_more_than_a_slab_holds_is_a_bug() -> None:
    with pytest.raises(AssertionError, match="1025"):
        _pool().try_lend("p0", 1025, 0.0, 10.0)


def test_a_late_actor_changes_nothing() -> None:
    pool = _pool(1)
    old = _lend(pool)
    assert pool.fence_acknowledged(old.slab_id, old.lease_id)
    new = _lend(pool, "p1")
    assert new.slab_id == old.slab_id
    assert new.lease_id != old.lease_id
    assert not pool.mark_filled(old.slab_id, old.lease_id)
    assert not pool.begin_fence(old.slab_id, old.lease_id)
    assert not pool.fence_acknowledged(old.slab_id, old.lease_id)
    assert not pool.renew(old.lease_id, 0.0, 99.0)
    with pytest.raises(AssertionError):
        pool.release(old.slab_id, old.lease_id)
    assert _state(pool, new.slab_id) is SlabState.LENT


def test_filled_while_fencing_waits_for_the_acknowledgement() -> None:
    pool = _pool(1)
    lent = _lend(pool)
    assert pool.begin_fence(lent.slab_id, lent.lease_id)
    assert not pool.mark_filled(lent.slab_id, lent.lease_id)
    assert _state(pool, lent.slab_id) is SlabState.FENCING
    assert pool.fence_acknowledged(lent.slab_id, lent.lease_id)
    assert pool.free == 1


def test_a_filled_slab_needs_no_fence_and_does_not_expire() -> None:
    pool = _pool(1)
    lent = _lend(pool)
    pool.mark_filled(lent.slab_id, lent.lease_id)
    assert not pool.begin_fence(lent.slab_id, lent.lease_id)
    assert pool.expire(1e9) == ()
    assert pool.holder_lost("p0") == ()
    assert _state(pool, lent.slab_id) is SlabState.FILLED


def test_a_silent_writers_slab_is_retired_until_replaced() -> None:
    pool = _pool(1)
    lent = _lend(pool)
    assert pool.expire(9.9) == ()
    expected = Expired(slab_id=lent.slab_id, lease_id=lent.lease_id, holder="p0")
    assert pool.expire(10.0) == (expected,)
    assert pool.expire(10.0) == ()
    assert pool.try_lend("p1", 1, 10.0, 1.0) is None
    assert not pool.fence_acknowledged(lent.slab_id, lent.lease_id)
    assert not pool.mark_filled(lent.slab_id, lent.lease_id)
    pool.replaced(lent.slab_id)
    assert pool.free == 1
    pool.validate()


def test_a_fence_without_answer_expires_with_the_lease_that_it_ended() -> None:
    pool = _pool(1)
    lent = _lend(pool)
    pool.begin_fence(lent.slab_id, lent.lease_id)
    assert not pool.renew(lent.lease_id, 9.0, 10.0)
    assert pool.expire(9.9) == ()
    assert [e.slab_id for e in pool.expire(10.0)] == [lent.slab_id]


def test_progress_renews() -> None:
    pool = _pool(1)
    lent = _lend(pool)
    assert pool.renew(lent.lease_id, 9.0, 10.0)
    assert pool.expire(18.9) == ()
    assert len(pool.expire(19.0)) == 1


def test_a_lost_holder_loses_all_it_may_write_to() -> None:
    pool = _pool(4)
    lent, filled, fencing, other = _lend(pool), _lend(pool), _lend(pool), _lend(pool, "p1")
    pool.mark_filled(filled.slab_id, filled.lease_id)
    pool.begin_fence(fencing.slab_id, fencing.lease_id)
    assert {e.slab_id for e in pool.holder_lost("p0")} == {lent.slab_id, fencing.slab_id}
    assert _state(pool, filled.slab_id) is SlabState.FILLED
    assert _state(pool, other.slab_id) is SlabState.LENT


def test_held_says_who_and_how_long() -> None:
    pool = _pool(2)
    lent = pool.try_lend("p7", 5, 3.0, 10.0)
    assert lent is not None
    (held,) = pool.held(4.5)
    assert (held.slab_id, held.state, held.holder) == (lent.slab_id, SlabState.LENT, "p7")
    assert held.age_s == 1.5


class SlabSchedules(RuleBasedStateMachine):
    """Random actors, some late, against a model that knows each lease's state."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = SlabPool(slab_bytes=8, count=3)
        self.now_s = 0.0
        self.ever: list[tuple[SlabId, LeaseId, str]] = []
        self.states: dict[LeaseId, SlabState] = {}  # of current leases
        self.deadlines: dict[LeaseId, float] = {}

    @rule(holder=st.sampled_from("abc"), ttl_s=st.integers(1, 20))
    def lend(self, holder: str, ttl_s: int) -> None:
        lent = self.pool.try_lend(holder, 8, self.now_s, ttl_s)
        assert (lent is None) == (len(self.states) == self.pool.count)
        if lent is not None:
            assert all(lent.lease_id != lease for _, lease, _ in self.ever)
            self.ever.append((lent.slab_id, lent.lease_id, holder))
            self.states[lent.lease_id] = SlabState.LENT
            self.deadlines[lent.lease_id] = self.now_s + ttl_s

    @precondition(lambda self: self.ever)
    @rule(data=st.data())
    def fill(self, data: st.DataObject) -> None:
        slab, lease, _ = data.draw(st.sampled_from(self.ever))
        done = self.pool.mark_filled(slab, lease)
        assert done == (self.states.get(lease) is SlabState.LENT)
        if done:
            self.states[lease] = SlabState.FILLED

    @precondition(lambda self: self.ever)
    @rule(data=st.data())
    def fence(self, data: st.DataObject) -> None:
        slab, lease, _ = data.draw(st.sampled_from(self.ever))
        done = self.pool.begin_fence(slab, lease)
        assert done == (self.states.get(lease) is SlabState.LENT)
        if done:
            self.states[lease] = SlabState.FENCING

    @precondition(lambda self: self.ever)
    @rule(data=st.data())
    def acknowledge(self, data: st.DataObject) -> None:
        slab, lease, _ = data.draw(st.sampled_from(self.ever))
        writable = self.states.get(lease) in (SlabState.LENT, SlabState.FENCING)
        assert self.pool.fence_acknowledged(slab, lease) == writable
        if writable:
            del self.states[lease]

    @precondition(lambda self: self.ever)
    @rule(data=st.data(), ttl_s=st.integers(1, 20))
    def renew(self, data: st.DataObject, ttl_s: int) -> None:
        _, lease, _ = data.draw(st.sampled_from(self.ever))
        lent = self.states.get(lease) is SlabState.LENT
        assert self.pool.renew(lease, self.now_s, ttl_s) == lent
        if lent:
            self.deadlines[lease] = self.now_s + ttl_s

    @rule()
    def release_filled(self) -> None:
        for slab, lease, _ in self.ever:
            if self.states.get(lease) is SlabState.FILLED:
                self.pool.release(slab, lease)
                del self.states[lease]

    @rule(seconds=st.integers(0, 15))
    def expire(self, seconds: int) -> None:
        self.now_s += seconds
        due = {k for k, state in self.states.items() if self._writable(state) and self._due(k)}
        self._retired(self.pool.expire(self.now_s), due)

    @rule(holder=st.sampled_from("abc"))
    def lose(self, holder: str) -> None:
        theirs = {lease for _, lease, who in self.ever if who == holder}
        due = {k for k, state in self.states.items() if self._writable(state) and k in theirs}
        self._retired(self.pool.holder_lost(holder), due)

    @rule()
    def replace(self) -> None:
        for slab, lease, _ in self.ever:
            if self.states.get(lease) is SlabState.RETIRED:
                self.pool.replaced(slab)
                del self.states[lease]

    @invariant()
    def the_counts_agree(self) -> None:
        self.pool.validate()
        counts = self.pool.counts()
        assert sum(counts.values()) == self.pool.count
        for state in SlabState:
            if state is not SlabState.FREE:
                assert counts[state] == list(self.states.values()).count(state)

    def _retired(self, expired: tuple[Expired, ...], due: set[LeaseId]) -> None:
        assert {e.lease_id for e in expired} == due
        self.states.update(dict.fromkeys(due, SlabState.RETIRED))

    def _due(self, lease: LeaseId) -> bool:
        return self.deadlines[lease] <= self.now_s

    @staticmethod
    def _writable(state: SlabState) -> bool:
        return state in (SlabState.LENT, SlabState.FENCING)


SlabSchedules.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
TestSlabSchedules = SlabSchedules.TestCase
