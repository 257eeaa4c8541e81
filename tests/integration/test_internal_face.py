"""What clients reach on a router's public ports, and what only its internal ones serve."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import grpc
import httpx
import pytest
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message_factory import GetMessageClass
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from cluster.cli.plain.joins import stay_registered
from cluster.cli.status import asked, kv
from engine.bundled import checkpoint_path
from kvrelay.errors import ConfigError
from kvrelay.v1 import admin_pb2, worker_pb2
from router.core.state.generation import ClusterSnapshot
from router.live.metrics import RouterMetrics
from tests.access import ACCESS, HEADERS
from tests.integration.faces_kit import LIMIT_S, in_loop, served, servers_over
from tests.integration.http_kit import checkpoint_folder as checkpoint_folder
from tests.integration.split_kit import RouterThread
from tests.unit.fake_dispatcher import FakeDispatcher

INTERNAL_PATHS = ("/metrics", "/debug/kv")
SERVICES = ((admin_pb2, "Admin"), (worker_pb2, "Registry"))
METHODS = [
    method for file, name in SERVICES for method in file.DESCRIPTOR.services_by_name[name].methods
]
"""All that there are, so that a new one is covered."""


NOBODYS = {
    "TraceRequest": "no request '' is known here",
    "SetWorker": "no worker is named : there are none",
    "Change": "nothing is wished",
    "Watch": "interval_s is 0: give 0.1 to 3600 s",
}
"""What is asked about nobody, or with nothing said, is answered so."""


@pytest.fixture(scope="module")
def router() -> Iterator[RouterThread]:
    thread = RouterThread(checkpoint_path())
    yield thread
    thread.close()


def code_of(port: int, method: MethodDescriptor) -> grpc.StatusCode:
    """Of a call with an empty request, or with a stream of none. Raises grpc.RpcError."""
    asked = GetMessageClass(method.input_type)
    reply = GetMessageClass(method.output_type)
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        if method.server_streaming:
            call = channel.unary_stream(
                f"/{method.containing_service.full_name}/{method.name}",
                request_serializer=asked.SerializeToString,
                response_deserializer=reply.FromString,
            )(asked(), timeout=LIMIT_S, metadata=ACCESS.metadata)
            list(call)
            return call.code()
        streams = method.client_streaming
        call = (channel.stream_unary if streams else channel.unary_unary)(
            f"/{method.containing_service.full_name}/{method.name}",
            request_serializer=asked.SerializeToString,
            response_deserializer=reply.FromString,
        )
        _, done = call.with_call(
            iter(()) if streams else asked(), timeout=LIMIT_S, metadata=ACCESS.metadata
        )
        return done.code()


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.full_name)
def test_a_method_is_on_the_internal_port_only(
    method: MethodDescriptor, router: RouterThread
) -> None:
    if method.name in NOBODYS:
        with pytest.raises(grpc.RpcError, match=NOBODYS[method.name]):
            code_of(router.address.internal.grpc, method)
    else:
        assert code_of(router.address.internal.grpc, method) is grpc.StatusCode.OK
    with pytest.raises(grpc.RpcError) as caught:
        code_of(router.address.public.grpc, method)
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.parametrize("path", INTERNAL_PATHS)
def test_a_path_is_on_the_internal_port_only(path: str, router: RouterThread) -> None:
    ports = router.address
    internal = f"http://127.0.0.1:{ports.internal.http}{path}"
    assert httpx.get(internal, headers=HEADERS).status_code == 200
    answer = httpx.get(f"http://127.0.0.1:{ports.public.http}{path}")
    assert answer.status_code == 404
    assert answer.json()["error"]["type"] == "invalid_request_error"


def test_nobody_generates_on_the_internal_ports(router: RouterThread) -> None:
    internal = router.address.internal
    for path in ("/v1/completions", "/v1/models"):
        url = f"http://127.0.0.1:{internal.http}{path}"
        assert httpx.get(url, headers=HEADERS).status_code == 404
    assert "kvrelay.v1.Inference" not in services_of(internal.grpc)


def test_reflection_names_what_is_there(router: RouterThread) -> None:
    public = services_of(router.address.public.grpc)
    internal = services_of(router.address.internal.grpc)
    assert internal - public == {"kvrelay.v1.Admin", "kvrelay.v1.Registry"}
    assert public - internal == {"kvrelay.v1.Inference"}


def services_of(port: int) -> set[str]:
    asked = reflection_pb2.ServerReflectionRequest(list_services="")
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        (answer,) = stub.ServerReflectionInfo(
            iter([asked]), timeout=LIMIT_S, metadata=ACCESS.metadata
        )
        return {service.name for service in answer.list_services_response.service}


def test_status_says_that_it_was_given_a_public_address(router: RouterThread) -> None:
    internal = f"127.0.0.1:{router.address.internal.grpc}"
    assert asked.of_router(internal, ACCESS)["workers"] == []
    assert not kv.of_router(internal, ACCESS).workers
    public = f"127.0.0.1:{router.address.public.grpc}"
    for ask in (asked.of_router, kv.of_router):
        with pytest.raises(ConfigError, match=f"{public}: not the internal gRPC address"):
            ask(public, ACCESS)


def test_a_worker_that_joins_at_the_public_port_ends(router: RouterThread) -> None:
    public = f"127.0.0.1:{router.address.public.grpc}"
    request = worker_pb2.RegisterRequest(address="127.0.0.1:1")
    with pytest.raises(ConfigError, match=f"--join {public}: not the internal gRPC address"):
        router.call(stay_registered(public, request, ACCESS))
    assert not router.workers()


@in_loop
async def test_metrics_can_be_public(folder: Path) -> None:
    async with served(folder, public_metrics=True) as s, s.http() as client:
        assert "kvrelay:ready" in (await client.get("/metrics")).text
        assert (await client.get("/debug/kv")).status_code == 404


@in_loop
async def test_a_busy_internal_port_names_its_key(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for key, kind in (("internal_http_port", "HTTP"), ("internal_grpc_port", "gRPC")):
            told = (
                f"the internal {kind} port 127.0.0.1:{port} is in use: set router.{key} to another"
            )
            servers = servers_over(FakeDispatcher(), folder, **{key: port})
            with pytest.raises(ConfigError, match=told):
                await servers.start()
            await servers.stop(grace_s=0.0)


@in_loop
async def test_a_scrape_is_rendered_beside_the_event_loop(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And shows what the loop knows when it comes in."""
    loop_thread, threads = threading.get_ident(), []
    rendered = RouterMetrics.exposition

    def watched(metrics: RouterMetrics, snapshot: ClusterSnapshot) -> bytes:
        threads.append(threading.get_ident())
        return rendered(metrics, snapshot)

    monkeypatch.setattr(RouterMetrics, "exposition", watched)
    async with served(folder) as s:
        answers = await asyncio.gather(*(s.get_internal("/metrics") for _ in range(3)))
    assert [answer.status_code for answer in answers] == [200] * 3
    assert len(threads) == 3
    assert loop_thread not in threads
