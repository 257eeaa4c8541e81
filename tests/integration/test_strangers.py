"""Who doesn't have the cluster's token is refused: on every port, whatever it calls."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import grpc
import httpx
import pytest
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from cluster.cli.plain.joins import stay_registered
from cluster.core.settings import PoolNodeSettings
from cluster.pool_node.node import PoolNode
from kvrelay import Client
from kvrelay.access.values import AUTHORIZATION, NO_ACCESS, Access, bearer
from kvrelay.counters import Counters
from kvrelay.messages import Released, Reserved, Tokens, WorkerHello
from kvrelay.types import FinishReason, RequestKey, Role
from kvrelay.v1 import admin_pb2, pool_node_pb2, worker_pb2, worker_pb2_grpc
from kvrelay.v1 import worker_pb2 as pb
from kvrelay.wire import encode_batch, encode_hello
from tests.access import ACCESS, HEADERS, OTHER_TOKEN, TOKEN
from tests.integration.faces_kit import LIMIT_S, in_loop, served
from tests.integration.http_kit import checkpoint_folder as checkpoint_folder
from tests.integration.split_kit import Cluster, RouterThread, split_workers, wait_until
from tests.integration.tls_kit import Authority
from tests.unit.router_kit import hello

STRANGERS = {
    "nothing": (),
    "another token": ((AUTHORIZATION, bearer(OTHER_TOKEN)),),
    "no bearer": ((AUTHORIZATION, f"Basic {TOKEN.hex()}"),),
    "half of it": ((AUTHORIZATION, bearer(TOKEN[:16])),),
    "an empty one": ((AUTHORIZATION, "Bearer"),),
    "it in another key": (("x-token", bearer(TOKEN)),),
}
as_stranger = pytest.mark.parametrize("shown", STRANGERS.values(), ids=STRANGERS)


def methods(file: Any, service: str) -> list[MethodDescriptor]:
    """All that there are, so that a new one is covered."""
    return list(file.DESCRIPTOR.services_by_name[service].methods)


ROUTER = [*methods(admin_pb2, "Admin"), *methods(worker_pb2, "Registry")]
WORKER = [*methods(worker_pb2, "Worker"), *methods(worker_pb2, "Checkpoints")]
POOL = methods(pool_node_pb2, "PoolNode")


def code_of(
    address: str, method: MethodDescriptor, shown: tuple[tuple[str, str], ...]
) -> tuple[grpc.StatusCode, str]:
    """How a call ends that says nothing, or one empty message where there must be one."""
    request = GetMessageClass(method.input_type)
    kind = ("stream" if method.client_streaming else "unary") + (
        "_stream" if method.server_streaming else "_unary"
    )
    with grpc.insecure_channel(address) as channel:
        call = getattr(channel, kind)(
            f"/{method.containing_service.full_name}/{method.name}",
            request_serializer=request.SerializeToString,
            response_deserializer=GetMessageClass(method.output_type).FromString,
        )
        asked = iter(()) if method.client_streaming else request()
        try:
            answer = call(asked, metadata=shown, timeout=LIMIT_S)
            if method.server_streaming:
                next(answer)
        except grpc.RpcError as error:
            return error.code(), str(error.details())
    return grpc.StatusCode.OK, ""


def assert_refused(address: str, method: MethodDescriptor, shown: Any) -> None:
    code, told = code_of(address, method, shown)
    assert code is grpc.StatusCode.UNAUTHENTICATED
    assert "--token-file" in told and TOKEN.hex() not in told


def assert_let_in(address: str, method: MethodDescriptor) -> None:
    code, _ = code_of(address, method, ACCESS.metadata)
    assert code is not grpc.StatusCode.UNAUTHENTICATED


@as_stranger
@pytest.mark.parametrize("method", ROUTER, ids=lambda method: method.full_name)
def test_at_a_routers_internal_grpc(method: MethodDescriptor, shown: Any, split: Cluster) -> None:
    assert_refused(split.internal_grpc, method, shown)
    assert_let_in(split.internal_grpc, method)


@as_stranger
@pytest.mark.parametrize("method", WORKER, ids=lambda method: method.full_name)
def test_at_a_workers_grpc(method: MethodDescriptor, shown: Any, split: Cluster) -> None:
    for worker in split.router.workers():
        assert_refused(worker.address, method, shown)
        assert_let_in(worker.address, method)


@pytest.fixture(scope="module")
def pool_node() -> Iterator[str]:
    settings = PoolNodeSettings(
        name=f"strange-{uuid4().hex[:12]}",
        host_bytes=2**20,
        disk=None,
        disk_bytes=0,
        policy="lru",
        lease_ttl_s=30.0,
        transports=(),
        host="127.0.0.1",
        port_range=None,
        access=ACCESS,
    )
    loop = asyncio.new_event_loop()
    node = PoolNode(settings)
    address = loop.run_until_complete(node.start()).reports
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield address
    asyncio.run_coroutine_threadsafe(node.stop(drain_s=0), loop).result(LIMIT_S)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


@as_stranger
@pytest.mark.parametrize("method", POOL, ids=lambda method: method.full_name)
def test_at_a_pool_nodes_grpc(method: MethodDescriptor, shown: Any, pool_node: str) -> None:
    assert_refused(pool_node, method, shown)
    assert_let_in(pool_node, method)


@as_stranger
@pytest.mark.parametrize("path", ["/metrics", "/debug/kv", "/no/such/path"])
def test_at_a_routers_internal_http(path: str, shown: Any, split: Cluster) -> None:
    answer = httpx.get(f"{split.internal_url}{path}", headers=dict(shown))
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"] == "Bearer"
    error = answer.json()["error"]
    assert error["code"] == "no_cluster_token" and "--token-file" in error["message"]
    let_in = httpx.get(f"{split.internal_url}{path}", headers=HEADERS).status_code
    assert let_in == (404 if "such" in path else 200)


@in_loop
async def test_metrics_are_open_where_the_file_says_so(folder: Path) -> None:
    async with served(folder, open_metrics=True) as s, httpx.AsyncClient() as client:
        assert (await client.get(f"{s.internal_url}/metrics")).status_code == 200
        assert (await client.get(f"{s.internal_url}/debug/kv")).status_code == 401
        assert (await client.get(f"{s.internal_url}/metrics/")).status_code == 401


@in_loop
async def test_a_router_without_a_token_lets_nobody_in(folder: Path) -> None:
    async with served(folder, access=NO_ACCESS) as s, httpx.AsyncClient() as client:
        for headers in ({}, {AUTHORIZATION: "Bearer"}, {AUTHORIZATION: "Bearer 0"}):
            answer = await client.get(f"{s.internal_url}/metrics", headers=headers)
            assert answer.status_code == 401


def test_anybody_may_ask_for_health_and_nobody_for_the_services(split: Cluster) -> None:
    """Probes have no token."""
    with grpc.insecure_channel(split.internal_grpc) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        answer = health.Check(health_pb2.HealthCheckRequest(), timeout=LIMIT_S)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        asked = reflection_pb2.ServerReflectionRequest(list_services="")
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        with pytest.raises(grpc.RpcError, match="needs the cluster's token"):
            list(stub.ServerReflectionInfo(iter([asked]), timeout=LIMIT_S))


class Impostor(worker_pb2_grpc.WorkerServicer):
    """A worker that anyone could run. It answers at once, and keeps what it is asked."""

    def __init__(self, told: WorkerHello) -> None:
        self.prompts: list[tuple[int, ...]] = []
        self.attached = 0
        self._hello = told

    async def Attach(  # noqa: N802
        self, requests: AsyncIterator[pb.ToWorker], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.FromWorker]:
        self.attached += 1
        counters = Counters(free_blocks=1000, prefill_correction=1, decode_correction=1)
        yield pb.FromWorker(hello=encode_hello(self._hello))
        yield encode_batch((), counters, time.monotonic(), ())
        async for message in requests:
            if not message.HasField("generate"):
                continue
            spec = message.generate.spec
            self.prompts.append(tuple(spec.prompt_ids))
            yield encode_batch(_answer(spec.key), counters, time.monotonic(), ())


def _answer(key: Any) -> tuple[Any, ...]:
    asked = RequestKey(key.request_id, key.attempt)
    tokens = Tokens(
        key=asked,
        choice=0,
        first_index=0,
        token_ids=(40, 41, 42),
        at_s=time.monotonic(),
        finish_reason=FinishReason.LENGTH,
    )
    now_s = time.monotonic()
    return (Reserved(key=asked, at_s=now_s), tokens, Released(key=asked, at_s=now_s))


@asynccontextmanager
async def impostor(told: WorkerHello) -> AsyncIterator[tuple[Impostor, str]]:
    server, worker = grpc.aio.server(), Impostor(told)
    worker_pb2_grpc.add_WorkerServicer_to_server(worker, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield worker, f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


async def tries_to_join(router: str, address: str, access: Access) -> grpc.StatusCode | None:
    """How its registration ended; None: it is registered."""

    async def registration() -> AsyncIterator[pb.RegisterRequest]:
        yield pb.RegisterRequest(address=address)
        await asyncio.Event().wait()

    async with grpc.aio.insecure_channel(router) as channel:
        call = worker_pb2_grpc.RegistryStub(channel).Register(
            registration(), metadata=access.metadata
        )
        try:
            await asyncio.wait_for(asyncio.shield(call.wait_for_connection()), LIMIT_S)
            async with asyncio.timeout(2.0):
                await call
        except TimeoutError:
            return None
        except grpc.aio.AioRpcError as error:
            return error.code()
    return grpc.StatusCode.OK


def test_a_stranger_joins_nowhere_and_sees_no_prompt(llama: Path, split: Cluster) -> None:
    """It knows what anybody may ask for, the fingerprint too, and claims to be fast."""
    with Client(split.grpc_address) as client:
        fingerprint = client.model_info().fingerprint
        known = client.server_info().workers[0].name
    told = replace(
        hello(f"evil-{known}", Role.BOTH, max_model_len=512),
        fingerprint=fingerprint,
        total_blocks=1000,
    )

    async def scene() -> None:
        async with impostor(told) as (worker, address):
            for router in (split.grpc_address, split.internal_grpc):
                for access in (NO_ACCESS, Access(token=OTHER_TOKEN)):
                    code = await tries_to_join(router, address, access)
                    assert code in (
                        grpc.StatusCode.UNAUTHENTICATED,
                        grpc.StatusCode.UNIMPLEMENTED,
                    )
            for number in range(5):
                asked = [number + 2] * 20
                answer = await asyncio.to_thread(split.completion, asked, max_tokens=4)
                assert answer["choices"][0]["token_ids"] != [40, 41, 42]
            assert (worker.attached, worker.prompts) == (0, [])

    asyncio.run(scene())


def test_who_has_the_token_does_join(llama: Path) -> None:
    """The script of the stranger is right: with the token it gets the prompt."""
    thread = RouterThread(llama)

    async def scene() -> None:
        internal = f"127.0.0.1:{thread.address.internal.grpc}"
        told = replace(hello("friend", Role.BOTH, max_model_len=512), total_blocks=1000)
        async with impostor(told) as (worker, address):
            request = pb.RegisterRequest(address=address)
            joining = asyncio.create_task(stay_registered(internal, request, ACCESS))
            await asyncio.to_thread(wait_until, lambda: bool(thread.workers()), "it joins")
            url = f"http://127.0.0.1:{thread.address.public.http}/v1/completions"
            body = {"prompt": [5, 6, 7], "max_tokens": 3, "return_token_ids": True}
            async with httpx.AsyncClient(timeout=LIMIT_S) as client:
                answer = (await client.post(url, json=body)).json()
            assert answer["choices"][0]["token_ids"] == [40, 41, 42]
            assert worker.prompts == [(5, 6, 7)]
            joining.cancel()
            await asyncio.gather(joining, return_exceptions=True)

    try:
        asyncio.run(scene())
    finally:
        thread.close()


def test_why_it_is_refused_is_told_at_both_ends(
    llama: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A worker with another token, and a router with another one than its worker's."""
    thread = RouterThread(llama)

    async def scene() -> None:
        internal = f"127.0.0.1:{thread.address.internal.grpc}"
        request = pb.RegisterRequest(address="127.0.0.1:1")
        wrong = Access(token=OTHER_TOKEN)
        joining = asyncio.create_task(stay_registered(internal, request, wrong))
        await asyncio.to_thread(wait_until, lambda: "of another cluster" in caplog.text, "it tells")
        joining.cancel()
        await asyncio.gather(joining, return_exceptions=True)

    try:
        asyncio.run(scene())
        assert not thread.process.dispatcher._links
    finally:
        thread.close()
    (line,) = [one for one in caplog.messages if "of another cluster" in one]
    assert line.startswith("router 127.0.0.1:") and "~/.config/kvrelay/NAME.token" in line
    assert TOKEN.hex() not in caplog.text and OTHER_TOKEN.hex() not in caplog.text


