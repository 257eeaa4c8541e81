from __future__ import annotations

from random import Random

import pytest

from kvpool.core.layout.block_names import BlockNames
from kvrelay.counters import Counters, LinkState
from kvrelay.types import Incarnation, Role
from router.core.load.decode_outlook import BatchThen, Expected
from router.core.load.prefill_queue import Ahead
from router.core.policy.forecast import Forecast
from router.core.policy.kv_aware import KvAware, Steps, _steps
from router.core.policy.placement import PlacementPolicy, least_against
from router.core.policy.placement_baselines import LeastLoaded, LocalCache, RandomPair, RoundRobin
from router.core.state.candidate import Candidate
from router.core.state.demand import Demand
from router.core.state.directory import Directory
from router.core.state.quarantine import Pair, Placement, trusted
from router.core.state.worker_view import WorkerView
from router.core.workers import fitting
from tests.unit.directory_kit import holding
from tests.unit.router_kit import PerToken, demand, key, view, workers_of

P, D, BOTH = Role.PREFILL, Role.DECODE, Role.BOTH


def ways(
    policy: PlacementPolicy,
    *workers: WorkerView,
    asked: Demand | None = None,
    tried: tuple[str, ...] = (),
) -> list[Candidate]:
    asked = asked or demand()
    views = workers_of(*workers)
    names = [Incarnation(name) for name in tried]
    choice = views.choice(asked, names, trusted, Forecast(views))
    return list(policy.candidates(asked, choice, 0.0))


def place(
    *workers: WorkerView, asked: Demand | None = None, tried: tuple[str, ...] = ()
) -> Placement | None:
    found = ways(LeastLoaded(), *workers, asked=asked, tried=tried)
    return found[0].placement if found else None


def placed(decode: str, prefill: str | None) -> Placement:
    return Placement(
        decode=Incarnation(decode), prefill=None if prefill is None else Incarnation(prefill)
    )


def waits(worker: WorkerView, seconds: float = 1.0, tokens: int = 10) -> WorkerView:
    """With so much ahead of the next prompt."""
    worker.queue.add(key(f"on {worker.incarnation}"), Ahead(seconds=seconds, tokens=tokens), 0)
    return worker


def decodes(worker: WorkerView, choices: int, tokens: int = 10) -> WorkerView:
    expected = Expected(joins_s=0, ends_s=100, tokens=tokens, choices=choices)
    worker.outlook.add(key(f"on {worker.incarnation}"), expected)
    return worker


def four() -> tuple[WorkerView, ...]:
    return view("p1", P), view("p2", P), view("d1", D), view("d2", D)


# --- least loaded -------------------------------------------------------------------------------


def test_the_emptiest_decode_worker_and_the_shortest_prefill_queue() -> None:
    p1, p2, d1, d2 = four()
    assert place(waits(p1), p2, decodes(d1, 1), d2) == placed("d2", "p2")


def test_ties_go_to_the_first() -> None:
    assert place(*four()) == placed("d1", "p1")


def test_load_is_a_share_of_the_batch() -> None:
    small, large = view("small", D, places=2), view("large", D, places=10)
    found = place(view("p", P), decodes(small, 1), decodes(large, 2))
    assert found == placed("large", "p")


def test_what_a_worker_says_counts_where_it_is_more_than_what_was_sent() -> None:
    p1, p2, d1, d2 = four()
    p1.counters = Counters(prefill_waiting_tokens=5)
    d1.counters = Counters(running=3)
    assert place(p1, p2, d1, decodes(d2, 2)) == placed("d2", "p2")


def test_a_worker_of_both_roles_competes() -> None:
    p, d, b = view("p", P), decodes(view("d", D), 1), view("b", BOTH)
    assert place(p, d, b) == placed("b", None)
    assert place(p, d, b, tried=("b",)) == placed("d", "p")
    assert place(p, d, b, tried=("b", "d")) is None


