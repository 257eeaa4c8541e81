"""A flip that is wished goes through the supervisor, to the worker by a router, and back."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from types import SimpleNamespace

import pytest

from cluster.config.load import load_config
from cluster.config.overrides import Override
from cluster.core.changes import successor, with_count
from cluster.core.elastic.fleet import Counts
from cluster.core.plan import ClusterPlan, plan_cluster
from cluster.core.resolve import Site, resolve
from cluster.core.supervision import (
    DrainAsked,
    ProcessJoined,
    RoleAsked,
    RoleRefused,
    RoleTaken,
    SetRole,
    State,
    SupervisorEvent,
)
from cluster.core.supervisor import Supervisor
from cluster.on_ray import roles as shell
from cluster.on_ray import wishes
from cluster.on_ray.asked import Denied, Drain, Flip, Granted, Pending, Scale
from cluster.on_ray.roles import OnRay, Roles
from cluster.on_ray.wishes import Apply, Wish, Wishes
from cluster.process.admin import NotKnown, NotPossible
from kvrelay.errors import ConfigError
from kvrelay.types import Role
from tests.unit.test_supervisor import LIMITS, ROUTER, D, act, serve

LIMIT_S = 10.0
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
        self.wishes.written()

    def roles(self) -> Roles:
        router = SimpleNamespace(internal_grpc="r:1")
        own = self.fleet, self.core, self.wishes
        return Roles(*own, lambda: [router], self.tell, lambda _: None)  # type: ignore[arg-type,list-item]


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
    assert cluster.core.is_settled() and cluster.wishes.are_settled


def test_a_role_that_is_not_taken_yet_is_logged_once_for_each_reason(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    unknown, silent = NotKnown("no worker is named decode-0"), ConfigError("no router answers")
    wished(monkeypatch, Flip(D, PREFILL), [unknown, unknown, silent, None])
    told = "decode-0 has not the role prefill yet, and is asked again: "
    assert caplog.messages == [f"{told}no worker is named decode-0", f"{told}no router answers"]


def test_a_flip_of_a_worker_that_hangs_is_denied_and_still_wished(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(wishes, "FLIP_S", 0.0)

    async def run() -> tuple[Granted | Denied, Cluster]:
        cluster = Cluster(plan())
        denied = await asyncio.wait_for(cluster.wishes.hear(Flip(D, PREFILL)), LIMIT_S)
        cluster.tell(RoleTaken(D, 1, PREFILL))
        return denied, cluster

    denied, cluster = asyncio.run(run())
    told = "decode-0 has not answered for 0 s, and is asked again until it is a prefill worker"
    assert denied == Denied(told)
    assert SetRole(D, 1, PREFILL) in cluster.commands
    assert cluster.core.workers[D].has_role is PREFILL and cluster.wishes.are_settled


def test_workers_that_hang_hold_up_no_other_work_of_the_controller(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It writes its record on a thread of the loop's own, for one."""
    answers = Event()
    monkeypatch.setattr(shell, "flip", lambda *_: answers.wait(LIMIT_S))

    async def run() -> str:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
        cluster = Cluster(plan())
        cluster.tell(RoleAsked(D, PREFILL))
        setting = asyncio.ensure_future(cluster.roles().set(SetRole(D, 1, PREFILL)))
        await asyncio.sleep(0)
        try:
            return await asyncio.wait_for(asyncio.to_thread(lambda: "written"), LIMIT_S / 2)
        finally:
            answers.set()
            await setting

    assert asyncio.run(run()) == "written"


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


def test_nobody_waits_for_a_worker_that_is_refused() -> None:
    async def run() -> tuple[Granted | Denied, Granted | Denied]:
        cluster = Cluster(plan())
        before = await cluster.wishes.hear(Pending())
        cluster.tell(ProcessJoined(name=D, life=1, router=ROUTER, refused="another model"))
        return before, await cluster.wishes.hear(Pending())

    told = Denied("router-0 refused decode-0: another model")
    assert asyncio.run(run()) == (Granted(()), told)


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


