"""Many more requests at once than real workers can serve in time, with and without admission."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from math import inf
from statistics import median

import httpx
import pytest

from engine.bundled import checkpoint_path
from kvrelay.types import Role
from router.core.policy.choice import Policies
from tests.integration.split_kit import Cluster, WorkerHost, running_cluster, worker_settings

BUNDLED = checkpoint_path()
PROMPT_TOKENS, OUTPUT_TOKENS, AT_ONCE = 600, 4, 40
IN_TIME = 6.0
"""An objective: so many times the latency without load."""
TRIES = 3
"""Other processes may take the workers' cores for a while."""
REASONS = {"ttft_unreachable", "tpot_unreachable", "slots_exhausted"}


@pytest.fixture(params=["predictive", "none"])
def admission(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def cluster(admission: str, hosts: tuple[WorkerHost, WorkerHost]) -> Iterator[Cluster]:
    changes = {"profile": "auto", "dtype": "bfloat16", "prefill_chunk_tokens": 256}
    workers = [
        (host, worker_settings(f"{role}-0", role, BUNDLED, **changes))
        for host, role in zip(hosts, (Role.PREFILL, Role.DECODE), strict=True)
    ]
    with running_cluster(BUNDLED, workers, policies=Policies(admission=admission)) as running:
        yield running


async def ask(
    client: httpx.AsyncClient, number: int, ttft_s: float | None
) -> tuple[httpx.Response, float]:
    """With how long the whole answer took."""
    began_s = time.perf_counter()
    answer = await client.post(
        "/v1/completions",
        json={
            "prompt": [3 + number, *range(4, 3 + PROMPT_TOKENS)],
            "max_tokens": OUTPUT_TOKENS,
            "ignore_eos": True,
            "return_token_ids": True,
        },
        headers={} if ttft_s is None else {"x-slo-ttft-ms": f"{1000 * ttft_s:.0f}"},
    )
    return answer, time.perf_counter() - began_s


async def offered(
    cluster: Cluster, first: int = 0
) -> tuple[list[tuple[httpx.Response, float]], float]:
    """All at once, and what one takes alone; `first` numbers the prompts, which must be new."""
    limits = httpx.Limits(max_connections=AT_ONCE)
    async with httpx.AsyncClient(base_url=cluster.http_url, timeout=60, limits=limits) as client:
        alone_s = median([(await ask(client, first + i, None))[1] for i in range(8)])
        asking = (ask(client, first + 100 + i, IN_TIME * alone_s) for i in range(AT_ONCE))
        return list(await asyncio.gather(*asking)), alone_s


def in_time(answers: list[tuple[httpx.Response, float]], alone_s: float) -> bool:
    """The slowest that was served, compared with all of the work: prompts alone are less than half
    of what one takes."""
    served = (took_s for answer, took_s in answers if answer.status_code == 200)
    return max(served, default=inf) < AT_ONCE * alone_s / 2


def test_what_can_not_be_in_time_is_refused_and_the_rest_served(
    cluster: Cluster, admission: str
) -> None:
    answers, alone_s = asyncio.run(offered(cluster))
    done = [(answer.json(), took_s) for answer, took_s in answers if answer.status_code == 200]
    refused = [answer for answer, _ in answers if answer.status_code == 429]
    assert len(done) + len(refused) == AT_ONCE
    assert all(len(one["choices"][0]["token_ids"]) == OUTPUT_TOKENS for one, _ in done)
    if admission == "none":
        assert not refused
        assert max(took_s for _, took_s in done) > IN_TIME * alone_s
        return
    assert len(done) >= 2
    assert len(refused) >= AT_ONCE // 4
    assert {answer.json()["error"]["code"] for answer in refused} <= REASONS
    assert all(int(answer.headers["retry-after-ms"]) >= 1 for answer in refused)
    again = (asyncio.run(offered(cluster, 200 * i)) for i in range(1, TRIES))
    assert in_time(answers, alone_s) or any(in_time(*other) for other in again)
