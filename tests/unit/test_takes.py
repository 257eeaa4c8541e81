"""Pools that take only some prompts: who computes which, and who if nobody is there for it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from prometheus_client.parser import text_string_to_metric_families

from cluster.config.load import load_config
from cluster.config.takes import untaken
from kvrelay.errors import ConfigError
from kvrelay.messages import Lifetime, Prefill
from kvrelay.qos import QosTier, QosTiers
from kvrelay.types import TAKES_ALL, Incarnation, PromptRule, Role
from router.core.core import RouterCore
from router.core.events import Command, Send, Submitted, WorkerJoined, WorkerLost
from router.core.policy.kv_aware import KvAware, LocalPrefill
from router.core.policy.placement import PlacementPolicy
from router.core.policy.placement_baselines import LeastLoaded, LocalCache, RandomPair, RoundRobin
from router.core.router_state import RouterState
from router.core.shared_queue import open_shared_queue
from router.core.state.candidate import Candidate
from router.core.state.demand import Demand
from router.core.state.offered import PrefilledWork
from router.core.state.worker_view import WorkerView
from router.core.workers import Workers
from router.live.metrics import RouterMetrics
from tests.unit.fake_dispatcher import WORKER, FakeDispatcher
from tests.unit.router_kit import (
    PerToken,
    demand,
    hello,
    key,
    lifetime,
    request,
    reserved,
    says,
    view,
)
from tests.unit.test_docs import REPOSITORY
from tests.unit.test_placing import placed, timed, waits, ways
from tests.unit.test_simulation import LINEAR, TraceRequest, done, run

P, D, BOTH = Role.PREFILL, Role.DECODE, Role.BOTH
LONG = PromptRule(min_prompt_tokens=10)
SHORT = PromptRule(max_prompt_tokens=9)
BATCH = PromptRule(tiers=("batch",))
A_LONG, A_SHORT = demand(prompt_tokens=10), demand(prompt_tokens=9)
IN_BATCH = demand(tier=QosTier(name="batch"))


def ruled(name: str, rule: PromptRule, role: Role = P) -> WorkerView:
    return WorkerView(hello=replace(hello(name, role), takes=rule))


def prefillers(policy: PlacementPolicy, asked: Demand, *workers: WorkerView) -> set[str]:
    """All that are suggested, in 20 decisions."""
    found = (way for _ in range(20) for way in ways(policy, *workers, asked=asked))
    return {way.prefiller.hello.name for way in found}


# --- the rule -----------------------------------------------------------------------------------


def test_both_ends_of_a_range_are_in_it() -> None:
    rule = PromptRule(min_prompt_tokens=5, max_prompt_tokens=7)
    assert [n for n in range(1, 10) if rule.admits(n, "any")] == [5, 6, 7]
    assert all(TAKES_ALL.admits(n, "any") for n in (1, 10**6))


def test_a_rule_admits_the_tiers_that_it_names() -> None:
    rule = PromptRule(min_prompt_tokens=5, tiers=("batch", "night"))
    assert rule.admits(5, "night") and not rule.admits(5, "gold") and not rule.admits(4, "night")


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        (PromptRule(min_prompt_tokens=5000), "5000 tokens or more"),
        (PromptRule(max_prompt_tokens=4999), "1 to 4999 tokens"),
        (BATCH, "any length of tier batch"),
        (
            PromptRule(min_prompt_tokens=2, max_prompt_tokens=3, tiers=("a", "b")),
            "2 to 3 tokens of tier a or b",
        ),
    ],
)
def test_a_rule_in_words(rule: PromptRule, text: str) -> None:
    assert str(rule) == text


def between(least: int | None, most: int | None, *tiers: str) -> PromptRule:
    return PromptRule(min_prompt_tokens=least, max_prompt_tokens=most, tiers=tiers)


@pytest.mark.parametrize(
    ("rules", "gap"),
    [
        ([LONG, TAKES_ALL], None),
        ([LONG, SHORT], None),
        ([LONG], between(None, 9, "gold")),
        ([SHORT], between(10, None, "gold")),
        ([between(None, 8), LONG], between(9, 9, "gold")),
        ([between(5, 20), between(None, 3), between(4, 30), between(25, None)], None),
        ([between(1, 100), between(2, 3), between(50, None)], None),
        ([BATCH, between(3, None)], between(None, 2, "gold")),
        ([between(None, None, "gold"), LONG], between(None, 9, "batch")),
        ([between(None, None, "gold"), BATCH], None),
        ([], between(None, None, "gold")),
    ],
)
def test_what_no_rule_admits_is_found(rules: list[PromptRule], gap: PromptRule | None) -> None:
    assert untaken(rules, ("gold", "batch")) == gap


def test_what_is_found_is_what_no_rule_admits() -> None:
    """Against every length and tier, for random rules."""
    rng, tiers, gaps = Random(5), ("a", "b"), 0
    for _ in range(400):
        rules = [random_rule(rng) for _ in range(rng.randint(1, 4))]
        free = [
            (tier, n)
            for tier in tiers
            for n in range(1, 14)
            if not any(rule.admits(n, tier) for rule in rules)
        ]
        gap = untaken(rules, tiers)
        gaps += gap is not None
        assert (gap is None) == (not free)
        assert gap is None or (gap.tiers[0], gap.min_prompt_tokens or 1) == free[0]
    assert 50 < gaps < 350


def random_rule(rng: Random) -> PromptRule:
    least, most = sorted((rng.randint(1, 12), rng.randint(1, 12)))
    return between(
        rng.choice((None, least)), rng.choice((None, most)), *rng.choice(((), ("a",), ("b",)))
    )


SECTION = "## Pools that take only some prompts\n"
PAGE = (REPOSITORY / "docs" / "placement.md").read_text().partition(SECTION)[2]


def test_the_example_of_the_documentation_is_a_cluster_file(tmp_path: Path) -> None:
    example = PAGE.partition("```yaml\n")[2].partition("```")[0]
    path = tmp_path / "cluster.yaml"
    path.write_text(example)
    rules = [pool.takes.rule for pool in load_config(path, []).workers]
    assert rules == [TAKES_ALL, between(5000, None, "batch"), TAKES_ALL]
    path.write_text(
        example.replace("device: cuda}", "device: cuda, takes: {max_prompt_tokens: 4999}}", 1)
    )
    with pytest.raises(ConfigError) as error:
        load_config(path, [])
    assert f"`{str(error.value).replace(str(path), 'cluster.yaml')}`" in " ".join(PAGE.split())


# --- placement ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "policy",
    [LeastLoaded(), LocalCache(), KvAware(), LocalPrefill(), RoundRobin(), RandomPair(Random(1))],
)
class TestEveryPolicy:
    def test_prompts_go_to_those_that_take_them(self, policy: PlacementPolicy) -> None:
        pools = timed(ruled("cpu", LONG), ruled("gpu", SHORT), view("d1", D), view("d2", D))
        pools[0].times = PerToken(token_s=0.011)  # a little slower, so both would be used
        assert prefillers(policy, A_LONG, *pools) - {"d1", "d2"} == {"cpu"}
        assert prefillers(policy, A_SHORT, *pools) - {"d1", "d2"} == {"gpu"}

    def test_a_tier_has_workers_of_its_own(self, policy: PlacementPolicy) -> None:
        pools = timed(
            ruled("slow", BATCH), ruled("b", PromptRule(tiers=("default",))), view("d", D)
        )
        assert prefillers(policy, IN_BATCH, *pools) - {"d"} == {"slow"}
        assert prefillers(policy, A_SHORT, *pools) - {"d"} == {"b"}

    def test_while_nobody_takes_it_anybody_gets_it(self, policy: PlacementPolicy) -> None:
        """Those that take it are gone, drain, are silent or too small."""
        cpu, gpu, d = timed(ruled("cpu", LONG), ruled("gpu", SHORT), view("d", D))
        assert "gpu" in prefillers(policy, A_LONG, gpu, d)
        cpu.draining = True
        assert "gpu" in prefillers(policy, A_LONG, cpu, gpu, d)
        cpu.draining, cpu.suspect = False, True
        assert "gpu" in prefillers(policy, A_LONG, cpu, gpu, d)
        cpu.suspect = False
        assert "gpu" not in prefillers(policy, A_LONG, cpu, gpu, d)
        cpu.hello = replace(cpu.hello, max_model_len=12)
        assert "gpu" in prefillers(policy, A_LONG, cpu, gpu, d)

    def test_workers_of_both_roles_have_rules_too(self, policy: PlacementPolicy) -> None:
        one, other = timed(ruled("long", LONG, BOTH), ruled("short", SHORT, BOTH))
        assert prefillers(policy, A_LONG, one, other) == {"long"}
        assert prefillers(policy, A_SHORT, one, other) == {"short"}
        p, d = timed(ruled("cpu", LONG), view("d", D))
        assert prefillers(policy, A_LONG, other, p, d) == {"cpu"}
        assert prefillers(policy, A_SHORT, other, p, d) - {"d"} == {"short"}
        assert prefillers(policy, A_LONG, other, p) == {"short"}, "nobody decodes for cpu"


def test_a_full_worker_of_both_roles_does_not_open_the_others() -> None:
    one, other = timed(ruled("long", LONG, BOTH), ruled("short", SHORT, BOTH))
    assert not ways(KvAware(), one, other, asked=A_LONG, tried=("long",))


def test_what_was_emitted_does_not_make_a_prompt_long() -> None:
    asked = replace(A_SHORT, spec=replace(A_SHORT.spec, emitted_ids=(1, 2, 3)))
    assert asked.prompt_tokens == 12
    pools = timed(ruled("cpu", LONG), ruled("gpu", SHORT), view("d", D))
    assert prefillers(KvAware(), asked, *pools) == {"gpu"}


def test_a_prompt_without_output_goes_by_the_rules() -> None:
    pools = timed(ruled("cpu", LONG), ruled("gpu", SHORT), view("d", D))
    asked = demand(prompt_tokens=10, output_tokens=0)
    assert asked.is_prompt_only
    assert prefillers(KvAware(), asked, *pools) == {"cpu"}
    assert prefillers(KvAware(), asked, *pools[:2]) == {"cpu"}, "nobody needs to decode"


def test_decode_workers_without_a_rule_compute_prompts_as_before() -> None:
    gpu, cpu, d = timed(ruled("gpu", SHORT), ruled("cpu", LONG), view("d", D))
    waits(gpu, seconds=0.1)
    assert ways(LocalPrefill(), gpu, cpu, d, asked=A_SHORT)[0].placement == placed("d", None)


def test_a_decode_worker_with_a_rule_computes_only_what_it_takes() -> None:
    """Its pool takes either role."""
    p, d = timed(view("p", P), ruled("d", LONG, D))
    waits(p, seconds=9.0)
    assert ways(LocalPrefill(), p, d, asked=A_LONG)[0].placement == placed("d", None)
    assert ways(LocalPrefill(), p, d, asked=A_SHORT)[0].placement == placed("d", "p")


# --- predicted completion -----------------------------------------------------------------------


NAMES = (("fast", P), ("slow", P), ("d", D))


def unlike() -> list[WorkerView]:
    """For a prompt of 100 tokens the fast one takes 0.1 s, the slow one 1 s."""
    fast, slow, d = timed(*(view(n, r, max_model_len=1000) for n, r in NAMES))
    fast.times, slow.times = PerToken(token_s=0.001), PerToken(token_s=0.01)
    return [fast, slow, d]


@pytest.mark.parametrize(("queued_s", "chosen"), [(0.0, "fast"), (0.89, "fast"), (0.91, "slow")])
def test_a_slow_worker_is_used_once_the_fast_ones_queue_is_longer_than_the_difference(
    queued_s: float, chosen: str
) -> None:
    fast, slow, d = unlike()
    if queued_s:
        waits(fast, seconds=queued_s)
    asked = demand(prompt_tokens=100)
    assert ways(KvAware(), slow, fast, d, asked=asked)[0].placement == placed("d", chosen)


def test_a_fast_worker_that_would_be_late_leaves_it_to_a_slow_one_in_time() -> None:
    fast, slow, d = unlike()
    waits(fast, seconds=2.0)
    asked = demand(prompt_tokens=100, ttft_s=1.5)
    assert ways(KvAware(), fast, slow, d, asked=asked)[0].placement == placed("d", "slow")


# --- in a router --------------------------------------------------------------------------------


def joined(core: RouterCore, **rules: PromptRule) -> RouterCore:
    for name, rule in rules.items():
        told = replace(hello(name.replace("_", "-"), P), takes=rule)
        core.handle(WorkerJoined(hello=told), 0)
    core.handle(WorkerJoined(hello=hello("d-0", D, places=40)), 0)
    return core


def ask(core: RouterCore, name: str, tokens: int) -> list[Command]:
    """Submitted, and its decode worker has taken it."""
    asked = replace(request(name), prompt_ids=tuple(range(tokens)))
    core.handle(Submitted(request=asked), 1)
    attempt = core.state.requests[name].attempt
    return says(core, "d-0", reserved(name, attempt))


def sent(commands: list[Command]) -> list[tuple[str, str]]:
    """(worker, request)"""
    sends = [one for one in commands if isinstance(one, Send)]
    return [
        (one.worker, one.message.spec.key.request_id)
        for one in sends
        if isinstance(one.message, Prefill)
    ]


def test_the_prompts_of_a_dead_pool_go_elsewhere() -> None:
    core = joined(RouterCore(), cpu_0=LONG, gpu_0=SHORT)
    assert sent(ask(core, "a", 20)) == [("cpu-0", "a")]
    core.handle(WorkerLost(incarnation=Incarnation("cpu-0")), 2)
    attempt = core.state.requests["a"].attempt
    assert sent(says(core, "d-0", reserved("a", attempt))) == [("gpu-0", "a")]
    assert sent(ask(core, "b", 20)) == [("gpu-0", "b")]
    core.validate()


def shared(**rules: PromptRule) -> RouterCore:
    workers, tiers = Workers(), QosTiers()
    dispatch = open_shared_queue(workers, tiers)
    return joined(RouterCore(RouterState(dispatch=dispatch, workers=workers)), **rules)


def test_a_shared_queue_gives_each_pool_its_prompts() -> None:
    """The short one waits behind two long ones, and the gpu is free."""
    core = shared(cpu_0=LONG, gpu_0=SHORT)
    assert sent(ask(core, "a", 20)) == [("cpu-0", "a")]
    assert sent(ask(core, "b", 20)) == []
    assert sent(ask(core, "c", 5)) == [("gpu-0", "c")]
    lost = core.handle(WorkerLost(incarnation=Incarnation("cpu-0")), 2)
    assert ("gpu-0", "b") in sent([*lost, *says(core, "gpu-0", lifetime("prefill_started", "c"))])
    core.validate()


def began(name: str, attempt: int, cached: int) -> Lifetime:
    return Lifetime(key=key(name, attempt), at_s=2, name="prefill_started", tokens=cached)


def test_the_share_of_a_pool_is_counted() -> None:
    core = joined(RouterCore(), cpu_0=LONG, cpu_1=LONG, gpu_0=SHORT)
    assert core.state.prefilled == {"cpu": PrefilledWork(), "gpu": PrefilledWork()}
    for number, (name, tokens) in enumerate((("a", 20), ("b", 30), ("c", 5))):
        ((worker, _),) = sent(ask(core, name, tokens))
        says(core, worker, began(name, number, cached=4))
        says(core, worker, lifetime("prefill_chunk", name, number))
    assert core.state.prefilled == {"cpu": PrefilledWork(2, 42), "gpu": PrefilledWork(1, 1)}
    core.handle(WorkerLost(incarnation=Incarnation("gpu-0")), 3)
    assert core.state.prefilled["gpu"] == PrefilledWork(1, 1)


def test_a_decode_worker_counts_once_it_computes_a_prompt() -> None:
    core = joined(RouterCore(), p_0=TAKES_ALL)
    ask(core, "a", 20)
    core.handle(WorkerLost(incarnation=Incarnation("p-0")), 2)
    attempt = core.state.requests["a"].attempt
    says(core, "d-0", reserved("a", attempt), began("a", attempt, cached=0))
    assert core.state.prefilled == {"p": PrefilledWork(), "d": PrefilledWork(1, 20)}


def test_a_worker_counts_in_the_pool_that_it_names() -> None:
    core = RouterCore()
    told = replace(hello("prefill-5f6d8-x2k9p", P), pool="prefill")
    core.handle(WorkerJoined(hello=told), 0)
    core.handle(WorkerJoined(hello=hello("d-0", D, places=40)), 0)
    ask(core, "a", 20)
    says(core, told.name, began("a", 0, cached=0), lifetime("prefill_chunk", "a", 0))
    assert core.state.prefilled == {"prefill": PrefilledWork(1, 20)}


def test_a_worker_that_hands_over_what_it_decoded_computes_no_prompt() -> None:
    p, old, new = view("p", P), view("d", D), view("d2", D)
    assert Candidate(decode=new, prefill=p).computes_prompt
    assert Candidate(decode=new, prefill=None).computes_prompt
    assert not Candidate(decode=new, prefill=old).computes_prompt


def test_metrics_tell_shares_and_rules() -> None:
    workers = tuple(
        replace(WORKER, name=name, pool="cpu", takes=LONG) for name in ("cpu-0", "cpu-1")
    )
    told = replace(
        FakeDispatcher().snapshot(), workers=(replace(WORKER, takes=TAKES_ALL), *workers)
    )
    text = RouterMetrics("m").exposition(told).decode()
    samples = {
        (one.name, *one.labels.values()): one.value
        for family in text_string_to_metric_families(text)
        for one in family.samples
        if one.name.startswith("kvrelay:pool_prefilled") or one.name == "kvrelay:pool_takes_info"
    }
    assert samples == {
        ("kvrelay:pool_prefilled_prompts_total", "m", "cpu"): 3,
        ("kvrelay:pool_prefilled_tokens_total", "m", "cpu"): 20_000,
        ("kvrelay:pool_takes_info", "m", "cpu", "10 tokens or more"): 1,
    }


# --- in the simulator ---------------------------------------------------------------------------


SLOW, FAST = ({**LINEAR, "prefill_token_s": seconds} for seconds in (0.0005, 0.0001))


def pools(cpu: str, gpu: str) -> tuple[str, str]:
    """A slow and a fast pool of one prefill worker each, with these rules."""
    return (
        f"simulation.pools=[{{profile: {SLOW}}}, {{profile: {FAST}}}, {{profile: {FAST}}}]",
        f"workers=[{{name: cpu, role: prefill, takes: {cpu}}}, "
        f"{{name: gpu, role: prefill, takes: {gpu}}}, {{role: decode}}]",
    )


def asked_every(every_s: float) -> list[TraceRequest]:
    rng = Random(7)
    return [
        TraceRequest(arrival_s=n * every_s, input_tokens=rng.randint(1, 6000), output_tokens=5)
        for n in range(60)
    ]


def test_the_simulator_goes_by_the_rules() -> None:
    """The pool with long prompts is five times as slow: without rules it would get nearly none."""
    rules = pools("{min_prompt_tokens: 3000}", "{max_prompt_tokens: 2999}")
    asked = asked_every(1.0)
    result = run(asked, *rules)
    assert all(done([*result.outcomes]))
    cpu, gpu, _ = result.report.pools
    lengths = [one.input_tokens for one in asked]
    assert cpu.prompt_tokens == sum(n for n in lengths if n >= 3000)
    assert gpu.prompt_tokens == sum(n for n in lengths if n < 3000)


def test_a_slow_pool_is_used_only_while_the_fast_one_would_be_done_later() -> None:
    """The fast one takes every prompt. Idle, it is always done first."""
    rules = pools("{min_prompt_tokens: 3000}", "{}")
    long = sum(one.input_tokens for one in asked_every(1.0) if one.input_tokens >= 3000)
    calm = run(asked_every(1.0), *rules).report.pools[0].prompt_tokens
    busy = run(asked_every(0.2), *rules).report.pools[0].prompt_tokens
    full = run(asked_every(0.01), *rules).report.pools[0].prompt_tokens
    assert calm == 0 < busy < full <= long
