"""How many workers each pool needs: what a role needs, spread over the pools that have it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvrelay.types import Incarnation, Role
from router.core.core import RouterCore
from router.core.events import WorkerJoined, WorkerLost
from router.core.load.offered import OfferedWork
from router.live import status
from router.live.pool_nodes import PoolNodes
from tests.unit.router_kit import hello

TOKENS = 50_000


def refuse(*_: object) -> None:
    raise AssertionError("no pool node is here")


@pytest.fixture
def core() -> RouterCore:
    return RouterCore()


@pytest.fixture
def views(core: RouterCore, monkeypatch: pytest.MonkeyPatch) -> status.ClusterViews:
    """A minute of work has been offered, and nothing since."""
    views = status.ClusterViews(core, PoolNodes(refuse))
    now_s = iter(range(0, 10_000, 60))
    monkeypatch.setattr(status.time, "monotonic", lambda: float(next(now_s)))
    return views


def join(core: RouterCore, name: str, pool: str, role: Role) -> None:
    core.handle(WorkerJoined(hello=replace(hello(name, role), pool=pool)), 0)


def desired(
    core: RouterCore, views: status.ClusterViews, prompts: int = 100
) -> dict[Role, dict[str, float]]:
    work = core.state.offered.tiers.setdefault("default", OfferedWork())
    work.requests += prompts
    work.prompt_tokens += prompts * TOKENS
    work.prompt_squares += prompts * TOKENS**2
    work.output_tokens += prompts * 10
    work.context_tokens += prompts * 10 * 100
    return {role: dict(need.desired) for role, need in views.snapshot().needs.items()}


def test_pools_share_what_their_role_needs(core: RouterCore, views: status.ClusterViews) -> None:
    for name, pool in (("a", "fast"), ("b", "fast"), ("c", "slow")):
        join(core, name, pool, Role.PREFILL)
    join(core, "d", "decode", Role.DECODE)
    desired(core, views)
    told = desired(core, views)
    prefill, need = told[Role.PREFILL], views.snapshot().needs[Role.PREFILL]
    assert set(prefill) == {"fast", "slow"} and set(told[Role.DECODE]) == {"decode"}
    assert prefill["fast"] == pytest.approx(2 * prefill["slow"]) and prefill["slow"] > 0
    assert sum(need.desired.values()) == pytest.approx(3 * need.saturation)


def test_a_pool_keeps_a_worker_whose_role_has_changed(
    core: RouterCore, views: status.ClusterViews
) -> None:
    join(core, "p-0", "p", Role.PREFILL)
    join(core, "d-0", "d", Role.PREFILL)
    join(core, "d-1", "d", Role.DECODE)
    desired(core, views)
    told = desired(core, views)
    assert told[Role.PREFILL]["d"] == told[Role.PREFILL]["p"] > 0
    assert set(told[Role.DECODE]) == {"d"}


def test_a_pool_of_which_none_is_left_needs_as_many(
    core: RouterCore, views: status.ClusterViews
) -> None:
    join(core, "p-0", "p", Role.PREFILL)
    join(core, "q-0", "q", Role.PREFILL)
    join(core, "d-0", "d", Role.DECODE)
    desired(core, views)
    before = desired(core, views)[Role.PREFILL]
    for name in ("p-0", "q-0", "d-0"):
        core.handle(WorkerLost(incarnation=Incarnation(name)), 1)
    assert desired(core, views)[Role.PREFILL] == pytest.approx(before)


def test_before_the_first_worker_nobody_knows(views: status.ClusterViews) -> None:
    assert not views.snapshot().needs


def test_a_role_that_no_worker_ever_had_has_the_pool_of_its_name(
    core: RouterCore, views: status.ClusterViews
) -> None:
    join(core, "d-0", "d", Role.DECODE)
    desired(core, views)
    assert set(desired(core, views)[Role.PREFILL]) == {"prefill"}
