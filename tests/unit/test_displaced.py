"""Requests that were admitted and have lost their worker go before new ones."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from random import Random

import pytest

from kvrelay.counters import Counters, TierLoad
from kvrelay.messages import (
    Generate,
    Lifetime,
    Prefill,
    Released,
    Reserve,
    Reserved,
    ReserveRefused,
    Tokens,
    WorkerEvent,
)
from kvrelay.qos import ONE_TIER, QosTier, QosTiers
from kvrelay.types import FinishReason, Incarnation, Objectives, RequestKey, Role
from router.core.core import RouterCore
from router.core.events import (
    Command,
    Event,
    Fail,
    Refuse,
    Send,
    Submitted,
    TimePassed,
    WorkerJoined,
    WorkerLost,
    WorkerSaid,
)
from router.core.policy.admission_baselines import Unlimited
from router.core.request import RequestState
from router.core.router_state import RouterState
from tests.unit.router_kit import hello, request

TIERS = QosTiers(
    tiers=(
        QosTier(name="premium", priority=0),
        QosTier(name="free", priority=1),
    ),
    default="free",
)
SPLIT = {"p": Role.PREFILL, "d0": Role.DECODE, "d1": Role.DECODE}
ALONE = {"d0": Role.BOTH, "d1": Role.BOTH}


@dataclass
class Halved:
    """Workers that take what they have places for, at once. `places` of each, by its length.
    After every event the laws hold, and nobody got a place that a displaced request needs."""

    core: RouterCore
    places: int
    now_s: float = 1.0
    running: dict[Incarnation, dict[str, RequestKey]] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    refuses: str = ""  # why every worker refuses whatever it is asked
    placed: list[str] = field(default_factory=list)

    def join(self, name: str, role: Role, **options: int) -> None:
        self.running[Incarnation(name)] = {}
        self.tell(WorkerJoined(hello=hello(name, role, places=self.places, **options)))

    def lose(self, name: str, *, asked: bool = False) -> list[str]:
        """Who was displaced. `asked`: they are held until it is known how the worker ended."""
        there = self.running.pop(Incarnation(name))
        self.tell(WorkerLost(incarnation=Incarnation(name), asked=asked))
        return [*there]

    def submit(self, name: str, tier: str = "", **fields: Objectives) -> None:
        self.tell(Submitted(request=replace(request(name), qos_tier=tier, **fields)))

    def report(self, name: Incarnation, *events: WorkerEvent) -> None:
        there = self.running[name]
        requests = self.core.state.requests
        tiers = [requests[one].tier.name for one in there if one in requests]
        loads = tuple(
            TierLoad(tier=tier, running=tiers.count(tier), waiting=0) for tier in {*tiers}
        )
        counters = Counters(running=len(there), tiers=loads)
        self.tell(WorkerSaid(incarnation=name, events=events, counters=counters))

    def end_one(self, name: str, request_id: str) -> None:
        worker = Incarnation(name)
        key = self.running[worker].pop(request_id)
        index = self.core.state.requests[request_id].choices[0].next_index
        last = self._tokens(key, index, FinishReason.LENGTH)
        self.report(worker, last, Released(key=key, at_s=self.now_s))

    def waiting(self) -> list[str]:
        """Displaced requests."""
        requests = self.core.state.requests.values()
        waits = [one for one in requests if one.state is RequestState.WAITING and one.admitted]
        return [one.request_id for one in waits]

    def tell(self, event: Event) -> None:
        waited = {*self.waiting()}
        commands = self.core.handle(event, self.now_s)
        self.core.validate()
        self._check_order(commands, waited.intersection(self.waiting()))
        for command in commands:
            self._execute(command)

    def _check_order(self, commands: list[Command], waits: set[str]) -> None:
        requests = self.core.state.requests
        for command in commands:
            if not isinstance(command, Send) or not isinstance(command.message, Reserve | Generate):
                continue
            asking = requests[command.message.spec.key.request_id]
            for name in waits:
                other, worker = requests[name], self.core.state.workers[command.worker]
                needs = len(other.submitted.prompt_ids) + other.sampling.max_tokens
                if asking.admitted or needs > worker.hello.max_model_len:
                    continue
                is_before = asking.tier.priority < other.tier.priority
                assert is_before or worker.free_places >= len(waits), f"{asking.key} before {name}"

    def _execute(self, command: Command) -> None:
        match command:
            case Send(worker=worker, message=Reserve() | Generate() as message):
                self._ask(worker, message)
            case Send(worker=worker, message=Prefill(spec=spec, target=target)):
                index = len(spec.emitted_ids)
                self.report(worker, self._tokens(spec.key, index))
                assert target is not None
                committed = Lifetime(key=spec.key, at_s=self.now_s, name="handoff_committed")
                self.report(target, committed)
                self.report(worker, Released(key=spec.key, at_s=self.now_s))
            case Fail(request_id=name):
                self.failed.append(name)
            case Refuse(request_id=name):
                self.refused.append(name)
            case _:
                pass

    def _ask(self, worker: Incarnation, message: Reserve | Generate) -> None:
        key, there = message.spec.key, self.running[worker]
        requests = self.core.state.requests
        lent = sum(requests[one].tier.name == "free" for one in there) if message.displaced else 0
        own = message.spec.qos_tier == "free"
        is_full = len(there) + message.spec.sampling.n > self.places + (0 if own else lent)
        if reason := self.refuses or ("slots_exhausted" if is_full else ""):
            self.report(worker, ReserveRefused(key=key, at_s=self.now_s, reason=reason))
            return
        there[key.request_id] = key
        self.placed.append(key.request_id)
        said: list[WorkerEvent] = [Reserved(key=key, at_s=self.now_s)]
        if isinstance(message, Generate):
            said.append(self._tokens(key, len(message.spec.emitted_ids)))
        self.report(worker, *said)

    def _tokens(self, key: RequestKey, index: int, reason: FinishReason | None = None) -> Tokens:
        return Tokens(
            key=key,
            at_s=self.now_s,
            choice=0,
            first_index=index,
            token_ids=(7,),
            finish_reason=reason,
        )


def cluster(
    roles: dict[str, Role], places: int, *, tiers: QosTiers = ONE_TIER, **options: float
) -> Halved:
    state = RouterState(tiers=tiers, admitting=Unlimited(), **options)  # type: ignore[arg-type]
    found = Halved(RouterCore(state), places)
    for name, role in roles.items():
        found.join(name, role)
    return found


def full(roles: dict[str, Role], places: int) -> Halved:
    """Both decode workers run as many as they have places for."""
    world = cluster(roles, places)
    world.core.state.admitting = RouterState().admitting
    for i in range(2 * places):
        world.submit(f"old{i}")
    assert len(world.placed) == 2 * places
    world.placed.clear()
    return world


@pytest.mark.parametrize("roles", [SPLIT, ALONE], ids=["split", "alone"])
@pytest.mark.parametrize(
    ("places", "ends_per_s", "new_per_s"), [(64, 5, 10), (32, 10, 12), (32, 20, 30)]
)
def test_when_half_of_the_capacity_is_lost_no_admitted_request_is(
    roles: dict[str, Role], places: int, ends_per_s: float, new_per_s: float
) -> None:
    """Newcomers come as fast as before, faster than places come free; now and then the worker has
    no blocks for whom it is asked."""
    random = Random(places)
    world = full(roles, places)
    world.now_s = 10.0
    displaced = world.lose("d0")
    ends_s, new_s, tick_s, number = 10.0, 10.0, 10.5, 0
    while {*displaced} - {*world.placed} and world.now_s < 60:
        world.now_s = min(ends_s, new_s, tick_s)
        world.refuses = random.choice(["", "", "kv_exhausted"])
        if world.now_s == ends_s:
            ends_s += random.expovariate(ends_per_s)
            world.end_one("d1", random.choice([*world.running[Incarnation("d1")]]))
        elif world.now_s == new_s:
            new_s += random.expovariate(new_per_s)
            number += 1
            world.submit(f"new{number}")
        else:
            tick_s += 0.5
            world.report(Incarnation("d1"))
    world.refuses = ""
    assert not world.failed
    assert sorted(world.placed) == sorted(displaced), "nobody else before the last of them"
    assert number > places / 2
    world.end_one("d1", next(iter(world.running[Incarnation("d1")])))
    world.submit("later")
    assert world.placed[-1] == "later"


def test_who_is_held_keeps_one_place_and_others_get_the_rest() -> None:
    world = cluster(ALONE, 3)
    world.submit("a")
    home = "d0" if world.running[Incarnation("d0")] else "d1"
    world.lose(home, asked=True)
    for name in ("b", "c", "d"):
        world.submit(name)
    assert world.waiting() == ["a"]
    assert world.placed == ["a", "b", "c"]
    assert "d" not in world.placed, "the last place is a's"
    world.now_s += 2.0
    world.tell(TimePassed())
    assert world.placed == ["a", "b", "c", "a"]


def test_a_higher_tier_goes_before_and_a_lower_one_waits() -> None:
    world = cluster(ALONE, 1, tiers=TIERS)
    world.submit("a", "free")
    world.submit("b", "free")
    (lost,) = world.lose("d0")
    world.submit("low", "free")
    world.submit("high", "premium")
    assert world.waiting() == [lost]
    (stays,) = world.running[Incarnation("d1")]
    world.now_s = 2.0
    world.end_one("d1", stays)
    assert world.placed[2:] == ["high"]
    world.end_one("d1", "high")
    assert world.placed[2:] == ["high", lost]
    world.end_one("d1", lost)
    assert world.placed[2:] == ["high", lost, "low"]


def test_of_two_tiers_the_higher_one_is_first() -> None:
    world = cluster(ALONE, 2, tiers=TIERS)
    world.submit("free", "free")
    for name in ("a", "b", "c"):
        world.submit(name, "premium")
    (home,) = (name for name, there in world.running.items() if "free" in there)
    lost = world.lose(home)
    (premium,) = {*lost} - {"free"}
    assert world.waiting() == ["free", premium]
    (left,) = world.running
    world.end_one(left, next(iter(world.running[left])))
    assert world.waiting() == ["free"]


def test_who_loses_a_worker_with_others_of_a_higher_tier_goes_behind_them() -> None:
    world = cluster(ALONE, 2, tiers=TIERS)
    for name, tier in (("free", "free"), ("stays", "premium"), ("premium", "premium")):
        world.submit(name, tier)
    assert [*world.running[Incarnation("d0")]] == ["free", "premium"]
    world.lose("d0")
    assert world.waiting() == ["free"]
    assert [*world.running[Incarnation("d1")]] == ["stays", "premium"]


def test_a_lower_tier_makes_room_for_one_of_a_higher_tier() -> None:
    """Only where no place is free, and not for its own tier or a higher one."""
    world = cluster(ALONE, 2, tiers=TIERS)
    for name, tier in (("a", "premium"), ("b", "premium"), ("c", "free"), ("d", "free")):
        world.submit(name, tier)
    lost = world.lose("d0")
    (displaced,) = {"a", "b"}.intersection(lost)
    (waits,) = {"c", "d"}.intersection(lost)
    assert len(world.running[Incarnation("d1")]) == 3, "one of them stands back meanwhile"
    assert displaced in world.running[Incarnation("d1")]
    assert world.waiting() == [waits]


def test_one_that_no_living_worker_could_hold_keeps_nobody_out() -> None:
    world = cluster({"p": Role.PREFILL}, 1)
    world.join("long", Role.DECODE, max_model_len=1000)
    world.core.state.workers[Incarnation("p")].hello = hello("p", Role.PREFILL, max_model_len=1000)
    long = replace(request("big"), prompt_ids=tuple(range(100)))
    world.tell(Submitted(request=long))
    world.join("d", Role.DECODE)
    world.lose("long")
    assert world.waiting() == ["big"]
    world.submit("small")
    assert world.placed == ["big", "small"]
    world.submit("next")
    world.join("long", Role.DECODE, max_model_len=1000)
    assert world.placed == ["big", "small", "big"], "it waited for a worker that can hold it"
    assert not world.failed


def test_one_that_waits_for_a_large_worker_leaves_small_ones_to_others() -> None:
    """Two displaced requests of one tier: the first could use one worker alone."""
    world = cluster({"p": Role.PREFILL}, 1)
    world.core.state.workers[Incarnation("p")].hello = hello("p", Role.PREFILL, max_model_len=1000)
    for name in ("dies", "large"):
        world.join(name, Role.DECODE, max_model_len=1000)
    long = replace(request("big"), prompt_ids=tuple(range(100)))
    world.tell(Submitted(request=long))
    world.submit("keeps")
    home = next(one for one, there in world.running.items() if "big" in there)
    world.lose(home)
    assert world.waiting() == ["big"]
    world.join("small", Role.DECODE)
    world.submit("new")
    assert world.placed[-1] == "new", "the large worker alone is kept for it"
    world.lose("small")
    world.join("small", Role.DECODE)
    assert world.placed[-1] == "new"
    assert world.waiting() == ["big"]


def test_a_place_that_the_worker_refused_stays_its_own() -> None:
    """It has no blocks for the displaced request; a small one that comes now would get them."""
    world = cluster(ALONE, 2)
    world.submit("a")
    world.submit("b")
    world.refuses = "kv_exhausted"
    (lost,) = world.lose("d0")
    assert world.waiting() == [lost]
    world.refuses = ""
    world.now_s += 0.01
    world.submit("new")
    assert world.placed == ["a", "b"]
    world.now_s += 0.5
    world.report(Incarnation("d1"))
    assert world.placed == ["a", "b", lost]


def test_it_waits_until_its_deadline_or_for_as_long_as_the_router_says() -> None:
    world = cluster(ALONE, 1, failover_patience_s=100.0)
    world.submit("dated", objectives=Objectives(deadline_s=20.0))
    world.submit("patient")
    world.lose("d0")
    world.lose("d1")
    assert world.waiting() == ["dated", "patient"]
    for now_s, failed in ((20.7, []), (21.1, ["dated"]), (100.7, ["dated"])):
        world.now_s = now_s
        world.tell(TimePassed())
        assert world.failed == failed
    world.now_s = 101.1
    world.tell(TimePassed())
    assert world.failed == ["dated", "patient"]


def test_without_any_worker_admitted_requests_wait_and_others_are_refused() -> None:
    world = cluster(ALONE, 1)
    for name in ("a", "b", "deferred"):
        world.submit(name)
    world.lose("d0")
    world.lose("d1")
    assert {*world.waiting()} == {"a", "b"}
    assert world.refused == ["deferred"]
    world.now_s = 500.0
    world.submit("new")
    assert world.refused == ["deferred", "new"]
    world.join("d2", Role.BOTH)
    world.join("d3", Role.BOTH)
    assert not world.waiting() and not world.failed


@pytest.mark.parametrize("gone", ["p", "d"])
def test_survivors_take_the_missing_role(gone: str) -> None:
    """Those that ran go on there at once, new ones come there too, until one is back."""
    world = cluster({"p": Role.PREFILL, "d": Role.DECODE}, 4)
    world.submit("a")
    world.running[Incarnation("d")]["a"]
    workers = world.core.state.workers
    world.lose(gone)
    (left,) = workers.values()
    assert left.role is Role.BOTH
    world.submit("b")
    survivor = {"p": "d", "d": "p"}[gone]
    assert {*world.running[Incarnation(survivor)]} == {"a", "b"}
    assert not world.failed and not world.waiting()
    world.join("again", Role.PREFILL if gone == "p" else Role.DECODE)
    assert left.role is left.hello.role
    world.submit("c")
    placed = world.core.state.requests["c"].placement
    assert placed is not None and placed.prefill is not None
    for name, there in [*world.running.items()]:
        for request_id in [*there]:
            world.end_one(name, request_id)
    assert not world.core.state.requests


def test_workers_take_no_role_that_nobody_had() -> None:
    """While a cluster starts."""
    world = cluster({"p": Role.PREFILL}, 4)
    assert not world.core.state.workers.missing
    world.submit("a")
    assert world.refused == ["a"]