def test_only_pools_that_say_so_follow_the_work() -> None:
    assert plan().elastic is None
    rules = plan({"role": "auto", "name": "any"}).elastic
    assert rules is not None and not rules.sized
    assert [rules.is_followed_by(pool) for pool in ("any", "prefill", "decode")] == [
        True,
        False,
        False,
    ]


# --- numbers --------------------------------------------------------------------------------------

RANGE = {"min": 2, "max": 5}
AUTO_A: dict[str, object] = {"role": "auto", "name": "a"}


def ranged(role: str = "auto", **more: object) -> ClusterPlan:
    return plan({"role": role, "name": "any", "replicas": RANGE, **more})


def test_a_range_begins_with_its_least_and_its_number_has_one_owner() -> None:
    async def run() -> tuple[list[str], Granted | Denied, Granted | Denied]:
        cluster = Cluster(ranged())
        begun = [one for one in cluster.core.workers if one.startswith("any")]
        wishes = cluster.wishes
        return begun, await wishes.hear(Scale("any", 3)), await wishes.hear(Scale("decode", 2))

    begun, denied, granted = asyncio.run(run())
    assert begun == ["any-0", "any-1"]
    assert denied == Denied(
        "any: its number follows the offered work, from 2 to 5: change workers.replicas in the "
        "file, and apply it"
    )
    assert granted == Granted(("decode: 1 -> 2 workers",))


def test_a_person_takes_no_worker_from_a_pool_whose_number_has_an_owner() -> None:
    async def run() -> tuple[Cluster, list[Granted | Denied]]:
        cluster = Cluster(ranged())
        wishes = [Drain(name="any-1", replace=False), Drain(name="any-1")]
        return cluster, [await cluster.wishes.hear(wish) for wish in wishes]

    cluster, (for_good, replaced) = asyncio.run(run())
    assert isinstance(for_good, Denied)
    assert for_good.reason.startswith("any: its number follows the offered work, from 2 to 5")
    assert replaced == Granted(("any-1: leaves, and another one replaces it",))
    assert cluster.told == [DrainAsked(name="any-1")]
    assert cluster.fleet.plan.worker_pool("any").count == 2


