"""Requests that wait at the router: in lines that don't hold up one another."""

from __future__ import annotations

from math import inf
from random import Random

from kvrelay.types import Incarnation
from router.core.promises.refusal import Refusal
from router.core.state.waiting import ASK_AGAIN_S, WaitingLine, WaitingRoom

WHY = Refusal(reason="kv_exhausted", message="full")
FREE, OTHER = WaitingLine(1, "free"), WaitingLine(0, "other")


def displaced(priority: int, *workers: str) -> WaitingLine:
    return WaitingLine(priority, f"tier {priority}", frozenset(map(Incarnation, workers)))


def room(*names: tuple[str, WaitingLine]) -> WaitingRoom:
    """(request, line), since 0"""
    waiting = WaitingRoom()
    for name, line in names:
        assert waiting.try_wait(name, line, WHY, 1.0, 0)
    return waiting


def test_each_line_asks_in_its_order_and_lets_the_others_go_on() -> None:
    waiting = room(("a", FREE), ("b", FREE), ("c", OTHER))
    assert waiting.take_next(0.1) is None
    assert waiting.take_next(ASK_AGAIN_S) == ("a", WHY)
    assert waiting.try_wait("a", FREE, WHY, 1.0, 0.3)
    assert waiting.take_next(0.3) == ("c", WHY)
    assert waiting.take_next(0.4) is None  # b waits for a
    assert waiting.take_next(0.3 + ASK_AGAIN_S) == ("a", WHY)
    assert waiting.take_next(0.3 + ASK_AGAIN_S) == ("b", WHY)  # a may be served
    waiting.leave("a")
    assert waiting.try_wait("b", FREE, WHY, 1.0, 0.6)
    assert waiting.take_next(0.9) == ("b", WHY)


def test_a_free_place_is_for_the_first_of_each_line() -> None:
    waiting = room(("a", FREE), ("b", FREE), ("c", OTHER))
    waiting.wake(0.1)
    assert waiting.take_next(0.1) == ("a", WHY)
    assert waiting.take_next(0.1) == ("c", WHY)
    assert waiting.take_next(0.1) is None
    waiting.wake(0.2)
    assert waiting.take_next(0.2) == ("b", WHY)  # a may be served


def test_who_is_held_is_not_tried_before_its_time_unless_it_is_released() -> None:
    waiting = WaitingRoom()
    for name in ("a", "b"):
        assert waiting.try_wait(name, displaced(1, name), WHY, 9.0, 0, held_s=2.0)
    waiting.wake(1.0)
    assert waiting.take_next(1.0) is None
    waiting.release(["a"], 1.0)
    assert waiting.take_next(1.0) == ("a", WHY)
    assert waiting.take_next(2.0) == ("b", WHY)


def test_who_is_held_on_waits_longer_unless_it_asks_already() -> None:
    waiting = room(("a", FREE), ("b", OTHER))
    assert waiting.take_next(ASK_AGAIN_S) == ("a", WHY)
    waiting.hold(["a", "b", "gone"], 2.0)
    assert waiting.take_next(1.9) is None
    assert waiting.take_next(2.0) == ("b", WHY)


def test_who_asks_already_is_not_tried_again_by_a_late_release() -> None:
    waiting = WaitingRoom()
    assert waiting.try_wait("a", FREE, WHY, 9.0, 0, held_s=1.0)
    assert waiting.take_next(1.0) == ("a", WHY)
    waiting.release(["a"], 1.5)
    assert waiting.take_next(1.5) is None


def test_patience_counts_from_the_beginning() -> None:
    waiting = room(("a", FREE))
    assert waiting.waited_s("a", 0.75) == 0.75
    assert waiting.waited_s("b", 0.75) == 0.0
    assert waiting.try_wait("a", FREE, WHY, 1.0, 0.9)
    assert not waiting.try_wait("a", FREE, WHY, 1.0, 1.0)
    waiting.leave("a")
    assert list(waiting) == []


def test_displaced_requests_come_first_in_their_tier_and_higher_tiers_before_them() -> None:
    low, high = displaced(1, "d"), displaced(0, "d")
    waiting = room(("new low", FREE), ("old low", low), ("new high", OTHER), ("old high", high))
    waiting.wake_all(0.1)
    taken = [waiting.take_next(0.1) for _ in range(4)]
    assert [one[0] for one in taken if one] == ["old high", "new high", "old low", "new low"]


def test_workers_are_kept_for_displaced_requests_of_a_priority_before() -> None:
    waiting = room(("a", displaced(1, "d0", "d1")), ("b", displaced(2, "d2")), ("c", FREE))
    assert waiting.kept(1) == {}
    assert waiting.kept(2) == {"d0": inf, "d1": inf}
    assert waiting.kept(3) == {"d0": inf, "d1": inf, "d2": inf}
    waiting.wake(0.1)
    assert waiting.take_next(0.1) == ("a", WHY)
    assert waiting.kept(3) == {"d2": inf}, "a worker is being asked for the other one"


def test_who_does_not_wait_for_memory_keeps_the_places_that_it_needs() -> None:
    waiting, full = WaitingRoom(), Refusal(reason="slots_exhausted", message="full")
    assert waiting.try_wait("a", displaced(1, "d0", "d1"), full, 9.0, 0)
    assert waiting.try_wait("b", displaced(1, "d1"), full, 9.0, 0, places=4)
    assert waiting.kept(2) == {"d0": 1, "d1": 5}


def test_who_could_use_other_workers_changes_its_line_and_keeps_its_patience() -> None:
    before, after = displaced(0), displaced(0, "d")
    waiting = room(("a", before), ("b", before))
    waiting.move("b", after)
    waiting.wake_all(0.1)
    assert {waiting.take_next(0.1), waiting.take_next(0.1)} == {("a", WHY), ("b", WHY)}
    assert waiting.try_wait("b", before, WHY, 9.0, 0.5)
    assert waiting.displaced == {before}
    assert not waiting.try_wait("b", before, WHY, 9.0, 1.0)


def test_whatever_happens_no_one_is_in_two_lines() -> None:
    lines = [FREE, OTHER, displaced(0, "d"), displaced(1, "d", "e"), displaced(1)]
    for seed in range(20):
        random, waiting, now_s = Random(seed), WaitingRoom(), 0.0
        for _ in range(200):
            now_s += random.uniform(0, 0.2)
            name, line = random.choice("abcdef"), random.choice(lines)
            match random.randrange(5):
                case 0 | 1:
                    waiting.try_wait(name, line, WHY, 2.0, now_s)
                case 2:
                    waiting.leave(name)
                case 3 if name in waiting:
                    waiting.move(name, line)
                case _:
                    waiting.take_next(now_s)
            waiting.validate()
