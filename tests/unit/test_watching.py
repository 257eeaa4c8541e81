"""What Admin.Watch tells, from a real router core; and its streams: their ends, and how many."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from kvrelay.counters import Activity, Counters, LinkState
from kvrelay.errors import InvalidRequest, Refused
from kvrelay.types import Incarnation, Role
from kvrelay.v1 import admin_pb2 as pb
from router.core.core import RouterCore
from router.core.events import WorkerSaid, WorkerSuspected
from router.core.state.quarantine import Pair
from router.grpc_api.watches import MOST_STREAMS, Watches
from router.live.watching import AdmissionCounts, Seen, report_of
from tests.integration.faces_kit import in_loop
from tests.unit.router_kit import reserved, says, split, submit

P, D = Incarnation("p"), Incarnation("d")


def told(core: RouterCore, *, now_s: float = 3, **seen: Seen) -> pb.WatchReport:
    by_worker = {Incarnation(name): one for name, one in seen.items()}
    return report_of(core.state, by_worker, AdmissionCounts(), "", now_s)


def worker(core: RouterCore, name: str, **seen: Seen) -> pb.WatchedWorker:
    (found,) = [one for one in told(core, **seen).workers if one.info.name == name]
    return found


def report(core: RouterCore, name: str, counters: Counters) -> None:
    core.handle(WorkerSaid(incarnation=Incarnation(name), events=(), counters=counters), 2)


def test_a_worker_that_has_said_nothing() -> None:
    found = worker(split(), "d")
    assert (found.info.role, found.role_epoch, found.state) == ("decode", 0, pb.WORKER_STATE_READY)
    assert not found.HasField("heard_ago_s") and not found.HasField("decode_step_s")
    assert (found.info.total_blocks, found.info.address) == (16, "")


def test_what_a_worker_has_said() -> None:
    core = split()
    counters = Counters(
        running=2, waiting=3, prefill_waiting_tokens=70, free_blocks=5, cached_blocks=4
    )
    counters.decode_sequences, counters.decode_kv_tokens = 1, 100
    report(core, "d", counters)
    rates = Activity(prompt_tokens_per_s=10.0, generated_tokens_per_s=20.0)
    found = worker(core, "d", d=Seen(address="h:1", heard_s=2.5, activity=rates))
    assert (found.info.running, found.info.waiting, found.waiting_tokens) == (2, 3, 70)
    assert (found.info.free_blocks, found.info.cached_blocks, found.info.total_blocks) == (5, 4, 16)
    assert (found.info.address, found.heard_ago_s) == ("h:1", 0.5)
    assert (found.info.prompt_tokens_per_s, found.info.generated_tokens_per_s) == (10.0, 20.0)
    assert found.decode_step_s == pytest.approx(0.01 + 100 * 1e-5)
    assert found.prefill_token_s > 0


def test_its_state_is_what_keeps_most_from_it() -> None:
    core = split()
    core.handle(WorkerSuspected(incarnation=D), 2)
    assert worker(core, "d").state == pb.WORKER_STATE_SILENT
    report(core, "d", Counters(draining=True))
    assert worker(core, "d").state == pb.WORKER_STATE_DRAINING
    assert worker(core, "p").state == pb.WORKER_STATE_READY


def test_a_worker_of_a_quarantined_pair() -> None:
    core = split()
    core.state.quarantine.failed(Pair(P, D), "transfer_failed", 2.0)
    report = told(core)
    assert [one.state for one in report.workers] == [pb.WORKER_STATE_QUARANTINED] * 2
    (pair,) = report.quarantined
    assert (pair.prefill, pair.decode, pair.reason) == ("p", "d", "transfer_failed")


def test_a_flip_is_its_own_role_and_epoch() -> None:
    core = split()
    report(core, "d", Counters(role=Role.PREFILL, role_epoch=1))
    found = worker(core, "d")
    assert (found.info.role, found.role_epoch) == ("prefill", 1)


def test_links_of_workers_that_are_here() -> None:
    core = split()
    links = (
        LinkState(peer=D, transport="shm", bytes_per_s=1e9, latency_s=1e-5),
        LinkState(peer=Incarnation("gone"), transport="shm"),
    )
    report(core, "p", Counters(links=links))
    (link,) = worker(core, "p").info.links
    assert (link.peer, link.transport) == ("d", "shm")
    assert (link.bytes_per_s, link.latency_s) == (1e9, 1e-5)


def test_requests_by_tier() -> None:
    core = split(places=1)
    submit(core, "a")
    says(core, "d", reserved("a"))
    counts = AdmissionCounts(admitted=Counter(default=5), refused=Counter(default=2, gone=1))
    found = report_of(core.state, {}, counts, "no worker", 3)
    assert (found.open_requests, found.not_ready) == (1, "no worker")
    assert [(t.name, t.open_requests, t.admitted, t.refused) for t in found.tiers] == [
        ("default", 1, 5, 2),
        ("gone", 0, 0, 1),
    ]


@pytest.mark.parametrize("interval_s", [0.0, -1.0, 0.05, 4000.0, float("nan"), float("inf")])
def test_an_interval_that_can_not_be(interval_s: float) -> None:
    with pytest.raises(InvalidRequest, match=r"give 0.1 to 3600 s"):
        Watches().check(interval_s)


@in_loop
async def test_a_slow_client_gets_the_latest_report() -> None:
    watches, built = Watches(), 0

    def build() -> pb.WatchReport:
        nonlocal built
        built += 1
        return pb.WatchReport(open_requests=built)

    stream = watches.reports(build, 0.1)
    assert (await anext(stream)).open_requests == 1
    assert built == 1, "the next one is built when it asks"
    assert (await anext(stream)).open_requests == 2
    await stream.aclose()
    assert watches.open == 0


@in_loop
async def test_the_end_of_the_router_ends_streams_at_once() -> None:
    watches = Watches()
    stream = watches.reports(pb.WatchReport, 3600.0)
    await anext(stream)
    asyncio.get_running_loop().call_soon(watches.end)
    with pytest.raises(StopAsyncIteration):
        await asyncio.wait_for(anext(stream), 10)
    assert watches.open == 0


@in_loop
async def test_there_may_be_only_so_many() -> None:
    watches = Watches()
    streams = [watches.reports(pb.WatchReport, 1.0) for _ in range(MOST_STREAMS)]
    for stream in streams:
        await anext(stream)
    with pytest.raises(Refused, match="no more are accepted"):
        watches.check(1.0)
    for stream in streams:
        await stream.aclose()
    watches.check(1.0)
