"""Requests that wait at the router: in lines that don't hold up one another."""

from __future__ import annotations

from router.core.state.promises import Refusal
from router.core.state.waiting import ASK_AGAIN_S, WaitingRoom

WHY = Refusal(reason="kv_exhausted", message="full")


def room(*names: tuple[str, str]) -> WaitingRoom:
    """(request, line), since 0"""
    waiting = WaitingRoom()
    for name, line in names:
        assert waiting.try_wait(name, line, WHY, 1.0, 0)
    return waiting


def test_each_line_asks_in_its_order_and_lets_the_others_go_on() -> None:
    waiting = room(("a", "free"), ("b", "free"), ("c", ""))
    assert waiting.take_next(0.1) is None
    assert waiting.take_next(ASK_AGAIN_S) == ("a", WHY)
    assert waiting.try_wait("a", "free", WHY, 1.0, 0.3)
    assert waiting.take_next(0.3) == ("c", WHY)
    assert waiting.take_next(0.4) is None  # b waits for a
    assert waiting.take_next(0.3 + ASK_AGAIN_S) == ("a", WHY)
    assert waiting.take_next(0.3 + ASK_AGAIN_S) == ("b", WHY)  # a may be served
    waiting.leave("a")
    assert waiting.try_wait("b", "free", WHY, 1.0, 0.6)
    assert waiting.take_next(0.9) == ("b", WHY)


def test_a_free_place_is_for_the_first_of_each_line() -> None:
    waiting = room(("a", "free"), ("b", "free"), ("c", ""))
    waiting.wake(0.1)
    assert waiting.take_next(0.1) == ("a", WHY)
    assert waiting.take_next(0.1) == ("c", WHY)
    assert waiting.take_next(0.1) is None
    waiting.wake(0.2)
    assert waiting.take_next(0.2) == ("b", WHY)  # a may be served


def test_patience_counts_from_the_beginning() -> None:
    waiting = room(("a", "free"))
    assert waiting.waited_s("a", 0.75) == 0.75
    assert waiting.waited_s("b", 0.75) == 0.0
    assert waiting.try_wait("a", "free", WHY, 1.0, 0.9)
    assert not waiting.try_wait("a", "free", WHY, 1.0, 1.0)
    waiting.leave("a")
    assert list(waiting) == []
