"""In which order prompts are computed: shares, priorities, deadlines, tenants, age."""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import replace

import pytest

from engine.core.prompt_order import (
    AGED_BY_OWN,
    AGED_RECENT_S,
    AGED_S,
    AGED_SHARE,
    RECENT_S,
    Decaying,
    Order,
)
from engine.core.step import StepWanted
from engine.core.step_times import LinearTimes
from kvpool.core.blocks.tables import BlockTables
from kvrelay.qos import QosTier, QosTiers
from prefill_worker.scheduler import PrefillScheduler
from tests.sim.model import GEMMA
from tests.unit.worker_kit import D, done, hello, key, local_lookup, prefill_of, spec, the_step

TOKEN_S = 0.01
TIMES = LinearTimes(prefill_token_s=TOKEN_S)
TIERS = QosTiers(
    tiers=(
        QosTier(name="premium", priority=0, share=0.25),
        QosTier(name="standard", priority=1, share=0.5),
        QosTier(name="free", priority=2),
    ),
    default="free",
)
CHUNK = 8


class World:
    """A prefill worker whose steps take TOKEN_S a token; prompts are answered by no one."""

    def __init__(
        self, *, blocks: int = 4000, weights: dict[str, float] | None = None, chunk: int = CHUNK
    ) -> None:
        order = Order(qos=TIERS, tenant_weights=weights or {}, times=TIMES)
        self.scheduler = PrefillScheduler(
            lookup=local_lookup(BlockTables(GEMMA, blocks)),
            chunk_tokens=chunk,
            order=order,
        )
        self.scheduler.handle(hello(D), 0)
        self.now_s = 0.0
        self.added = 0

    def add(
        self,
        name: str,
        tokens: int,
        tier: str = "free",
        *,
        tenant: str = "",
        within_s: float | None = None,
        emitted: int = 0,
    ) -> None:
        self.added += 1
        ids = (1000 + self.added, *range(tokens - emitted - 1))  # nothing is shared
        request = replace(
            spec(name, tokens),
            prompt_ids=ids,
            emitted_ids=(7,) * emitted,
            qos_tier=tier,
            tenant=tenant,
        )
        message = replace(prefill_of(request), within_s=within_s)
        self.scheduler.handle(message, self.now_s)

    def step(self) -> list[str]:
        """Whose chunks it takes."""
        batch = the_step(self.scheduler.handle(StepWanted(), self.now_s)).batch
        self.now_s += TOKEN_S * batch.tokens
        sampled = [(9,) if piece.samples else () for piece in batch.slices]
        done(self.scheduler, *sampled, now_s=self.now_s)
        self.scheduler.validate()
        return [piece.key.request_id for piece in batch.slices]

    def finish_order(self) -> list[str]:
        """Of all that wait."""
        finished: list[str] = []
        while waiting := {k.request_id for k in self.scheduler.queue.awaiting_prefill}:
            self.step()
            left = {k.request_id for k in self.scheduler.queue.awaiting_prefill}
            finished += sorted(waiting - left)
        return finished


def spend(world: World, tier: str, seconds: float) -> None:
    """As if it had used so much lately."""
    world.scheduler.queue.order._spent_s.spend(tier, seconds, world.now_s)


def test_a_tier_within_its_share_goes_before_tiers_beyond_theirs() -> None:
    world = World()
    spend(world, "premium", 0.25 * RECENT_S)
    for tier in ("free", "premium", "standard"):
        world.add(tier, CHUNK, tier)
    assert world.finish_order() == ["standard", "premium", "free"]


def test_within_or_beyond_their_shares_priority_decides() -> None:
    world = World()
    for tier in ("free", "standard", "premium"):
        world.add(tier, CHUNK, tier)
    assert world.finish_order() == ["premium", "standard", "free"]


def test_what_a_tier_lent_it_gets_back_with_the_next_step() -> None:
    world = World()
    world.add("long", 10 * CHUNK)
    assert world.step() == world.step() == ["long"]
    held = world.scheduler.tables.tables(world.scheduler.jobs[key("long")].holder)
    world.add("urgent", CHUNK, "premium")
    assert world.step() == ["urgent"]
    assert world.scheduler.tables.tables(world.scheduler.jobs[key("long")].holder) == held
    assert world.step() == ["long"]


