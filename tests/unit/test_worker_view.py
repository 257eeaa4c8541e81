"""What a router makes of what it is told of others, and of times that nobody measured."""

from __future__ import annotations

from math import inf

from kvrelay.counters import Counters
from kvrelay.types import Role
from router.core.load.decode_outlook import Expected
from router.core.load.margins import Margin
from tests.unit.router_kit import key, view, workers_of


def test_places_that_others_have_taken_are_not_free() -> None:
    worker = view("d", Role.DECODE, places=4)
    worker.said(Counters(running=3))
    assert (worker.free_places, worker.is_idle) == (1, False)


def test_a_router_that_few_ask_is_not_shut_out_by_its_own_promises() -> None:
    """One sequence of its own beside fifty of others."""
    worker = view("d", Role.DECODE, places=100)
    worker.outlook.add(key("own"), Expected(joins_s=0, ends_s=1, tokens=4))
    worker.said(Counters(running=51, routers=3))
    assert workers_of(worker).all_by_own() == 3


def test_before_there_are_sequences_all_routers_are_taken_to_be_asked_alike() -> None:
    worker = view("d", Role.DECODE, places=100)
    assert workers_of(worker).all_by_own() == 1
    worker.said(Counters(routers=4))
    assert workers_of(worker).all_by_own() == 4


def test_how_many_sequences_are_usual_is_the_mean_of_the_latest() -> None:
    """The first counts whole; none are fewer than the router's own."""
    worker = view("d", Role.DECODE, places=100)
    worker.outlook.add(key("own"), Expected(joins_s=0, ends_s=1, tokens=4, choices=10))
    worker.said(Counters(running=20))
    assert (worker.own_usually, worker.all_usually) == (10, 20)
    worker.said(Counters(running=4))
    assert (worker.own_usually, worker.all_usually) == (10, 19.5)


def test_what_is_not_covered_stays_out_of_reach() -> None:
    assert Margin(confidence=0.95).apply(inf) == inf
