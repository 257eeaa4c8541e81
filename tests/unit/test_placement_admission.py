from __future__ import annotations

import pytest

from kvrelay.messages import Counters
from kvrelay.types import Incarnation, Role
from router.admission import ReleaseClock, refusal_of, refused_by_worker
from router.placement import Placement, WorkerView, fits, least_loaded
from tests.unit.router_kit import key, spec, view


def place(*workers: WorkerView, n: int = 1, tried: tuple[str, ...] = ()) -> Placement | None:
    return least_loaded(spec(n=n), workers, tried=[Incarnation(name) for name in tried])


def placed(decode: str, prefill: str | None) -> Placement:
    return Placement(
        decode=Incarnation(decode), prefill=None if prefill is None else Incarnation(prefill)
    )


def test_the_emptiest_decode_worker_and_the_shortest_prefill_queue() -> None:
    p1, p2 = view("p1", Role.PREFILL), view("p2", Role.PREFILL)
    d1, d2 = view("d1", Role.DECODE), view("d2", Role.DECODE)
    p1.prompt_tokens[key("x")] = 10
    d1.sequences[key("x")] = 1
    assert place(p1, p2, d1, d2) == placed("d2", "p2")


def test_ties_go_to_the_first() -> None:
    workers = [view("p1", Role.PREFILL), view("p2", Role.PREFILL)]
    workers += [view("d1", Role.DECODE), view("d2", Role.DECODE)]
    assert place(*workers) == placed("d1", "p1")


def test_load_is_a_share_of_the_batch() -> None:
    p = view("p", Role.PREFILL)
    small, large = view("small", Role.DECODE, places=2), view("large", Role.DECODE, places=10)
    small.sequences[key("x")] = 1
    large.sequences[key("y")] = 2
    assert place(p, small, large) == placed("large", "p")


def test_what_a_worker_says_counts_where_it_is_more_than_what_was_sent() -> None:
    p1, p2 = view("p1", Role.PREFILL), view("p2", Role.PREFILL)
    d1, d2 = view("d1", Role.DECODE), view("d2", Role.DECODE)
    p1.counters = Counters(prefill_waiting_tokens=5)
    d1.counters = Counters(running=3)
    d2.sequences[key("x")] = 2
    assert place(p1, p2, d1, d2) == placed("d2", "p2")


def test_a_worker_of_both_roles_competes() -> None:
    p, d, b = view("p", Role.PREFILL), view("d", Role.DECODE), view("b", Role.BOTH)
    d.sequences[key("x")] = 1
    assert place(p, d, b) == placed("b", None)
    assert place(p, d, b, tried=("b",)) == placed("d", "p")
    assert place(p, d, b, tried=("b", "d")) is None


def test_decode_without_prefill_is_no_pair() -> None:
    assert place(view("d", Role.DECODE)) is None
    assert place(view("p", Role.PREFILL)) is None
    assert place() is None


def test_only_workers_that_it_fits() -> None:
    short = view("short", Role.BOTH, max_model_len=10)
    narrow = view("narrow", Role.BOTH, places=1)
    assert not fits(spec(), short)  # 3 prompt tokens and 8 new ones
    assert fits(spec(), view("b", Role.BOTH, max_model_len=11))
    assert fits(spec(), narrow)
    assert not fits(spec(n=2), narrow)
    assert place(short, narrow, view("b", Role.BOTH), n=2) == placed("b", None)


def test_forget_drops_both_sides() -> None:
    worker = view("b", Role.BOTH)
    worker.sequences[key()] = 2
    worker.prompt_tokens[key()] = 3
    worker.forget(key())
    worker.forget(key())
    assert (worker.decode_load, worker.prefill_load) == (0, 0)


@pytest.mark.parametrize(("taken", "n", "is_full"), [(3, 1, False), (3, 2, True), (4, 1, True)])
def test_refused_when_no_place_is_left(taken: int, n: int, is_full: bool) -> None:
    worker = view("d", Role.DECODE, places=4)
    worker.sequences[key("x")] = taken
    refusal = refusal_of(spec(n=n), worker)
    assert (refusal is not None) == is_full
    if refusal is not None:
        assert refusal.reason == "slots_exhausted"
        assert refusal.message == "all 4 places of every decode worker are taken"


def test_a_workers_reason_is_explained() -> None:
    assert refused_by_worker("draining").message == "the worker is draining"
    assert refused_by_worker("kv_exhausted").reason == "kv_exhausted"
    assert refused_by_worker("new reason").message == "new reason"


def test_the_first_retry_time_is_a_guess_then_the_gap_bounded() -> None:
    clock = ReleaseClock()
    assert clock.retry_after_s() == 1.0
    clock.released(5)
    assert clock.retry_after_s() == 1.0
    clock.released(7)
    assert clock.retry_after_s() == 2.0
    clock.released(7 + 1e6)
    assert clock.retry_after_s() == 30.0
    quick = ReleaseClock()
    for _ in range(3):
        quick.released(1)
    assert quick.retry_after_s() == 0.05
