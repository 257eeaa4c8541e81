"""What a scrape shows of the links of a large cluster."""

from __future__ import annotations

from dataclasses import replace

from prometheus_client.parser import text_string_to_metric_families

from kvrelay.counters import Counters, LinkState
from kvrelay.types import Incarnation, MemoryPart
from router.core.state.generation import ClusterSnapshot
from router.core.state.quarantine import LATELY_S, MOST_PAIRS, Pair, RecentPairs
from router.live.metrics import MOST_LINKS, RouterMetrics, of_workers
from tests.unit.fake_dispatcher import WORKER, FakeDispatcher
from tests.unit.router_kit import lifetime, reserved, says, split, submit

P, D = Incarnation("p"), Incarnation("d")


def pair(number: int) -> Pair:
    return Pair(Incarnation(f"p{number}"), Incarnation(f"d{number}"))


def test_pairs_are_recent_for_a_while_and_the_latest_come_first() -> None:
    recent = RecentPairs()
    recent.used([pair(0), pair(1)], 0.0)
    recent.used([pair(2)], 1.0)
    recent.used([pair(0)], 2.0)
    assert recent.lately(3.0) == (pair(0), pair(2), pair(1))
    assert recent.lately(1.0 + LATELY_S) == (pair(0), pair(2))
    recent.forget(Incarnation("d2"))
    assert recent.lately(3.0) == (pair(0), pair(1))


def test_no_more_pairs_are_kept_than_are_shown() -> None:
    recent = RecentPairs()
    for number in range(MOST_PAIRS + 5):
        recent.used([pair(number)], 0.0)
    kept = recent.lately(0.0)
    assert len(kept) == MOST_PAIRS
    assert kept[0] == pair(MOST_PAIRS + 4)


def test_a_handoff_makes_its_pair_recent_until_a_worker_is_gone() -> None:
    core = split()
    submit(core)
    says(core, "d", reserved())
    assert core.state.recent_pairs.lately(2) == ()
    says(core, "d", lifetime("handoff_committed"), now_s=3)
    assert core.state.recent_pairs.lately(3) == (Pair(P, D),)
    core.state.recent_pairs.forget(D)
    assert core.state.recent_pairs.lately(3) == ()


def links_shown(snapshot: ClusterSnapshot) -> list[tuple[str, str]]:
    text = RouterMetrics("m").exposition(snapshot).decode()
    (family,) = [f for f in text_string_to_metric_families(text) if f.name == "kvrelay:link_info"]
    return [(sample.labels["src"], sample.labels["dst"]) for sample in family.samples]


def test_the_directory_tells_how_full_it_is() -> None:
    text = RouterMetrics("m").exposition(FakeDispatcher().snapshot()).decode()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    told = {name: families[f"kvrelay:directory_{name}"] for name in ("blocks", "bytes")}
    told["dropped"] = families["kvrelay:directory_dropped_blocks"]
    assert {name: one.samples[0].value for name, one in told.items()} == {
        "blocks": 40,
        "bytes": 9000,
        "dropped": 7,
    }


def test_moves_are_told_by_their_cause_and_promises_by_their_outcome() -> None:
    text = RouterMetrics("m").exposition(FakeDispatcher().snapshot()).decode()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    moved, told = families["kvrelay:requests_moved"], families["kvrelay:retry_promises"]
    assert {one.labels["cause"]: one.value for one in moved.samples} == {
        "leaving": 6,
        "hot_spot": 2,
    }
    assert {one.labels["outcome"]: one.value for one in told.samples} == {
        "kept": 2,
        "broken": 1,
        "expired": 0,
    }


def all_to_all(each: int, linked: tuple[Pair, ...]) -> ClusterSnapshot:
    """Prefill workers with a link to each decode worker."""
    links = tuple(
        LinkState(peer=Incarnation(f"d{d}"), transport="shm", bytes_per_s=1e9, latency_s=1e-5)
        for d in range(each)
    )
    prefills = [
        replace(WORKER, name=f"prefill-{p}", incarnation=f"p{p}", counters=Counters(links=links))
        for p in range(each)
    ]
    decodes = [replace(WORKER, name=f"decode-{d}", incarnation=f"d{d}") for d in range(each)]
    return replace(FakeDispatcher().snapshot(), workers=(*prefills, *decodes), linked=linked)


def test_only_links_that_carried_kv_lately_are_shown() -> None:
    gone = Pair(Incarnation("p0"), Incarnation("another"))
    assert links_shown(all_to_all(3, ())) == []
    shown = links_shown(all_to_all(3, (pair(1), gone, Pair(pair(0).prefill, pair(2).decode))))
    assert shown == [("prefill-1", "decode-1"), ("prefill-0", "decode-2")]


def test_a_workers_role_is_in_its_info_and_no_label_of_its_counters() -> None:
    """A flip would end their series."""
    drains = Counters(draining=True)
    workers = (
        replace(WORKER, name="d-0", role="decode"),
        replace(WORKER, name="p-0", role="prefill", counters=drains),
    )
    families = [*of_workers(workers, "m")]
    (info,) = [one for one in families if one.name == "kvrelay:worker_info"]
    told = {s.labels["worker"]: (s.labels["role"], s.labels["state"]) for s in info.samples}
    assert told == {"d-0": ("decode", "serving"), "p-0": ("prefill", "draining")}
    others = [sample for one in families if one is not info for sample in one.samples]
    assert {sample.labels["worker"] for sample in others} == {"d-0", "p-0"}
    assert not [sample for sample in others if {"role", "state"} & sample.labels.keys()]


def test_memory_is_told_by_what_it_is_for() -> None:
    memory = (MemoryPart(part="weights", nbytes=5), MemoryPart(part="KV", nbytes=7))
    families = of_workers((replace(WORKER, memory=memory),), "m")
    (found,) = [one for one in families if one.name == "kvrelay:worker_memory_bytes"]
    told = {(s.labels["worker"], s.labels["part"]): s.value for s in found.samples}
    assert told == {(WORKER.name, "weights"): 5.0, (WORKER.name, "KV"): 7.0}


def test_at_most_a_thousand_links_are_shown() -> None:
    each = 33
    pairs = tuple(
        Pair(Incarnation(f"p{p}"), Incarnation(f"d{d}")) for p in range(each) for d in range(each)
    )
    assert len(links_shown(all_to_all(each, pairs))) == MOST_LINKS < len(pairs)
