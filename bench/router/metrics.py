"""What a scrape of /metrics costs the router's event loop, over HTTP, in a large cluster: every
prefill worker has a link to every decode worker, and all of them carried KV lately.

python -m bench.router.metrics [--workers 64] [--scrapes 30]
"""

from __future__ import annotations

import argparse
import asyncio
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

import uvloop

from bench.access import ACCESS, HEADERS
from bench.report import Row, print_table
from bench.router.decisions import STEP_TIMES
from engine.bundled import checkpoint_path
from kvrelay.counters import Counters, LinkState
from kvrelay.messages import WorkerHello
from kvrelay.types import Incarnation, Role
from router.core.events import WorkerJoined, WorkerSaid
from router.core.state.generation import ClusterSnapshot
from router.core.state.quarantine import Pair
from router.live.dispatcher import WorkerDispatcher
from router.live.metrics import RouterMetrics
from router.server import RouterServers, ServerOptions
from router.text.tokenizer import TextTokenizer

GOAL_MS = 5.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=64)
    parser.add_argument("--scrapes", type=int, default=30)
    options = parser.parse_args()
    with serving(options.workers // 2) as router:
        router.scrape()
        began_s = router.loop_s()
        sizes = [router.scrape() for _ in range(options.scrapes)]
        loop_ms = (router.loop_s() - began_s) / options.scrapes * 1e3
        render_ms = router.render_ms()
    each = options.workers // 2
    method = f"{sizes[-1]} lines, {each} x {each} links, mean of {options.scrapes}, CPU time"
    row = Row(
        name="one scrape, on the event loop",
        value=loop_ms,
        unit="ms",
        against="goal",
        against_value=GOAL_MS,
        goal=1.0,
        lower_is_better=True,
        method=method,
    )
    beside = Row(
        name="rendering it, beside the loop", value=render_ms, unit="ms", method="CPU time"
    )
    print_table(f"/metrics of {options.workers} workers", [row, beside])


class ServedRouter:
    """A router's servers in a loop of their own thread, over workers that only the core knows."""

    def __init__(self, each: int) -> None:
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._start(each), self._loop).result(60)

    async def _start(self, each: int) -> None:
        self._dispatcher = WorkerDispatcher()
        fill(self._dispatcher, each)
        tokenizer = TextTokenizer.load(checkpoint_path())
        options = ServerOptions(
            host="127.0.0.1",
            http_port=0,
            grpc_port=0,
            max_body_bytes=2**20,
            cluster="bench",
            access=ACCESS,
        )
        self._servers = RouterServers(
            self._dispatcher, checkpoint_path(), tokenizer, "bench", options
        )
        _, internal = await self._servers.start()
        self._url = f"http://127.0.0.1:{internal.http}/metrics"

    def scrape(self) -> int:
        """Lines."""
        with urllib.request.urlopen(
            urllib.request.Request(self._url, headers=HEADERS), timeout=60
        ) as reply:
            return len(reply.read().splitlines())

    def loop_s(self) -> float:
        """CPU time of the loop's thread so far."""

        async def now_s() -> float:
            return time.thread_time()

        return asyncio.run_coroutine_threadsafe(now_s(), self._loop).result(60)

    def render_ms(self) -> float:
        """In this thread."""

        async def taken() -> ClusterSnapshot:
            return self._dispatcher.snapshot()

        snapshot = asyncio.run_coroutine_threadsafe(taken(), self._loop).result(60)
        began_s = time.thread_time()
        RouterMetrics("bench").exposition(snapshot)
        return (time.thread_time() - began_s) * 1e3

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._servers.stop(0.0), self._loop).result(60)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


@contextmanager
def serving(each: int) -> Iterator[ServedRouter]:
    router = ServedRouter(each)
    try:
        yield router
    finally:
        router.close()


def fill(dispatcher: WorkerDispatcher, each: int) -> None:
    """As many prefill as decode workers, which have all told their counters."""
    core, names = dispatcher.core, {role: role.value for role in (Role.PREFILL, Role.DECODE)}
    links = tuple(
        LinkState(
            peer=Incarnation(f"decode-{i}"), transport="nixl", bytes_per_s=5e10, latency_s=1e-5
        )
        for i in range(each)
    )
    for role, name in names.items():
        counters = Counters(free_blocks=900, links=links if role is Role.PREFILL else ())
        for i in range(each):
            worker = Incarnation(f"{name}-{i}")
            core.handle(WorkerJoined(hello=_hello(worker, role)), 0.0)
            core.handle(WorkerSaid(incarnation=worker, events=(), counters=counters), 0.0)
    pairs = (
        Pair(Incarnation(f"prefill-{p}"), Incarnation(f"decode-{d}"))
        for p in range(each)
        for d in range(each)
    )
    core.state.recent_pairs.used(pairs, time.monotonic())


def _hello(name: Incarnation, role: Role) -> WorkerHello:
    return WorkerHello(
        name=name,
        pool=role,
        incarnation=name,
        role=role,
        device="cuda",
        transport="nixl",
        transfer_addresses=(f"nixl:{name}",),
        fingerprint="f",
        architecture="Llama",
        block_size=16,
        total_blocks=1000,
        max_model_len=8192,
        max_running_requests=256,
        prefill_chunk_tokens=2048,
        mixed_chunk_tokens=2048,
        vocab_size=50_000,
        step_times=STEP_TIMES,
        physical_format="p",
        rope_border_tokens=8192,
    )


if __name__ == "__main__":
    main()
