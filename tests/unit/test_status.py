"""`kvrelay status`: figures first, step times and links below them with a verdict in words."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cluster.cli.status.asked import facts_of
from cluster.cli.status.tables import link_verdict, print_table, step_times_verdict
from kvrelay.codec import MessageCodec
from kvrelay.counters import Counters
from kvrelay.results import LinkInfo, WorkerInfo
from kvrelay.starts import PhaseSeconds
from kvrelay.types import MemoryPart
from kvrelay.v1 import inference_pb2
from kvrelay.v1.admin_pb2 import WORKER_STATE_READY, WatchedWorker, WatchReport
from tests.unit.router_kit import STEP_TIMES

INFO = MessageCodec(WorkerInfo, inference_pb2.WorkerInfo, "a router")


def worker(name: str, *links: LinkInfo, **known: float) -> WorkerInfo:
    return WorkerInfo(
        name=name,
        address="127.0.0.1:1",
        incarnation=name,
        role="prefill",
        device="cpu",
        transport="shm",
        total_blocks=100,
        free_blocks=60,
        cached_blocks=15,
        block_size=16,
        running=3,
        waiting=2,
        step_times=STEP_TIMES,
        prefill_correction=known.get("prefill_correction", 1.0),
        decode_correction=known.get("decode_correction", 2.5),
        links=links,
        prompt_tokens_per_s=1234.5,
        generated_tokens_per_s=67.8,
        kv_used=0.25,
        hit_rate=known.get("hit_rate"),
        transfer_bytes_per_s=1.5e9,
        kv_token_bytes=131_072,
        counters=Counters(running=3, waiting=2),
    )


def shown(capsys: pytest.CaptureFixture[str], *workers: WorkerInfo) -> list[str]:
    told = [WatchedWorker(info=INFO.encode(one), state=WORKER_STATE_READY) for one in workers]
    print_table(facts_of(WatchReport(open_requests=3, workers=told)))
    return [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]


def test_what_workers_do_comes_before_how_long_steps_take(
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines = shown(capsys, worker("prefill-0", hit_rate=0.5))
    assert lines[0] == "router: ready, 3 requests running"
    assert lines[1] == (
        "name role state device cpus transport in tok/s out tok/s running waiting KV used hits "
        "KV moved blocks"
    )
    assert lines[2] == (
        "prefill-0 prefill ready cpu shm 1234.5 67.8 3 2 25% 50% 1.5 GB/s 60 free, 15 cached of 100"
    )
    assert lines[3].startswith("prefill-0 step times: prefill x 1.00 (good) of ")
    assert "; decode x 2.50 (bad: less than half of the speed measured at the start) of" in lines[3]


def test_how_long_a_worker_took_to_start(capsys: pytest.CaptureFixture[str]) -> None:
    phases = {"import": 3.1, "fetch": 0.0, "load": 0.9}
    start = tuple(PhaseSeconds(phase=name, seconds=s) for name, s in phases.items())
    lines = shown(capsys, replace(worker("decode-0"), start=start), worker("decode-1"))
    assert [line for line in lines if "started" in line] == [
        "decode-0 started in 4.0 s: import 3.1, load 0.9"
    ]


def test_where_the_memory_of_a_worker_went(capsys: pytest.CaptureFixture[str]) -> None:
    memory = (
        MemoryPart(part="weights", nbytes=15 << 30),
        MemoryPart(part="CUDA graphs", nbytes=432 << 20),
        MemoryPart(part="KV", nbytes=3 << 29),
    )
    lines = shown(capsys, replace(worker("decode-0"), memory=memory), worker("decode-1"))
    assert [line for line in lines if "memory" in line] == [
        "decode-0 memory: weights 15 GiB, CUDA graphs 432 MiB, KV 1.5 GiB"
    ]


def test_a_link_says_whether_it_is_good(capsys: pytest.CaptureFixture[str]) -> None:
    fast = LinkInfo(peer="decode-0", transport="shm", bytes_per_s=100e9, latency_s=2e-5)
    unmeasured = LinkInfo(peer="decode-1", transport="shm", bytes_per_s=0.0, latency_s=0.0)
    lines = shown(capsys, worker("prefill-0", fast, unmeasured))
    assert "prefill-0 -> decode-0 over shm: 100.0 GB/s, 20 us: good" in lines
    assert "prefill-0 -> decode-1 over shm: not measured yet" in lines


@pytest.mark.parametrize(
    ("factor", "verdict"),
    [(0.79, "faster"), (0.8, "good"), (1.25, "good"), (1.26, "slow"), (2.0, "slow"), (2.1, "bad")],
)
def test_a_factor_in_words(factor: float, verdict: str) -> None:
    assert step_times_verdict(factor).split(":")[0].split()[0] == verdict


@pytest.mark.parametrize(
    ("bytes_per_s", "others", "verdict"),
    [
        (10e9, (), "good"),  # 100 kB in 10 us, while 100 us of computing
        (1.9e9, (), "slow: moving KV takes 0.5 x as long as computing it"),
        (0.5e9, (), "bad: moving KV takes 2.0 x as long as computing it"),
        (10e9, (30e9, 30e9), "slow: less than half of the speed of the other links of its kind"),
        (10e9, (30e9,), "good"),  # two links have no usual speed
    ],
)
def test_a_link_is_judged_by_computing_and_by_its_kind(
    bytes_per_s: float, others: tuple[float, ...], verdict: str
) -> None:
    found = link_verdict(bytes_per_s, 100_000, 100e-6, (bytes_per_s, *others))
    assert found == verdict


def test_without_known_step_times_a_link_is_judged_by_its_kind_alone() -> None:
    assert link_verdict(1e6, 100_000, 0.0, (1e6,)) == "good"


def test_a_router_that_is_not_ready_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(facts_of(WatchReport(not_ready="all workers drain")))
    print_table(facts_of(WatchReport(leaving=True)))
    told = [line for line in capsys.readouterr().out.splitlines() if "router" in line]
    assert told == [
        "router: not ready: all workers drain, 0 requests running",
        "router: not ready: it is leaving, 0 requests running",
    ]