@pytest.mark.parametrize(
    "policy", [LeastLoaded(), LocalCache(), KvAware(), RoundRobin(), RandomPair(Random(1))]
)
class TestEveryPolicy:
    def test_decode_without_prefill_is_no_pair(self, policy: PlacementPolicy) -> None:
        assert not ways(policy, view("d", D))
        assert not ways(policy, view("p", P))
        assert not ways(policy)

    def test_each_decode_worker_is_suggested(self, policy: PlacementPolicy) -> None:
        """Also those that it doesn't look at closely."""
        many = [view(f"d{i}", D) for i in range(9)]
        found = ways(policy, view("p1", P), view("p2", P), view("b", BOTH), *many)
        assert {way.decode.incarnation for way in found} == {"b", *(f"d{i}" for i in range(9))}
        assert all((way.prefill is None) == (way.decode.incarnation == "b") for way in found)

    def test_only_workers_that_it_fits(self, policy: PlacementPolicy) -> None:
        short = view("short", BOTH, max_model_len=10)
        narrow = view("narrow", BOTH, places=1)
        found = ways(policy, short, narrow, view("b", BOTH), asked=demand(n=2))
        assert {way.decode.incarnation for way in found} == {"b"}


def test_what_fits() -> None:
    assert not fitting([view("short", BOTH, max_model_len=10)], demand())  # 3 and 8 new ones
    assert fitting([view("b", BOTH, max_model_len=11)], demand())
    narrow = view("narrow", BOTH, places=1)
    assert fitting([narrow], demand())
    assert not fitting([narrow], demand(n=2))


def test_those_that_drain_are_left_out() -> None:
    p1, p2, d1, d2 = four()
    p1.draining = d1.draining = True
    assert place(p1, p2, d1, d2) == placed("d2", "p2")


# --- in turn, and at random ---------------------------------------------------------------------


def test_round_robin_takes_turns_in_both_roles() -> None:
    policy, workers = RoundRobin(), (*four(), view("d3", D))
    first = [ways(policy, *workers)[0].placement for _ in range(4)]
    assert first == [placed("d1", "p1"), placed("d2", "p2"), placed("d3", "p1"), placed("d1", "p2")]


def test_random_pairs_come_all_alike() -> None:
    policy = RandomPair(Random(7))
    pairs = [ways(policy, *four())[0].placement for _ in range(400)]
    counts = [pairs.count(one) for one in {*pairs}]
    assert len(counts) == 4
    assert min(counts) > 70


# --- caches -------------------------------------------------------------------------------------


def with_cached(holder: str, blocks: int) -> Directory:
    """Of the prompt 0, 1, 2 ...; blocks have four tokens."""
    hello = view(holder, P).hello
    names = BlockNames(
        fingerprint=hello.fingerprint,
        physical_format=hello.physical_format,
        rope_border_tokens=hello.rope_border_tokens,
    )
    chain = names.chain("", 100, 4)
    chain.extend(range(100), 4 * blocks)
    directory = Directory()
    directory.changed(Incarnation(holder), holding(chain.full(4 * blocks).hashes()))
    return directory


def timed(*workers: WorkerView, times: PerToken | None = None) -> list[WorkerView]:
    for worker in workers:
        worker.times = times or PerToken(token_s=0.01, sequence_s=0.1)
    return list(workers)


def test_local_cache_prefers_the_worker_that_has_the_prefix_until_it_is_busy() -> None:
    asked = demand(prompt_tokens=40, directory=with_cached("p2", 5))
    p1, p2, *rest = timed(*four())
    assert ways(LocalCache(), p1, p2, *rest, asked=asked)[0].placement == placed("d1", "p2")
    waits(p2, seconds=0.19)  # 20 tokens saved take 0.2 s
    assert ways(LocalCache(), p1, p2, *rest, asked=asked)[0].placement == placed("d1", "p2")
    p2.queue.remove(key("on p2"), 0)
    waits(p2, seconds=0.21)
    (first, *_) = ways(LocalCache(), p1, p2, *rest, asked=asked)
    assert (first.placement, first.source) == (placed("d1", "p1"), None)


def test_kv_aware_pulls_where_that_is_faster_than_waiting_or_computing() -> None:
    asked = demand(prompt_tokens=40, directory=with_cached("p2", 5))
    p1, p2, *rest = timed(*four())
    (first, *_) = ways(KvAware(), p1, p2, *rest, asked=asked)
    assert (first.placement, first.source) == (placed("d1", "p2"), None)
    waits(p2, seconds=0.05)
    (first, *_) = ways(KvAware(), p1, p2, *rest, asked=asked)
    assert first.placement == placed("d1", "p1")
    assert first.source is not None
    assert (first.source.peer, first.source.blocks) == ("p2", 5)