def test_a_share_comes_back_as_time_passes() -> None:
    world = World()
    spend(world, "standard", 0.6 * RECENT_S)
    world.add("standard", CHUNK, "standard")
    spend(world, "premium", 0.4 * RECENT_S)
    world.add("premium", CHUNK, "premium")
    world.now_s += 0.19 * RECENT_S  # 0.6 -> 0.496 of 0.5; 0.4 -> 0.33 of 0.25
    world.add("free", CHUNK)
    assert world.finish_order() == ["standard", "premium", "free"]


def test_what_is_resumed_goes_before_all_newcomers_of_its_tier() -> None:
    world = World()
    world.add("new", 2 * CHUNK)
    world.add("in time", 2 * CHUNK, within_s=60)
    assert world.step() == ["in time"]
    for name in ("first", "second"):
        world.add(name, 3 * CHUNK, emitted=2)
    world.add("premium", CHUNK, "premium")
    assert world.finish_order() == ["premium", "first", "second", "in time", "new"]


def test_the_earliest_deadline_that_can_be_met_goes_first() -> None:
    world = World()
    world.add("none", CHUNK)
    world.add("later", 3 * CHUNK, within_s=2.0)
    world.add("soon", 3 * CHUNK, within_s=1.0)
    world.add("too soon", 3 * CHUNK, within_s=3 * CHUNK * TOKEN_S - 0.01)
    assert world.finish_order() == ["soon", "later", "none", "too soon"]


def test_a_deadline_that_can_be_met_no_more_counts_for_nothing() -> None:
    world = World()
    world.add("missed", 2 * CHUNK, within_s=0.2)
    world.add("short", CHUNK)
    world.now_s = 0.1
    assert world.finish_order() == ["short", "missed"]


def test_feasibility_follows_the_worker_s_own_times() -> None:
    for slower, first in ((1.0, "asked"), (2.0, "short")):
        world = World()
        world.scheduler.queue.order.times = TIMES.scaled(slower, 1.0)
        world.add("asked", 2 * CHUNK, within_s=0.2)
        world.add("short", CHUNK)
        assert world.step() == [first]


def test_the_shortest_goes_first_among_equals_and_then_the_first() -> None:
    world = World()
    for name, tokens in (("long", 24), ("first", 8), ("second", 8), ("short", 4)):
        world.add(name, tokens)
    assert world.step() == ["short", "first"]
    assert world.step() == ["first", "second"]
    assert world.finish_order() == ["second", "long"]


def test_what_is_left_of_a_prompt_counts() -> None:
    world = World()
    world.add("begun", 2 * CHUNK)
    assert world.step() == ["begun"]
    world.add("shorter than it was", CHUNK + 2)
    assert world.step() == ["begun"]


def test_a_tier_that_is_not_there_is_the_default_one() -> None:
    world = World()
    world.add("unknown", CHUNK, "gold")
    world.add("standard", CHUNK, "standard")
    assert world.finish_order() == ["standard", "unknown"]


def test_tenants_share_by_weight_whatever_they_offer() -> None:
    world = World(weights={"big": 3.0})
    for i in range(200):
        world.add(f"b{i}", CHUNK, tenant="big")
        world.add(f"s{i}", CHUNK, tenant="small")
        world.add(f"t{i}", CHUNK, tenant="small")
    tokens: dict[str, int] = defaultdict(int)
    for _ in range(100):
        (name,) = world.step()
        tokens["big" if name[0] == "b" else "small"] += CHUNK
    assert tokens["big"] / tokens["small"] == pytest.approx(3.0, rel=0.15)


def test_one_step_takes_from_tenants_in_turn() -> None:
    world = World()
    for tenant in ("a", "b"):
        for i in range(2):
            world.add(f"{tenant}{i}", 2, tenant=tenant)
    assert world.step() == ["a0", "b0", "a1", "b1"]


def test_one_step_takes_from_tenants_by_weight() -> None:
    world = World(weights={"b": 2.0})
    for tenant in ("a", "b"):
        for i in range(4):
            world.add(f"{tenant}{i}", 2, tenant=tenant)
    assert world.step() == ["a0", "b0", "b1", "a1"]


def test_of_very_many_tenants_those_that_spent_least_are_forgotten() -> None:
    spent = Decaying(span_s=10)
    spent.spend("much", 100.0, 0)
    for i in range(4096):
        spent.spend(f"little {i}", 1.0, 0)
    assert spent.at("much", 0) == 100.0
    assert sum(spent.at(f"little {i}", 0) for i in range(4096)) == 4096 - 2048


