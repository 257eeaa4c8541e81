"""A flip that is wished goes through the supervisor, to the worker by a router, and back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from cluster.config.load import Override, load_config
from cluster.core.plan import ClusterPlan, plan_cluster
from cluster.core.resolve import Site, resolve
from cluster.core.supervision import (
    RoleAsked,
    RoleRefused,
    RoleTaken,
    SetRole,
    State,
    SupervisorEvent,
)
from cluster.core.supervisor import Supervisor
from cluster.on_ray import roles as shell
from cluster.on_ray.roles import Roles
from cluster.on_ray.wishes import Apply, Denied, Flip, Granted, Wish, Wishes
from cluster.process.admin import NotKnown, NotPossible
from kvrelay.types import Role
from tests.unit.test_supervisor import LIMITS, ROUTER, D, P, act, serve

PREFILL, DECODE = Role.PREFILL, Role.DECODE
SITE = Site(total_cpus=4, node_cpus=4, host="h", bundled_path="/m")


def plan(*more: dict[str, object]) -> ClusterPlan:
    pools = [{"role": "prefill"}, {"role": "decode"}, *more]
    return plan_cluster(resolve(load_config(None, [Override(("workers",), pools)]), SITE))


class Cluster:
    """Its supervisor, and what it hears."""

    def __init__(self, of: ClusterPlan) -> None:
        self.core = Supervisor(of.desired(), LIMITS, 0.0)
        self.fleet = SimpleNamespace(plan=of)
        self.told: list[SupervisorEvent] = []
        self.commands: list[object] = []
        self.wishes = Wishes(self.fleet, self.core, self.tell)  # type: ignore[arg-type]
        act(self.core, shell_tick())
        serve(self.core, ROUTER, *self.core.workers)

    def tell(self, event: SupervisorEvent) -> None:
        self.told.append(event)
        self.commands += act(self.core, event)
        self.wishes.heard(event)

    def roles(self) -> Roles:
        router = SimpleNamespace(internal_grpc="r:1")
        return Roles(self.fleet, self.core, lambda: [router], self.tell, lambda _: None)  # type: ignore[arg-type,list-item]


def shell_tick() -> SupervisorEvent:
    from cluster.core.supervision import SupervisionTick

    return SupervisionTick()


def wished(
    monkeypatch: pytest.MonkeyPatch, wish: Wish, answers: list[Exception | None]
) -> tuple[Cluster, Granted | Denied]:
    """The worker's answers, by way of a router."""
    monkeypatch.setattr(shell, "RETRY_S", 0.0)
    asked = iter(answers)

    def flip(*_: object) -> None:
        if (answer := next(asked)) is not None:
            raise answer

    monkeypatch.setattr(shell, "flip", flip)

    async def run() -> tuple[Cluster, Granted | Denied]:
        cluster = Cluster(plan())
        roles = cluster.roles()
        hearing = asyncio.ensure_future(cluster.wishes.hear(wish))
        await asyncio.sleep(0)
        for command in [one for one in cluster.commands if isinstance(one, SetRole)]:
            await roles.set(command)
        return cluster, await hearing

    return asyncio.run(run())


def test_a_flip_is_granted_once_the_worker_has_the_role(monkeypatch: pytest.MonkeyPatch) -> None:
    not_yet = NotKnown("no worker is named decode-0")
    cluster, granted = wished(monkeypatch, Flip(D, PREFILL), [not_yet, None])
    assert granted == Granted(("decode-0: decode -> prefill",))
    assert cluster.told == [RoleAsked(D, PREFILL), RoleTaken(D, 1, PREFILL)]
    assert cluster.core.is_settled() and cluster.wishes.pending == 0


def test_a_flip_that_can_not_be_is_denied_and_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    never = NotPossible("another dtype")
    cluster, denied = wished(monkeypatch, Flip(D, PREFILL), [never])
    assert denied == Denied("another dtype")
    assert cluster.told[-1] == RoleRefused(D, 1, PREFILL, "another dtype")
    assert cluster.core.workers[D].role is DECODE


def test_a_worker_that_is_not_there_gets_its_role_when_it_starts() -> None:
    async def run() -> tuple[Granted | Denied, Role | None]:
        cluster = Cluster(plan())
        cluster.core.workers[D].state = State.BACKING_OFF
        cluster.core.workers[D].address, cluster.core.workers[D].joined = None, set()
        granted = await cluster.wishes.hear(Flip(D, PREFILL))
        return granted, cluster.core.workers[D].role

    assert asyncio.run(run()) == (Granted(("decode-0: decode -> prefill",)), PREFILL)


def test_nobody_has_another_name(monkeypatch: pytest.MonkeyPatch) -> None:
    _, denied = wished(monkeypatch, Flip("router-0", PREFILL), [])
    assert denied == Denied("no process is named router-0: there are prefill-0, decode-0")


def test_a_file_says_which_flips_it_takes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> list[Granted | Denied]:
        cluster = Cluster(plan())
        cluster.tell(RoleAsked(D, PREFILL))
        cluster.tell(RoleTaken(D, 1, PREFILL))
        told = [await cluster.wishes.hear(Apply(plan(), only_tell=True))]
        return [*told, await cluster.wishes.hear(Apply(plan()))]

    assert asyncio.run(run()) == [Granted(("decode-0: prefill -> decode",))] * 2


def test_a_wish_that_was_taken_back_is_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    monkeypatch.setattr(shell, "flip", lambda *of: asked.append(of))

    async def run() -> None:
        cluster = Cluster(plan())
        await cluster.roles().set(SetRole(D, 1, PREFILL))
        await cluster.roles().set(SetRole(D, 7, DECODE))

    asyncio.run(run())
    assert asked == []


def test_only_pools_of_role_auto_follow_the_work() -> None:
    found = plan({"role": "auto", "name": "any"})
    assert found.roles is not None and plan().roles is None

    async def run() -> Callable[[str], bool]:
        return Cluster(found).roles()._keeper([], found.roles).may_change  # type: ignore[arg-type]

    may_change = asyncio.run(run())
    assert [may_change(name) for name in ("any-0", P, D, "gone-1")] == [True, False, False, False]
