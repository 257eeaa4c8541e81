"""When /ready and gRPC's health say that nothing can be served."""

from __future__ import annotations

import pytest

from kvrelay.types import Incarnation, Role
from router.core.policy.choice import Policies
from router.core.start import Beginning, begin
from router.core.state.quarantine import Pair
from router.core.workers import Workers, obstacle
from tests.unit.router_kit import hello, view, workers_of

NAMES = ("p0", "p1", "d0", "d1")
PAIRS = [Pair(Incarnation(p), Incarnation(d)) for p in NAMES[:2] for d in NAMES[2:]]
QUARANTINED = "handoffs failed lately between all prefill and decode workers: they are quarantined"


def split(*draining: str) -> Workers:
    """Two prefill and two decode workers."""
    workers = workers_of(
        *(view(name, Role.PREFILL if name[0] == "p" else Role.DECODE) for name in NAMES)
    )
    for name in draining:
        workers[Incarnation(name)].draining = True
    return workers


@pytest.mark.parametrize(
    ("roles", "reason"),
    [
        ((), "no worker has joined yet"),
        ((Role.PREFILL,), "no decode worker has joined yet"),
        ((Role.DECODE,), "no prefill worker has joined yet"),
        ((Role.BOTH,), None),
        ((Role.PREFILL, Role.DECODE), None),
    ],
)
def test_workers_of_each_role_are_needed(roles: tuple[Role, ...], reason: str | None) -> None:
    assert obstacle(workers_of(*(view(role, role) for role in roles)), ()) == reason


@pytest.mark.parametrize(
    ("draining", "reason"),
    [
        (("p0", "d0"), None),
        (("d0", "d1"), "all decode workers drain"),
        (("p0", "p1"), "all prefill workers drain"),
        (NAMES, "all workers drain"),
    ],
)
def test_workers_that_drain_serve_nobody(draining: tuple[str, ...], reason: str | None) -> None:
    assert obstacle(split(*draining), ()) == reason


def test_a_worker_that_joins_ends_it() -> None:
    workers = split("d0", "d1")
    workers.join(hello("d2", Role.DECODE))
    assert obstacle(workers, ()) is None


def test_pairs_in_quarantine_serve_nobody() -> None:
    assert obstacle(split(), PAIRS[:3]) is None
    assert obstacle(split(), PAIRS) == QUARANTINED
    assert obstacle(split("d1"), PAIRS[::2]) == QUARANTINED, "the other one drains"
    assert obstacle(split("d0"), PAIRS[::2]) is None


def test_a_worker_of_both_roles_needs_no_pair() -> None:
    workers = split(*NAMES)
    workers.join(hello("b", Role.BOTH))
    assert obstacle(workers, PAIRS) is None
    workers[Incarnation("b")].draining = True
    assert obstacle(workers, PAIRS) == "all workers drain"


def test_decode_workers_that_prefill_too_need_no_pair() -> None:
    workers = begin(Beginning(policies=Policies(local_prefill=True))).state.workers
    workers.join(hello("d", Role.DECODE))
    assert obstacle(workers, ()) is None
    workers[Incarnation("d")].draining = True
    assert obstacle(workers, ()) == "all workers drain"
