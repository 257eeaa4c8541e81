"""TLS and mutual TLS on the public and the internal ports, and certificates that are replaced."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path

import grpc
import httpx
import pytest

from cluster.process.admin import report
from kvrelay import AsyncClient, Client, Tls
from kvrelay.access.tls import HttpTls, LastingChannel, Reloaded
from kvrelay.access.values import Access, TlsFiles
from kvrelay.errors import ConfigError, RequestFailedError
from kvrelay.v1.admin_pb2 import GetKvRequest
from kvrelay.v1.admin_pb2_grpc import AdminStub
from tests.access import HEADERS, TOKEN
from tests.integration.faces_kit import LIMIT_S, Served, in_loop, served
from tests.integration.http_kit import checkpoint_folder as checkpoint_folder
from tests.integration.tls_kit import Authority
from tests.unit.fake_dispatcher import FakeDispatcher

TEXT = "hello"


@pytest.fixture
def ours(tmp_path: Path) -> Authority:
    return Authority(tmp_path, "ours")


@pytest.fixture
def strange(tmp_path: Path) -> Authority:
    return Authority(tmp_path, "strange")


def http(s: Served, tls: Tls, *, internal: bool = False) -> httpx.AsyncClient:
    context = ssl.create_default_context(cafile=tls.ca)
    if tls.certificate is not None:
        context.load_cert_chain(tls.certificate, tls.key)
    url = (s.internal_url if internal else s.url).replace("http:", "https:")
    return httpx.AsyncClient(base_url=url, verify=context, timeout=LIMIT_S, trust_env=False)


async def asked(s: Served, tls: Tls | None) -> str:
    """Over the client for event loops; the one for threads agrees."""

    def threads() -> str:
        with Client(s.grpc_address, tls=tls, timeout_s=5.0) as client:
            return client.generate(TEXT).text

    async with AsyncClient(s.grpc_address, tls=tls, timeout_s=5.0) as client:
        text = (await client.generate(TEXT)).text
    assert await asyncio.to_thread(threads) == text
    return text


async def serial(s: Served, *, grpc: bool) -> str:
    """Of the certificate that the public port shows now."""
    port = int(s.grpc_address.rpartition(":")[2]) if grpc else s.http_port
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    shown = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.close()
    return str(shown)


@in_loop
async def test_clients_check_the_certificate(
    folder: Path, ours: Authority, strange: Authority
) -> None:
    async with served(folder, public_tls=ours.serves("router")) as s:
        assert await asked(s, ours.dials())
        async with http(s, ours.dials()) as client:
            body = {"prompt": TEXT, "max_tokens": 2}
            assert (await client.post("/v1/completions", json=body)).status_code == 200
        for wrong in (strange.dials(), None):
            with pytest.raises(RequestFailedError):
                await asked(s, wrong)
        with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            async with http(s, strange.dials()) as client:
                await client.get("/health")


@in_loop
async def test_a_certificate_of_another_name_is_accepted_by_that_name_only(
    folder: Path, ours: Authority
) -> None:
    async with served(folder, public_tls=ours.serves("router", "router.example")) as s:
        assert await asked(s, ours.dials(server_name="router.example"))
        with pytest.raises(RequestFailedError):
            await asked(s, ours.dials())


@in_loop
async def test_mutual_tls_refuses_who_shows_no_certificate_of_the_authority(
    folder: Path, ours: Authority, strange: Authority
) -> None:
    async with served(folder, public_tls=ours.serves("router", client_ca=ours.ca)) as s:
        friend = ours.dials("friend")
        assert await asked(s, friend)
        async with http(s, friend) as client:
            assert (await client.get("/health")).status_code == 200
        stranger = strange.pair("stranger")
        for bad in (
            ours.dials(),
            Tls(ca=ours.ca, certificate=stranger.certificate, key=stranger.key),
        ):
            with pytest.raises(RequestFailedError):
                await asked(s, bad)
            with pytest.raises(httpx.TransportError):
                async with http(s, bad) as client:
                    await client.get("/health")
        assert not s.dispatcher.requests[2:], "nobody else was served"


@in_loop
async def test_internal_ports_need_the_token_with_tls_too(
    folder: Path, ours: Authority, strange: Authority
) -> None:
    access = Access(token=TOKEN, serves=ours.serves("router"), dials=ours.dials())
    async with served(folder, access=access) as s:
        async with http(s, ours.dials(), internal=True) as client:
            assert (await client.get("/metrics", headers=HEADERS)).status_code == 200
            assert (await client.get("/metrics")).status_code == 401

        def info(access: Access) -> None:
            report(s.internal_grpc, access, timeout_s=5.0)

        await asyncio.to_thread(info, access)
        with pytest.raises(ConfigError, match="needs the cluster's token"):
            await asyncio.to_thread(info, Access(dials=ours.dials()))
        for dials in (strange.dials(), None):
            with pytest.raises(ConfigError, match="no router answers"):
                await asyncio.to_thread(info, Access(token=TOKEN, dials=dials))


@pytest.mark.parametrize("grpc", [True, False])
@in_loop
async def test_a_new_certificate_counts_at_once_and_no_stream_ends(
    folder: Path, ours: Authority, strange: Authority, grpc: bool
) -> None:
    tls = ours.serves("router")
    dispatcher = FakeDispatcher(gates={"second_token"})
    async with served(folder, dispatcher, public_tls=tls) as s:
        before = await serial(s, grpc=grpc)
        async with AsyncClient(s.grpc_address, tls=ours.dials()) as client:
            stream = client.stream(TEXT, max_tokens=20)
            first = await anext(aiter(stream))
            await dispatcher.reached.get()
            dispatcher.gates.clear()
            ours.pair("router")
            after = await serial(s, grpc=grpc)
            assert after != before
            assert await serial(s, grpc=grpc) == after
            assert await asked(s, ours.dials()), "the authority is the same"
            (held,) = dispatcher.running.values()
            held.go_on.set()
            rest = [chunk async for chunk in stream]
            assert first and rest[-1].finish_reason


@in_loop
async def test_half_a_replacement_changes_nothing(
    folder: Path, ours: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    tls = ours.serves("router")
    async with served(folder, public_tls=tls) as s:
        before = [await serial(s, grpc=grpc) for grpc in (True, False)]
        other = ours.pair("other")
        Path(tls.key).write_bytes(Path(other.key).read_bytes())
        assert [await serial(s, grpc=grpc) for grpc in (True, False)] == before
        assert "the certificate stays as it is" in caplog.text
        Path(tls.certificate).write_bytes(Path(other.certificate).read_bytes())
        after = [await serial(s, grpc=grpc) for grpc in (True, False)]
        assert before[0] not in after and before[1] not in after
        Path(tls.certificate).unlink()
        assert [await serial(s, grpc=grpc) for grpc in (True, False)] == after


def test_files_that_cannot_serve_are_named(ours: Authority, tmp_path: Path) -> None:
    pair, other = ours.pair("one"), ours.pair("two")
    with pytest.raises(ConfigError, match="/nowhere: No such file"):
        HttpTls(TlsFiles(certificate="/nowhere", key=pair.key))
    with pytest.raises(ConfigError, match=f"TLS files {pair.certificate}, .*: KEY_VALUES_MISMATCH"):
        HttpTls(TlsFiles(certificate=pair.certificate, key=other.key))
    text = tmp_path / "text"
    text.write_text("no certificate")
    with pytest.raises(ConfigError, match=str(text)):
        HttpTls(TlsFiles(certificate=str(text), key=pair.key))
    with pytest.raises(ConfigError, match="/nowhere: No such file"):
        Client("127.0.0.1:1", tls=Tls(ca="/nowhere"))


def test_files_are_read_only_when_they_change(ours: Authority) -> None:
    reads: list[TlsFiles] = []
    files = ours.serves("one")
    reloaded = Reloaded(files, reads.append)
    for _ in range(5):
        reloaded.latest()
    assert len(reads) == 1
    ours.pair("one")
    for _ in range(5):
        reloaded.latest()
    assert len(reads) == 2


@in_loop
async def test_who_calls_shows_its_new_certificate_too(
    folder: Path, ours: Authority, strange: Authority
) -> None:
    """Its first one is of an authority that the server doesn't know."""
    pair = strange.pair("caller")
    tls = Tls(ca=ours.ca, certificate=pair.certificate, key=pair.key)
    access = Access(token=TOKEN, serves=ours.serves("router", client_ca=ours.ca))
    async with served(folder, access=access) as s:
        channel = LastingChannel(s.internal_grpc, tls)

        async def call() -> None:
            stub = AdminStub(channel.latest())
            await stub.GetKv(GetKvRequest(), metadata=access.metadata, timeout=5.0)

        with pytest.raises(grpc.aio.AioRpcError):
            await call()
        other = ours.pair("caller")
        Path(pair.key).write_bytes(Path(other.key).read_bytes())
        Path(pair.certificate).write_bytes(Path(other.certificate).read_bytes())
        await call()
        Path(pair.certificate).unlink()
        await call()
        await channel.close()
