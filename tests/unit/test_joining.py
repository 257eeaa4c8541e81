"""Which workers may serve together: decided when one joins, not at a request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TypeVar

import grpc
import pytest

from cluster.on_ray import actor
from cluster.on_ray.actor import StartFailed, joined
from kvpool.core.layout.block_names import NamedFormat, named_format
from kvrelay.errors import PeerError
from kvrelay.messages import WorkerHello
from kvrelay.types import Incarnation, Role
from kvrelay.v1 import worker_pb2, worker_pb2_grpc
from kvrelay.wire import encode_hello
from router.core.state.worker_view import check_joins
from router.live.link import WorkerLink
from tests.unit.router_kit import hello
from tests.unit.worker_kit import LAYOUT


def of(name: str, role: Role, dtype: str, *, mixed: bool = False) -> WorkerHello:
    layout = replace(LAYOUT, dtype=dtype)
    named = named_format(layout, codec="none", mixed_precision=mixed)
    return replace(hello(name, role), physical_format=named)


PREFILL = of("p", Role.PREFILL, "float32")


def test_the_format_is_read_as_it_was_written() -> None:
    named = named_format(LAYOUT, codec="int8", mixed_precision=True)
    assert NamedFormat.of(named) == NamedFormat(dtype=LAYOUT.dtype, mixed_precision=True)
    plain = named_format(LAYOUT, codec="none", mixed_precision=False)
    assert not NamedFormat.of(plain).mixed_precision


def test_another_dtype_on_the_other_side_is_refused() -> None:
    with pytest.raises(PeerError, match="worker d has KV in bfloat16, p in float32: give both"):
        check_joins(of("d", Role.DECODE, "bfloat16"), [PREFILL])


@pytest.mark.parametrize("side", ["one", "both"])
def test_both_must_allow_mixed_precision(side: str) -> None:
    here = of("d", Role.DECODE, "bfloat16", mixed=True)
    there = of("p", Role.PREFILL, "float32", mixed=side == "both")
    if side == "both":
        check_joins(here, [there])
        return
    with pytest.raises(PeerError, match="allow_mixed_precision: true on both"):
        check_joins(here, [there])


@pytest.mark.parametrize("role", [Role.PREFILL, Role.BOTH])
def test_only_those_that_hand_over_need_the_same(role: Role) -> None:
    check_joins(of("other", role, "bfloat16"), [PREFILL])


def test_block_sizes_may_differ() -> None:
    check_joins(replace(hello("d", Role.DECODE), physical_format="float32/block24"), [PREFILL])


def test_another_model_is_refused() -> None:
    other = replace(of("d", Role.DECODE, "float32"), fingerprint="beef")
    with pytest.raises(PeerError, match=r"d serves another model than p \(fingerprint beef, not"):
        check_joins(other, [PREFILL])


# --- whoever waits for a worker hears why it is refused -------------------------------------------


class Worker(worker_pb2_grpc.WorkerServicer):
    """Says hello, or does not let routers in."""

    def __init__(self, strange: str) -> None:
        self._strange = strange

    async def Attach(  # noqa: N802
        self, requests: AsyncIterator[worker_pb2.ToWorker], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[worker_pb2.FromWorker]:
        if self._strange:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, self._strange)
        yield worker_pb2.FromWorker(hello=encode_hello(PREFILL))
        async for _ in requests:
            pass


class Owner:
    """Takes nobody who serves another model."""

    def __init__(self, refusal: str) -> None:
        self._refusal = refusal

    def joined(self, link: WorkerLink, hello: WorkerHello) -> None:
        if self._refusal:
            raise PeerError(self._refusal)

    def said(self, *_: object) -> None: ...

    def lost(self, *_: object, **__: object) -> None: ...


@asynccontextmanager
async def linked(*, strange: str = "", refusal: str = "") -> AsyncIterator[WorkerLink]:
    server = grpc.aio.server()
    worker_pb2_grpc.add_WorkerServicer_to_server(Worker(strange), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    link = WorkerLink(f"127.0.0.1:{port}", Incarnation("r"), Owner(refusal))
    try:
        yield link
    finally:
        await link.close()
        await server.stop(None)


Found = TypeVar("Found")


def on_link(look: Callable[[WorkerLink], Awaitable[Found]], **worker: str) -> Found:
    async def run() -> Found:
        async with linked(**worker) as link:
            return await asyncio.wait_for(look(link), LIMIT_S)

    return asyncio.run(run())


LIMIT_S = 20.0


def test_a_worker_that_joins_is_waited_for() -> None:
    assert on_link(joined) is None


def test_a_refusal_ends_the_wait_with_its_reason() -> None:
    assert on_link(joined, refusal="another model") == StartFailed("another model")


def test_a_worker_that_does_not_let_the_router_in_is_said_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It may do so later: a token may be on its way to both."""

    async def look(link: WorkerLink) -> StartFailed | None:
        while not link.trouble:
            await asyncio.sleep(0.01)
        monkeypatch.setattr(actor, "JOIN_TIMEOUT_S", 0.0)
        return await joined(link)

    found = on_link(look, strange="it speaks wire version 2")
    assert found is not None
    assert found.reason.endswith(" did not join: it speaks wire version 2")