@pytest.mark.parametrize(
    ("pools", "what"),
    [
        (
            [{"role": "auto", "name": "a", "replicas": RANGE}, {"role": "auto", "name": "b"}],
            "a and b",
        ),
        (
            [{"role": "auto", "name": "a"}, {"role": "prefill", "name": "b", "replicas": RANGE}],
            "a and b",
        ),
        ([{"role": "decode", "name": n, "replicas": RANGE} for n in "ab"], "a and b"),
        ([{"role": "both", "name": "a", "replicas": RANGE}], "role both"),
    ],
)
def test_two_owners_of_a_number_are_refused(pools: list[dict[str, object]], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        plan(*pools)


def test_more_are_added_where_the_pool_is_and_one_that_leaves_is_not_replaced() -> None:
    async def run() -> Cluster:
        cluster = Cluster(ranged())
        rules = cluster.fleet.plan.elastic
        owner = OnRay(rules, cluster.wishes, cluster.tell)
        owner.resize(Counts(1, 1), [])
        await asyncio.sleep(0)
        assert cluster.fleet.plan.worker_pool("any").count == 4
        serve(cluster.core, *cluster.core.workers)
        owner.resize(Counts(0, 0), ["any-1", "any-9"])
        await asyncio.sleep(0)
        return cluster

    cluster = asyncio.run(run())
    assert cluster.fleet.plan.worker_pool("any").count == 3
    staying = [one.name for one in cluster.core.workers.values() if not one.leaves]
    assert staying == ["prefill-0", "decode-0", "any-0", "any-2", "any-3"]


def test_the_offered_work_takes_no_number_beyond_its_bounds() -> None:
    """Whoever looked at it may not have heard yet that another file was applied."""

    async def run() -> list[int]:
        cluster, counts = Cluster(ranged()), []
        owner = OnRay(cluster.fleet.plan.elastic, cluster.wishes, cluster.tell)
        for more, leaving in [(Counts(4, 1), []), (Counts(0, 0), [f"any-{n}" for n in range(5)])]:
            owner.resize(more, leaving)
            await asyncio.sleep(0)
            counts.append(cluster.fleet.plan.worker_pool("any").count)
        return counts

    assert asyncio.run(run()) == [5, 2]


class Late(Cluster):
    """The supervisor hears later."""

    def tell(self, event: SupervisorEvent) -> None:
        self.told.append(event)

    def hears(self) -> None:
        events, self.told = self.told, []
        for event in events:
            super().tell(event)


def numbers(cluster: Cluster, pool: str) -> tuple[int, int]:
    """The plan's, and the supervisor's."""
    return cluster.fleet.plan.worker_pool(pool).count, cluster.core.members.desired[pool].count


def test_one_worker_that_is_removed_twice_takes_along_no_other() -> None:
    async def run() -> tuple[Granted | Denied, tuple[int, int]]:
        cluster = Late(plan({"role": "decode", "name": "more", "replicas": 3}))
        first = asyncio.ensure_future(cluster.wishes.hear(Drain(name="more-1", replace=False)))
        await asyncio.sleep(0)
        second = await cluster.wishes.hear(Drain(name="more-1", replace=False))
        cluster.hears()
        assert isinstance(await first, Granted)
        return second, numbers(cluster, "more")

    second, found = asyncio.run(run())
    assert isinstance(second, Denied) and second.reason.startswith("no process is named more-1")
    assert found == (2, 2)


def test_one_that_leaves_for_another_reason_first_leaves_the_number_as_told() -> None:
    async def run() -> tuple[int, int]:
        cluster = Late(plan({"role": "decode", "name": "more", "replicas": 3}))
        wishes = [Scale("more", 2), Drain(name="more-2", replace=False)]
        heard = [asyncio.ensure_future(cluster.wishes.hear(wish)) for wish in wishes]
        await asyncio.sleep(0)
        cluster.hears()
        assert all(isinstance(one, Granted) for one in await asyncio.gather(*heard))
        return numbers(cluster, "more")

    assert asyncio.run(run()) == (1, 1)


def test_a_role_that_the_offered_work_asks_for_leaves_nothing_open() -> None:
    """Else commands that wait until all is as desired would wait for ever."""

    async def run() -> bool:
        cluster = Cluster(ranged())
        OnRay(cluster.fleet.plan.elastic, cluster.wishes, cluster.tell).change("any-0", DECODE)
        await asyncio.sleep(0)
        assert cluster.told == [RoleAsked("any-0", DECODE)]
        cluster.tell(RoleTaken("any-0", 1, DECODE))
        return cluster.wishes.are_settled

    assert asyncio.run(run())


def test_pools_of_one_role_each_grow_by_themselves() -> None:
    async def run() -> ClusterPlan:
        pools = [{"role": r, "name": f"my-{r}", "replicas": RANGE} for r in ("prefill", "decode")]
        cluster = Cluster(plan(*pools))
        owner = OnRay(cluster.fleet.plan.elastic, cluster.wishes, cluster.tell)
        owner.resize(Counts(2, 0), [])
        await asyncio.sleep(0)
        return cluster.fleet.plan

    found = asyncio.run(run())
    assert [pool.count for pool in found.worker_pools] == [1, 1, 4, 2]


def test_a_file_that_is_applied_keeps_the_number_within_its_bounds() -> None:
    grown = with_count(ranged(), "any", 4)
    assert successor(grown, ranged()).worker_pool("any").count == 4  # type: ignore[union-attr]
    fewer = plan({"role": "auto", "name": "any", "replicas": {"min": 1, "max": 3}})
    assert successor(grown, fewer).worker_pool("any").count == 3  # type: ignore[union-attr]
    fixed = plan({"role": "auto", "name": "any", "replicas": 2})
    assert successor(grown, fixed).worker_pool("any").count == 2  # type: ignore[union-attr]
