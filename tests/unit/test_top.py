"""What `kvrelay top` shows of reports, at 80 columns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from rich.console import Console

from cluster.cli.top.screen import as_facts, merged, screen, short
from cluster.watch.follow import RATE_S, Followed
from kvrelay.v1 import admin_pb2 as pb
from kvrelay.v1.inference_pb2 import LinkInfo, WorkerInfo


@dataclass
class Router:
    address: str = "h:1"
    report: pb.WatchReport | None = None
    trouble: str = ""
    before: pb.WatchReport | None = None


def worker(name: str, *, heard_ago_s: float | None = None, **info: object) -> pb.WatchedWorker:
    told = WorkerInfo(name=name, incarnation=name, role="decode", kv_used=0.25, **info)
    return pb.WatchedWorker(info=told, state=pb.WORKER_STATE_READY, heard_ago_s=heard_ago_s)


def shown(*routers: Router) -> list[str]:
    console = Console(width=80, highlight=False, markup=False)
    with console.capture() as captured:
        console.print(screen(routers))
    return [line.rstrip() for line in captured.get().splitlines()]


def test_workers_of_several_routers_are_shown_once_as_heard_last() -> None:
    """And sorted by pool and number."""
    first = pb.WatchReport(workers=[worker("d-10"), worker("d-2", running=1, heard_ago_s=3.0)])
    second = pb.WatchReport(workers=[worker("d-2", running=2, heard_ago_s=0.5), worker("a-0")])
    found = merged([first, second])
    assert [one.info.name for one in found] == ["a-0", "d-2", "d-10"]
    assert found[1].info.running == 2


def test_requests_are_added_up() -> None:
    tier = pb.WatchedTier(name="gold", open_requests=1, admitted=2, refused=3)
    report = pb.WatchReport(tiers=[tier])
    lines = shown(Router(report=report), Router(address="h:2", report=report))
    assert lines[-1].split() == ["gold", "2", "4", "6", "-", "-"]


def asked(uptime_s: float, prompt_tokens: float, output_tokens: float) -> pb.WatchReport:
    offered = pb.OfferedWork(prompt_tokens=prompt_tokens, output_tokens=output_tokens)
    return pb.WatchReport(uptime_s=uptime_s, tiers=[pb.WatchedTier(name="gold", offered=offered)])


def test_demand_is_what_clients_ask_for_each_second_at_all_routers() -> None:
    first = Router(before=asked(10.0, 500.0, 80.0), report=asked(15.0, 1500.0, 130.0))
    anew = Router(before=pb.WatchReport(uptime_s=0.0), report=asked(2.0, 200.0, 10.0))
    silent = Router(report=asked(9.0, 1e9, 1e9))
    lines = shown(first, anew, silent)
    assert lines[-2].split("refused")[1].split() == ["offered", "in/s", "out/s"]
    assert lines[-1].split() == ["gold", "0", "0", "0", "300", "15"]


def test_a_rate_is_over_the_last_ten_seconds_of_one_life_of_the_router() -> None:
    router = Followed("h:1")
    for uptime_s in range(30):
        router.hear(asked(float(uptime_s), 10.0 * uptime_s, 0.0))
    assert router.before is not None and router.before.uptime_s == 29 - RATE_S
    router.lose("the router has stopped")
    router.hear(asked(1.0, 0.0, 0.0))
    assert router.before is None


def test_a_router_that_is_gone_says_so() -> None:
    lines = shown(
        Router(trouble="the router has stopped"),
        Router(address="h:2", report=pb.WatchReport(not_ready="all workers drain")),
        Router(address="h:3", report=pb.WatchReport(leaving=True)),
    )
    assert lines[0] == "h:1: the router has stopped; trying again"
    assert lines[1].startswith("h:2: not ready: all workers drain, 0 requests open")
    assert lines[2].startswith("h:3: leaving")


def test_eighty_columns_are_enough() -> None:
    busy = worker(
        "prefill-of-a-long-name-0",
        running=9999,
        waiting=9999,
        prompt_tokens_per_s=999_999.0,
        generated_tokens_per_s=999_999.0,
        links=[LinkInfo(peer="d-0", transport="shm", bytes_per_s=2e9)],
    )
    busy.waiting_tokens, busy.decode_step_s = 9_999_999, 0.0123
    busy.state = pb.WORKER_STATE_QUARANTINED
    lines = shown(Router(report=pb.WatchReport(workers=[busy])))
    assert max(map(len, lines)) <= 80
    row = next(line for line in lines if line.startswith("prefill-of"))
    assert row.split()[1:] == [
        *("decode", "quarant.", "9999", "9999", "10.0M", "25%", "1000k", "1000k", "12.3", "ms")
    ]
    assert lines[-1] == "prefill-of-a-long-name-0 -> d-0 over shm: 2.0 GB/s, 0 us"


def test_facts_tell_what_is_not_there() -> None:
    offered = pb.OfferedWork(requests=7)
    gold = pb.WatchedTier(name="gold", admitted=2**40, offered=offered)
    report = pb.WatchReport(tiers=[gold])
    told = as_facts([Router(trouble="gone"), Router(address="h:2", report=report)])
    routers: Any = told["routers"]
    gone, here = routers
    assert gone == {"address": "h:1", "trouble": "gone", "report": None}
    assert here["report"]["open_requests"] == 0
    (tier,) = here["report"]["tiers"]
    assert tier.pop("offered")["requests"] == 7.0
    assert tier == {"name": "gold", "open_requests": 0, "admitted": 2**40, "refused": 0}


@pytest.mark.parametrize(
    ("number", "text"), [(0, "0"), (9999, "9999"), (12_345, "12k"), (1_500_000, "1.5M")]
)
def test_short(number: float, text: str) -> None:
    assert short(number) == text
