"""A worker that says what the router can't take: its link is closed and opened again."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import grpc
import pytest

from kvrelay.errors import Refused
from kvrelay.types import Role
from kvrelay.v1 import worker_pb2 as pb
from kvrelay.v1 import worker_pb2_grpc
from kvrelay.v1.counters_pb2 import Counters
from kvrelay.wire import encode_hello
from router.core.core import RouterCore
from router.core.events import Command, Event
from router.core.policy.choice import Policies
from router.live.dispatcher import WorkerDispatcher
from tests.integration.faces_kit import in_loop
from tests.unit.router_kit import hello, request

Answer = Callable[[pb.Key], list[pb.Event]]
COUNTERS = Counters(free_blocks=16, prefill_correction=1, decode_correction=1)


def good(key: pb.Key) -> list[pb.Event]:
    tokens = pb.Tokens(first_index=0, token_ids=[40, 41], finish_reason="length")
    return [
        pb.Event(key=key, reserved=pb.Reserved()),
        pb.Event(key=key, tokens=tokens),
        pb.Event(key=key, released=pb.Released()),
    ]


def unknown_choice(key: pb.Key) -> list[pb.Event]:
    tokens = pb.Tokens(choice=7, first_index=0, token_ids=[5])
    return [pb.Event(key=key, reserved=pb.Reserved()), pb.Event(key=key, tokens=tokens)]


def no_event(key: pb.Key) -> list[pb.Event]:
    return [pb.Event(key=key)]


class Worker(worker_pb2_grpc.WorkerServicer):
    """Answers each request with the next of `answers`."""

    def __init__(self, *answers: Answer) -> None:
        self.attached = 0
        self._answers = iter(answers)

    async def Attach(  # noqa: N802
        self, requests: AsyncIterator[pb.ToWorker], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.FromWorker]:
        self.attached += 1
        yield pb.FromWorker(hello=encode_hello(hello("b", Role.BOTH)))
        yield pb.FromWorker(counters=COUNTERS)
        async for message in requests:
            if message.HasField("generate"):
                events = next(self._answers)(message.generate.spec.key)
                yield pb.FromWorker(events=events, counters=COUNTERS)


@asynccontextmanager
async def attached(worker: Worker) -> AsyncIterator[WorkerDispatcher]:
    server = grpc.aio.server()
    worker_pb2_grpc.add_WorkerServicer_to_server(worker, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    dispatcher = WorkerDispatcher(policies=Policies(admission="none"))
    dispatcher.add_worker(f"127.0.0.1:{port}")
    try:
        await until(dispatcher.ready)
        yield dispatcher
    finally:
        await dispatcher.close()
        await server.stop(None)


async def until(met: Callable[[], bool]) -> None:
    while not met():
        await asyncio.sleep(0.005)


async def answer(dispatcher: WorkerDispatcher, name: str) -> list[int]:
    generation = await dispatcher.submit(request(name))
    return [i async for tokens in generation for i in tokens.token_ids]


@pytest.mark.parametrize("bad", [unknown_choice, no_event])
def test_a_rejected_event_costs_the_link_and_not_the_worker(
    bad: Answer, caplog: pytest.LogCaptureFixture
) -> None:
    """A request that was admitted goes on once the worker is back."""

    @in_loop
    async def scene() -> None:
        worker = Worker(bad, good, good)
        async with attached(worker) as dispatcher:
            with caplog.at_level(logging.ERROR, "router"):
                asked = asyncio.ensure_future(answer(dispatcher, "first"))
                await until(lambda: worker.attached == 2 and dispatcher.ready())
                await asyncio.wait([asked])
            assert "its message was rejected, so its link is closed and opened again" in caplog.text
            if bad is unknown_choice:
                assert asked.result() == [40, 41]
            else:
                assert isinstance(asked.exception(), Refused)
            assert await answer(dispatcher, "second") == [40, 41]
            assert dispatcher.running_requests() == 0

    scene()


def test_any_exception_of_the_core_is_logged_and_the_link_opened_again(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one at the worker's greeting, or at its loss."""

    @in_loop
    async def scene() -> None:
        worker = Worker(unknown_choice, good, good)
        async with attached(worker) as dispatcher:
            handle, left = RouterCore.handle, ["WorkerLost", "WorkerJoined"]

            def failing(core: RouterCore, event: Event, now_s: float) -> list[Command]:
                if type(event).__name__ in left:
                    left.remove(type(event).__name__)
                    raise ZeroDivisionError(type(event).__name__)
                return handle(core, event, now_s)

            monkeypatch.setattr(RouterCore, "handle", failing)
            asked = asyncio.ensure_future(answer(dispatcher, "first"))
            await until(lambda: worker.attached == 3 and not left)
            asked.cancel()
            await asyncio.wait([asked])
            await until(dispatcher.ready)
            assert await answer(dispatcher, "second") == [40, 41]

    with caplog.at_level(logging.ERROR, "router"):
        scene()
    assert "ZeroDivisionError: WorkerLost" in caplog.text
    assert "ZeroDivisionError: WorkerJoined" in caplog.text
