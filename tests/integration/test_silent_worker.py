"""Workers that neither die nor answer: a router does without them, and takes them back."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import signal
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest

from engine.family.build import load_model
from engine.model.checkpoint import open_checkpoint
from kvrelay.types import Incarnation, Role
from kvrelay.v1 import worker_pb2 as pb
from kvrelay.v1 import worker_pb2_grpc
from kvrelay.v1.counters_pb2 import Counters
from kvrelay.wire import encode_hello
from router.live.dispatcher import WorkerDispatcher
from tests.integration.faces_kit import in_loop
from tests.integration.split_kit import Cluster, WorkerHost, running_cluster, wait_until
from tests.integration.split_kit import worker_settings as settings
from tests.integration.streams_kit import Streams
from tests.models import VOCAB_SIZE
from tests.reference import assert_same_tokens, generate_reference
from tests.unit.router_kit import hello

TOKENS = 400
MOST_PAUSE_S = 8.0


def prompts(count: int) -> list[list[int]]:
    rng = random.Random(7)
    return [[rng.randrange(2, VOCAB_SIZE) for _ in range(60)] for _ in range(count)]


def names(cluster: Cluster) -> set[str]:
    return {worker.name for worker in cluster.router.workers()}


def peers_of(cluster: Cluster, name: str) -> int:
    """The open links of this worker to others, as it reports them."""
    views = cluster.router.process.dispatcher.core.state.workers
    found = cluster.router.read(lambda: [v for v in views.values() if v.hello.name == name])
    return len(found[0].counters.links)


@contextmanager
def woken(host: WorkerHost) -> Iterator[None]:
    """At the end: who is stopped can't be told to end."""
    try:
        yield
    finally:
        if host.process.is_alive():
            os.kill(host.pid, signal.SIGCONT)


def test_streams_of_a_stopped_decode_worker_go_on_and_it_comes_back(llama: Path) -> None:
    with (
        WorkerHost() as steady,
        WorkerHost() as stopped,
        WorkerHost() as other,
        running_cluster(
            llama,
            [
                (steady, settings("steady", Role.PREFILL, llama)),
                (stopped, settings("stopped", Role.DECODE, llama)),
                (other, settings("other", Role.DECODE, llama)),
            ],
        ) as cluster,
        woken(stopped),
    ):
        with Streams(cluster, prompts(8), TOKENS) as running:
            running.wait_for(5)
            wait_until(lambda: peers_of(cluster, "steady") == 2, "both are linked")
            os.kill(stopped.pid, signal.SIGSTOP)
            stopped_s = time.monotonic()
            wait_until(lambda: names(cluster) == {"steady", "other"}, "it is lost", MOST_PAUSE_S)
            lost_s = time.monotonic() - stopped_s
            wait_until(lambda: peers_of(cluster, "steady") == 1, "its links are closed", 3.0)
        assert [one.error for one in running.streams] == [""] * 8
        pauses_s = sorted(one.longest_pause_s for one in running.streams)
        print(f"lost after {lost_s:.1f} s, pauses {[round(s, 2) for s in pauses_s]}")
        assert pauses_s[-1] > 3.0, "some of them ran there"
        assert pauses_s[-1] < MOST_PAUSE_S

        os.kill(stopped.pid, signal.SIGCONT)
        back_s = time.monotonic()
        wait_until(lambda: "stopped" in names(cluster), "it is back", 25.0)
        print(f"back after {time.monotonic() - back_s:.1f} s")
        other.kill()
        wait_until(lambda: names(cluster) == {"steady", "stopped"}, "only it decodes")
        with Streams(cluster, prompts(2), TOKENS) as again:
            pass
        assert [one.error for one in again.streams] == ["", ""]
    model = load_model(open_checkpoint(str(llama)), device="cpu", dtype="float32")
    for one in (*running.streams, *again.streams):
        expected = generate_reference(model, one.prompt, tokens=TOKENS)
        assert_same_tokens(expected, one.token_ids)


def incarnation_of(cluster: Cluster, name: str) -> Incarnation:
    views = cluster.router.process.dispatcher.core.state.workers
    (found,) = cluster.router.read(lambda: [i for i, v in views.items() if v.hello.name == name])
    return found


def slabs_held(cluster: Cluster, owner: Incarnation, holder: Incarnation) -> int:
    """Those of the worker `owner` that this peer holds, whatever their state."""

    async def ask() -> pb.DebugKvResponse:
        links = cluster.router.process.dispatcher.attached
        return await links[owner].debug_kv()

    return len([slab for slab in cluster.router.call(ask()).slabs if slab.holder == holder])