def test_no_flood_of_others_keeps_a_prompt_waiting_for_ever() -> None:
    """The bound is the age at which it comes first, and its own time in the share of the aged."""
    world = World()
    tokens = 10 * CHUNK
    world.add("lone", tokens)
    own_s = tokens * TOKEN_S
    bound_s = max(AGED_S, AGED_BY_OWN * own_s) + own_s / AGED_SHARE + RECENT_S
    i = 0
    while key("lone") in world.scheduler.queue.awaiting_prefill:
        world.add(f"flood{i}", CHUNK, "premium", within_s=60)
        i += 1
        world.step()
        assert world.now_s < bound_s


def test_the_aged_take_no_more_than_their_share_from_a_tier_within_its_own() -> None:
    world = World()
    for i in range(400):
        world.add(f"old{i}", 4 * CHUNK)
    world.now_s = 3 * RECENT_S
    begun_s, premium_s = world.now_s, 0.0
    while world.now_s < begun_s + RECENT_S / 4:
        world.add(f"p{world.now_s}", CHUNK, "premium")
        premium_s += TOKEN_S * CHUNK * (world.step()[0][0] == "p")
    aged_s = RECENT_S / 4 - premium_s
    assert aged_s <= AGED_SHARE * (RECENT_S / 4 + AGED_RECENT_S) + CHUNK * TOKEN_S


def test_many_that_have_aged_keep_none_of_a_tier_within_its_share_waiting_for_long() -> None:
    """What there is of their share, though a step would hold more."""
    world = World(chunk=400)
    for i in range(40):
        world.add(f"old{i}", CHUNK)
    world.now_s = 3 * RECENT_S
    world.add("new", CHUNK, "premium")
    burst = AGED_SHARE * AGED_RECENT_S / (CHUNK * TOKEN_S)  # 2.5 of them
    assert world.step()[:4] == ["old0", "old1", "old2", "new"]
    assert 2 < burst < 3


@pytest.mark.parametrize("tokens", [1, 400])
def test_a_prompt_ages_by_its_own_time_and_not_within_two_seconds(tokens: int) -> None:
    aged_s = max(AGED_S, AGED_BY_OWN * tokens * TOKEN_S)
    for waited_s, first in ((0.9 * aged_s, "new"), (1.1 * aged_s, "old")):
        world = World()
        world.add("old", tokens)
        world.now_s = waited_s
        world.add("new", CHUNK, "premium")
        assert world.step()[0] == first


@pytest.mark.parametrize("seed", range(20))
def test_everyone_is_computed_in_bounded_time_whatever_comes(seed: int) -> None:
    """Random tiers, tenants, deadlines, lengths, and too few blocks: each ends within its age and
    the work of those that aged before it, in the share that the aged have."""
    rng = random.Random(seed)
    world = World(blocks=60)
    arrived: dict[str, tuple[float, float]] = {}  # when, by when
    work_s = 0.0
    for i in range(150):
        tokens = rng.choice([1, 4, 9, 30, 100])
        tier = rng.choice(["premium", "premium", "standard", "free"])
        within_s = rng.choice([None, 0.01, 0.5, 5.0])
        work_s += tokens * TOKEN_S
        aged_s = max(AGED_S, AGED_BY_OWN * tokens * TOKEN_S)
        arrived[f"r{i}"] = (world.now_s, world.now_s + aged_s + work_s / AGED_SHARE + RECENT_S)
        world.add(
            f"r{i}",
            tokens,
            tier,
            tenant=rng.choice("xyz"),
            within_s=within_s,
            emitted=rng.choice([0, 0, 1]),
        )
        for _ in range(rng.choice([0, 1, 1, 3])):
            if world.scheduler.has_work:
                finish(world, arrived)
    while world.scheduler.has_work:
        finish(world, arrived)
    assert not arrived
    assert world.scheduler.tables.free_blocks == world.scheduler.tables.blocks


def finish(world: World, arrived: dict[str, tuple[float, float]]) -> None:
    """A step; those that have ended with it are handed over at once."""
    world.step()
    for job in world.scheduler.jobs.live():
        if job.first:
            _, due_s = arrived.pop(job.key.request_id)
            assert world.now_s <= due_s
            world.scheduler.jobs.gone(job.key, world.now_s)