def test_kv_aware_sees_the_link_between_the_two() -> None:
    """d2's batch is the larger one, but KV gets to d1 late from p1."""
    p1, p2, d1, d2 = timed(*four())
    slow, fast = (
        LinkState(peer=Incarnation("d1"), transport="t", bytes_per_s=1e9, latency_s=seconds)
        for seconds in (5.0, 0.001)
    )
    p1.counters, p2.counters = Counters(links=(slow,)), Counters(links=(fast,))
    decodes(d2, 3)
    assert ways(KvAware(), p1, p2, d1, d2)[0].placement == placed("d1", "p2")


def test_kv_aware_keeps_objectives_before_it_saves_time() -> None:
    """With d1 the first token comes sooner and the others later than is asked for."""
    p, d1, d2 = timed(view("p", P), view("d1", D), view("d2", D))
    d1.times, d2.times = PerToken(sequence_s=0.3), PerToken(sequence_s=0.2)
    link = LinkState(peer=Incarnation("d2"), transport="t", bytes_per_s=1e9, latency_s=0.2)
    p.counters = Counters(links=(link,))
    short, long = demand(output_tokens=2), demand(output_tokens=2, tpot_s=0.41)
    assert ways(KvAware(), p, d1, d2, asked=short)[0].placement == placed("d1", "p")
    d1.times = PerToken(sequence_s=0.3, context_s=0.03)
    assert ways(KvAware(), p, d1, d2, asked=long)[0].placement == placed("d2", "p")


def test_kv_aware_puts_a_long_context_where_few_decode() -> None:
    """Its own steps would be shorter at d1, where three would wait for it."""
    p, d1, d2 = timed(view("p", P), view("d1", D), view("d2", D))
    d1.times = d2.times = PerToken(context_s=0.01)
    decodes(d1, 3, tokens=5)
    decodes(d2, 1, tokens=20)
    assert ways(KvAware(), p, d1, d2)[0].placement == placed("d2", "p")


def test_kv_aware_counts_those_that_join_soon_after() -> None:
    p, d1, d2 = timed(view("p", P), view("d1", D), view("d2", D))
    d1.times = d2.times = PerToken(sequence_s=0.1)
    d1.outlook.add(key("soon"), Expected(joins_s=1.0, ends_s=9.0, tokens=10))
    d2.outlook.add(key("late"), Expected(joins_s=900.0, ends_s=999.0, tokens=10, choices=2))
    asked = demand(output_tokens=40)
    assert ways(KvAware(), p, d1, d2, asked=asked)[0].placement == placed("d2", "p")


def test_kv_aware_looks_at_full_workers_last() -> None:
    full = [decodes(view(f"full{i}", D, places=1), 1) for i in range(6)]
    slow = view("slow", D)
    slow.times = PerToken(sequence_s=9)
    found = ways(KvAware(), *timed(view("p", P)), *timed(*full), slow)
    assert found[0].decode is slow
    assert {way.decode.incarnation for way in found} == {"slow", *(f"full{i}" for i in range(6))}


def test_a_suspected_pair_is_not_suggested_first() -> None:
    suspected = Pair(Incarnation("p1"), Incarnation("d1"))
    workers = workers_of(*timed(*four()))
    choice = workers.choice(
        demand(), (), lambda one: (int(one == suspected), 0.0), Forecast(workers)
    )
    (first, *_) = KvAware().candidates(demand(), choice, 0.0)
    assert first.placement == placed("d2", "p1")
    other = Candidate(decode=workers[suspected.decode], prefill=workers[suspected.prefill])
    assert [*choice.acceptable([other, first])] == [first]


def test_it_costs_those_that_are_in_a_step_not_all_that_are_there() -> None:
    """Two of the six: 240 ms with it, 220 ms without."""
    worker = view("b", BOTH, places=2)
    worker.times = PerToken(sequence_s=0.1, context_s=0.001)
    asked = demand(prompt_tokens=16, output_tokens=8)
    found = _steps(asked, BatchThen(5, 20), worker)
    assert found == pytest.approx(Steps(own_s=0.24, cost_s=0.24 + 2 * 0.02))


@pytest.mark.parametrize("order", [("p", "p2", "p3"), ("p3", "p2", "p")])
def test_where_every_pair_is_suspected_the_least_of_it_counts(order: tuple[str, ...]) -> None:
    against = {"p": 2, "p2": 1, "p3": 3}
    prefills = [view(name, Role.PREFILL) for name in order]
    decoders = [view("d", Role.DECODE)]
    assert least_against(prefills, decoders, lambda pair: (against[pair.prefill], 0.0)) == 1
    assert least_against([], decoders, lambda pair: (1, 0.0)) == 0