def test_slabs_of_a_stopped_prefill_worker_are_taken_back(long_llama: Path) -> None:
    """Long before their leases end. Its prompts are computed elsewhere."""
    over = {"transports": ("ucx",)}  # a pool on this machine would be read where it lies
    with (
        WorkerHost() as steady,
        WorkerHost() as stopped,
        WorkerHost() as spare,
        running_cluster(
            long_llama,
            [
                (steady, settings("steady", Role.DECODE, long_llama, **over)),
                (stopped, settings("stopped", Role.PREFILL, long_llama, **over)),
            ],
        ) as cluster,
        woken(stopped),
    ):
        owner, holder = (incarnation_of(cluster, name) for name in ("steady", "stopped"))
        spares = spare.start(settings("spare", Role.PREFILL, long_llama, **over))
        rng = random.Random(3)
        long = [[rng.randrange(2, VOCAB_SIZE) for _ in range(3000)] for _ in range(6)]
        with Streams(cluster, long, 4) as running:
            held, deadline_s = 0, time.monotonic() + 20.0
            while time.monotonic() < deadline_s:
                wait_until(lambda: slabs_held(cluster, owner, holder) > 0, "slabs are lent")
                os.kill(stopped.pid, signal.SIGSTOP)
                if held := slabs_held(cluster, owner, holder):
                    break
                os.kill(stopped.pid, signal.SIGCONT)
            assert held, "it was never stopped with a slab"
            stopped_s = time.monotonic()
            cluster.join(spares, "spare")
            wait_until(lambda: "stopped" not in names(cluster), "it is lost", MOST_PAUSE_S)
            wait_until(lambda: not slabs_held(cluster, owner, holder), "they are back", 3.0)
            print(f"{held} slabs, back after {time.monotonic() - stopped_s:.1f} s")
        assert [one.error for one in running.streams] == [""] * 6
        stopped.kill()
        spare.stop(spares)


def test_a_router_that_paused_has_lost_nobody(
    llama: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "router")
    with (
        WorkerHost() as host,
        running_cluster(llama, [(host, settings("both", Role.BOTH, llama))]) as cluster,
    ):
        with Streams(cluster, prompts(2), TOKENS) as running:
            running.wait_for(5)

            async def pause() -> None:
                time.sleep(7.0)

            cluster.router.call(pause())
        assert [one.error for one in running.streams] == ["", ""]
        assert [len(one.token_ids) for one in running.streams] == [TOKENS] * 2
        said = [record.getMessage() for record in caplog.records]
    assert not [line for line in said if "lost" in line or "suspect" in line]
    assert len([line for line in said if "joined" in line]) == 1


class Silent(worker_pb2_grpc.WorkerServicer):
    """Reports until it is told to be silent; its stream stays open."""

    def __init__(self) -> None:
        self.attached = self.detached = 0
        self.reports = True

    async def Attach(  # noqa: N802
        self, requests: AsyncIterator[pb.ToWorker], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.FromWorker]:
        self.attached += 1
        try:
            yield pb.FromWorker(hello=encode_hello(hello("b", Role.BOTH)))
            counters = Counters(free_blocks=16, prefill_correction=1, decode_correction=1)
            while True:
                if self.reports:
                    yield pb.FromWorker(counters=counters)
                await asyncio.sleep(0.1)
        finally:
            self.detached += 1


@in_loop
async def test_the_stream_of_a_silent_worker_is_closed_and_opened_again() -> None:
    server, worker = grpc.aio.server(), Silent()
    worker_pb2_grpc.add_WorkerServicer_to_server(worker, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    dispatcher = WorkerDispatcher(detect_s=1.0)
    dispatcher.add_worker(f"127.0.0.1:{port}")
    try:
        while not dispatcher.ready():
            await asyncio.sleep(0.01)
        await asyncio.sleep(2.0)
        assert (worker.attached, worker.detached) == (1, 0), "it reports"
        worker.reports = False
        while worker.attached < 2:
            await asyncio.sleep(0.01)
        assert worker.detached == 1
        worker.reports = True
        await asyncio.sleep(2.0)
        assert (worker.attached, worker.detached) == (2, 1)
        assert dispatcher.ready()
    finally:
        await dispatcher.close()
        await server.stop(None)