def test_a_router_with_another_token_is_told_by_the_worker(
    llama: Path, split: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    worker = split.router.workers()[0].address
    thread = RouterThread(llama, access=Access(token=OTHER_TOKEN))
    try:
        thread.call(thread.process.add_worker(worker))
        told = f"worker at {worker} does not let this router in: the token is of another cluster"
        wait_until(lambda: told in caplog.text, "the router tells")
        assert not thread.workers()
    finally:
        thread.close()
    assert caplog.text.count(told) == 1, "once, not at each try"


def test_the_inside_of_a_cluster_speaks_tls(llama: Path, tmp_path: Path, hosts: Any) -> None:
    """Mutual TLS between router, workers and pool node, with one name in all certificates."""
    ours = Authority(tmp_path, "ours")
    access = Access(
        token=TOKEN,
        serves=ours.serves("node", "kvrelay.internal", client_ca=ours.ca),
        dials=ours.dials("node-out", server_name="kvrelay.internal"),
    )
    workers = split_workers(hosts, llama, access=access)
    thread = RouterThread(llama, access=access)
    started = [(host, host.start(settings)) for host, settings in workers]
    try:
        for _, address in started:
            thread.call(thread.process.add_worker(address))
        wait_until(lambda: len(thread.workers()) == 2, "both have joined")
        with Client(f"127.0.0.1:{thread.address.public.grpc}", timeout_s=LIMIT_S) as client:
            assert len(client.generate([5, 6, 7], max_tokens=4, ignore_eos=True).token_ids) == 4
        plain = code_of(started[0][1], WORKER[1], ACCESS.metadata)
        assert plain[0] is grpc.StatusCode.UNAVAILABLE, "in clear nothing is answered"
        internal = f"127.0.0.1:{thread.address.internal.grpc}"

        async def join() -> None:
            request = pb.RegisterRequest(address=started[0][1], is_pool_node=False)
            joining = asyncio.create_task(stay_registered(internal, request, access))
            calls = thread.process._registry._calls
            await asyncio.to_thread(wait_until, lambda: bool(calls), "it is registered")
            joining.cancel()
            await asyncio.gather(joining, return_exceptions=True)

        asyncio.run(join())
    finally:
        thread.close()
        for host, address in started:
            host.stop(address)
