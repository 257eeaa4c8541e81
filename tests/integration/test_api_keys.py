"""A cluster with API keys, over real HTTP and gRPC: strangers stay out, tenants keep to their own
requests, and each key to its limits."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anthropic
import grpc
import httpx
import openai
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvrelay import AsyncClient, Client, InvalidRequest, Refused, RequestFailedError
from kvrelay.errors import NotAllowed, NotAuthenticated, RefusalReason
from kvrelay.qos import QosTier, QosTiers
from kvrelay.v1 import inference_pb2 as pb
from kvrelay.v1 import inference_pb2_grpc
from router.access.caller import KeySources
from router.access.key_file import changing
from router.access.keys import ApiKey, key_digest
from router.access.limits import Limits
from router.http_apps import OPEN_PATHS, PUBLIC
from router.text.request_fields import TierMatch, TierRules
from tests.integration.faces_kit import MODEL, in_loop, served
from tests.integration.http_kit import assert_error, checkpoint_folder, completion
from tests.unit.fake_dispatcher import FakeDispatcher

__all__ = ["checkpoint_folder"]

TEXT = "the earth and the heaven"
TIERS = TierRules(
    tiers=QosTiers(tiers=(QosTier(name="gold"), QosTier(name="free")), default="free"),
    match=TierMatch(values={"gold": "gold", "free": "free"}),
)
STRANGERS = ({}, {"authorization": "Bearer nonsense"}, {"authorization": "Basic of-acme"})


@dataclass
class Keys:
    """A file of keys. The text of a key is its id."""

    path: Path

    def set(self, *keys: ApiKey) -> None:
        with changing(self.path) as listed:
            listed[:] = keys

    def options(self, **more: Any) -> dict[str, Any]:
        return {"keys": KeySources(file=str(self.path)), "cluster_key": b"cluster", **more}


def key(text: str, tenant: str, tiers: tuple[str, ...] = (), **limits: int) -> ApiKey:
    return ApiKey(
        id=text, digest=key_digest(text), tenant=tenant, tiers=tiers, limits=Limits(**limits)
    )


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    made = Keys(tmp_path / "keys.json")
    made.set(key("of-acme", "acme"), key("also-of-acme", "acme"), key("of-other", "other"))
    return made


def bearer(text: str) -> dict[str, str]:
    return {"authorization": f"Bearer {text}"}


async def asks(client: httpx.AsyncClient, text: str, **body: Any) -> httpx.Response:
    return await client.post(
        "/v1/completions", json={"model": MODEL, "prompt": TEXT, **body}, headers=bearer(text)
    )


async def eventually(found: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(20):
        while not await found():
            await asyncio.sleep(0.02)


def assert_no_key(answer: httpx.Response) -> None:
    if not answer.request.url.path.startswith("/v1/messages"):
        assert_error(answer, 401, "invalid_api_key", None, "API key")
        return
    assert answer.status_code == 401
    assert answer.json()["type"] == "error"
    assert answer.json()["error"]["type"] == "authentication_error"


# --- strangers --------------------------------------------------------------------------------


@in_loop
async def test_every_endpoint_but_the_probes_asks_for_a_key(folder: Path, keys: Keys) -> None:
    async with served(folder, **keys.options(public_metrics=True)) as s, s.http() as client:
        assert (await client.get("/openapi.json")).status_code == 200
        for operation in PUBLIC:
            assert (401 in operation.errors) is (operation.path not in OPEN_PATHS), operation.path
            for method in operation.methods:
                for headers in STRANGERS:
                    path = operation.path.replace("{model:path}", MODEL)
                    answer = await client.request(method, path, headers=headers)
                    if path in OPEN_PATHS:
                        assert answer.status_code == 200, path
                    else:
                        assert_no_key(answer)
                        assert answer.headers["www-authenticate"] == "Bearer"
                        assert answer.headers["x-request-id"]
        assert (await client.get("/no-such-path")).status_code == 401
        assert (await client.get("/metrics")).status_code == 200
        assert (await client.get("/load", headers=bearer("of-acme"))).status_code == 200
        assert s.dispatcher.requests == []


@in_loop
async def test_every_grpc_method_but_health_asks_for_a_key(folder: Path, keys: Keys) -> None:
    methods = pb.DESCRIPTOR.services_by_name["Inference"].methods
    async with (
        served(folder, **keys.options()) as s,
        grpc.aio.insecure_channel(s.grpc_address) as channel,
    ):
        stub = inference_pb2_grpc.InferenceStub(channel)
        for method in methods:
            for headers in STRANGERS:
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await _call(stub, method, tuple(headers.items()))
                assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED, method.name
        asked = health_pb2.HealthCheckRequest()
        assert (await health_pb2_grpc.HealthStub(channel).Check(asked)).status == 1
        assert s.dispatcher.requests == [] and s.dispatcher.aborted.empty()


async def _call(stub: Any, method: Any, metadata: tuple[tuple[str, str], ...]) -> None:
    request = getattr(pb, method.input_type.name)()
    given = iter([request]) if method.client_streaming else request
    call = getattr(stub, method.name)(given, metadata=metadata)
    if method.server_streaming:
        await anext(aiter(call))
    else:
        await call


@in_loop
async def test_clients_bring_their_key(folder: Path, keys: Keys) -> None:
    async with served(folder, **keys.options()) as s:
        async with AsyncClient(s.grpc_address, api_key="of-acme") as mine:
            assert (await mine.generate(TEXT)).text == TEXT
            assert await mine.model_info() and await mine.server_info()
            parts = mine.stream_input([TEXT[:5], TEXT[5:]])
            assert "".join([chunk.text async for chunk in parts]) == TEXT

        def blocking(api_key: str) -> str:
            with Client(s.grpc_address, api_key=api_key) as client:
                return client.generate(TEXT).text

        assert await asyncio.to_thread(blocking, "of-other") == TEXT
        with pytest.raises(NotAuthenticated, match="not known, or was revoked"):
            await asyncio.to_thread(blocking, "nonsense")
        with pytest.raises(NotAuthenticated, match="no API key: send one"):
            await asyncio.to_thread(blocking, "")
        async with openai.AsyncOpenAI(base_url=f"{s.url}/v1", api_key="of-acme") as theirs:
            answer = await theirs.completions.create(model=MODEL, prompt=TEXT)
            assert answer.choices[0].text == TEXT
        async with openai.AsyncOpenAI(base_url=f"{s.url}/v1", api_key="wrong") as theirs:
            with pytest.raises(openai.AuthenticationError) as refused:
                await theirs.models.list()
            assert refused.value.code == "invalid_api_key"
        async with anthropic.AsyncAnthropic(base_url=s.url, api_key="of-acme") as theirs:
            assert await theirs.get("/load", cast_to=dict[str, int]) == {"server_load": 0}


@in_loop
async def test_a_revoked_key_is_refused_while_its_stream_goes_on(folder: Path, keys: Keys) -> None:
    dispatcher = FakeDispatcher(gates={"second_token"})
    async with (
        served(folder, dispatcher, **keys.options()) as s,
        s.http() as client,
        AsyncClient(s.grpc_address, api_key="of-acme") as mine,
    ):
        stream = mine.stream(TEXT)
        await anext(stream)
        keys.set(key("of-other", "other"))

        async def is_revoked() -> bool:
            answer = await client.get("/v1/models", headers=bearer("of-acme"))
            return answer.status_code == 401

        await eventually(is_revoked)
        assert (await client.get("/v1/models", headers=bearer("of-other"))).status_code == 200
        dispatcher.gates.clear()
        dispatcher.generations[0].go_on.set()
        assert [chunk async for chunk in stream], "what runs already ends by itself"


@in_loop
async def test_refusals_are_counted_without_names(folder: Path, keys: Keys) -> None:
    async with served(folder, **keys.options()) as s, s.http() as client:
        assert (await client.get("/v1/models")).status_code == 401
        assert (await asks(client, "of-acme")).status_code == 200
        told = (await s.get_internal("/metrics")).text
        assert 'request_rejections_total{model_name="tiny",reason="invalid_api_key"' in told
        assert "acme" not in told and '"other' not in told


# --- tenants ----------------------------------------------------------------------------------


@in_loop
async def test_no_field_or_header_leads_into_another_tenants_cache(
    folder: Path, keys: Keys
) -> None:
    async with served(folder, **keys.options()) as s, s.http() as client:
        await asks(client, "of-other")
        victim = s.dispatcher.requests[-1].tenant
        await asks(client, "of-acme")
        own = s.dispatcher.requests[-1].tenant
        for salt in ("other", victim, "", own):
            await asks(client, "of-acme", cache_salt=salt)
            async with AsyncClient(s.grpc_address, api_key="of-acme") as mine:
                await mine.generate(TEXT, tenant=salt)
                await mine.stream_input([TEXT], tenant=salt).__anext__()
        async with AsyncClient(s.grpc_address, api_key="also-of-acme") as mine:
            await mine.generate(TEXT)
        spaces = [request.tenant for request in s.dispatcher.requests[1:]]
        assert victim not in spaces and {one.partition("#")[0] for one in spaces} == {"acme"}
        assert spaces[-1] == own, "keys of one tenant share its cache"
        assert len({*spaces}) == 4, "the salts divide the tenant's own"


@in_loop
async def test_two_tenants_may_use_one_request_id(folder: Path, keys: Keys) -> None:
    dispatcher = FakeDispatcher(gates={"second_token"})
    async with (
        served(folder, dispatcher, **keys.options()) as s,
        AsyncClient(s.grpc_address, api_key="of-acme") as mine,
        AsyncClient(s.grpc_address, api_key="of-other") as theirs,
    ):
        streams = []
        for client in (mine, theirs):
            streams.append(client.stream(TEXT, request_id="r"))
            first = await anext(streams[-1])
            assert first.request_id == "r", "as they sent it"
        inside = [*dispatcher.running]
        assert len({*inside}) == 2 and all(one.endswith("/r") for one in inside)
        await theirs.abort("r", inside[0])
        assert inside[0] in dispatcher.running and inside[1] not in dispatcher.running
        async with AsyncClient(s.grpc_address, api_key="also-of-acme") as again:
            await again.abort("r")
        assert not dispatcher.running, "another key of the same tenant may"
        for stream in streams:
            with pytest.raises(RequestFailedError):
                await anext(stream)


@in_loop
async def test_a_ticket_is_of_no_use_to_another_tenant(folder: Path, keys: Keys) -> None:
    async with served(folder, **keys.options()) as s, s.http() as client:
        prompt = {"prompt": TEXT, "return_token_ids": True, "stream": True}
        streamed = await asks(client, "of-acme", **prompt)
        ticket = streamed.text.split('"ticket":"')[1].partition('"')[0]
        begun = s.dispatcher.requests[-1]
        choices = [{"token_ids": [begun.prompt_ids[1]]}]
        behind = {"continuation": {"ticket": ticket, "choices": choices}}
        for text, is_admitted in (("of-acme", True), ("also-of-acme", True), ("of-other", False)):
            answer = await asks(client, text, **prompt, **behind)
            assert answer.status_code == 200, answer.text
            again = s.dispatcher.requests[-1]
            assert again.delivered and again.admitted is is_admitted
            assert (again.request_id == begun.request_id) is is_admitted


# --- tiers ------------------------------------------------------------------------------------


@in_loop
async def test_a_key_chooses_among_its_tiers(folder: Path, keys: Keys) -> None:
    keys.set(key("all", "acme"), key("free", "acme", ("free",)), key("gold", "b", ("gold",)))
    async with served(folder, **keys.options(tiers=TIERS)) as s, s.http() as client:
        expected = {("all", ""): "free", ("all", "gold"): "gold", ("gold", ""): "gold"}
        for (text, header), tier in expected.items():
            headers = {**bearer(text), "x-customer-tier": header}
            answer = await client.post("/v1/completions", json={"prompt": TEXT}, headers=headers)
            assert answer.headers["x-kvrelay-tier"] == tier
        denied = await asks(client, "free", tier="gold")
        assert_error(denied, 403, "tier_not_allowed", "tier", "may use the tiers free, not gold")
        headers = {**bearer("free"), "x-customer-tier": "gold"}
        denied = await client.post("/v1/completions", json={"prompt": TEXT}, headers=headers)
        assert_error(denied, 403, "tier_not_allowed", "x-customer-tier", "not gold")
        async with AsyncClient(s.grpc_address, api_key="free") as mine:
            with pytest.raises(NotAllowed, match="not gold"):
                await mine.generate(TEXT, tier="gold")
            assert (await mine.generate(TEXT)).tier == "free"


# --- limits -----------------------------------------------------------------------------------


@in_loop
async def test_requests_of_a_minute(folder: Path, keys: Keys) -> None:
    keys.set(key("two", "acme", requests_per_minute=2), key("free", "acme"))
    async with served(folder, **keys.options()) as s, s.http() as client:
        for _ in range(2):
            assert (await asks(client, "two")).status_code == 200
        refused = await asks(client, "two")
        assert_error(refused, 429, "key_requests_exhausted", None, "2 requests a minute")
        assert 1 <= int(refused.headers["retry-after"]) <= 30
        assert 0 < int(refused.headers["retry-after-ms"]) <= 30_000
        async with AsyncClient(s.grpc_address, api_key="two") as mine:
            with pytest.raises(Refused) as told:
                await mine.generate(TEXT)
        assert told.value.reason == "key_requests_exhausted"
        assert told.value.retry_after_s is not None and 0 < told.value.retry_after_s <= 30
        assert (await asks(client, "free")).status_code == 200, "another key has its own"
        assert len(s.dispatcher.requests) == 3
        told_metrics = (await s.get_internal("/metrics")).text
        assert 'reason="key_requests_exhausted"' in told_metrics


@in_loop
async def test_tokens_of_prompt_and_answer(folder: Path, keys: Keys) -> None:
    keys.set(key("k", "acme", tokens_per_minute=100))
    async with served(folder, **keys.options()) as s, s.http() as client:
        first = (await asks(client, "k")).json()["usage"]["total_tokens"]
        used = first
        while used < 100:
            answer = await asks(client, "k")
            if answer.status_code == 429:
                break
            used += answer.json()["usage"]["total_tokens"]
        refused = await asks(client, "k")
        assert_error(refused, 429, "key_tokens_exhausted", None, "100 tokens a minute")
        assert used >= 100 - first and len(s.dispatcher.requests) == used // first


@in_loop
async def test_requests_at_once_and_a_client_that_leaves(folder: Path, keys: Keys) -> None:
    keys.set(key("one", "acme", concurrent_requests=1))
    dispatcher = FakeDispatcher(gates={"second_token"})
    async with (
        served(folder, dispatcher, **keys.options()) as s,
        s.http() as client,
        AsyncClient(s.grpc_address, api_key="one") as mine,
    ):
        stream = mine.stream(TEXT)
        await anext(stream)
        refused = await asks(client, "one")
        assert_error(refused, 429, "key_concurrency_exhausted", None, "1 requests at once")
        stream.close()
        dispatcher.gates.clear()

        async def has_room() -> bool:
            return (await asks(client, "one")).status_code == 200

        await eventually(has_room)


@in_loop
async def test_what_the_cluster_refuses_costs_its_key_nothing(folder: Path, keys: Keys) -> None:
    keys.set(key("k", "acme", requests_per_minute=2, concurrent_requests=2))
    refusal = Refused(RefusalReason.KV_EXHAUSTED, "full", retry_after_s=1.0)
    dispatcher = FakeDispatcher(refusal=refusal, refusals_left=4)
    async with served(folder, dispatcher, **keys.options()) as s, s.http() as client:
        for _ in range(3):
            assert_error(await asks(client, "k"), 429, "kv_exhausted", None, "full")
        for _ in range(3):
            assert (await asks(client, "k", prompt="")).status_code == 400
        both = await asks(client, "k", prompt=[TEXT, TEXT])
        assert_error(both, 429, "kv_exhausted", None, "full")
        assert (await asks(client, "k", prompt=[TEXT, TEXT])).status_code == 200
        assert (await asks(client, "k")).status_code == 429


@in_loop
async def test_a_call_that_is_refused_as_a_whole_costs_nothing(folder: Path, keys: Keys) -> None:
    """Its first prompt was admitted, its third was one too many."""
    keys.set(key("k", "acme", requests_per_minute=2))
    async with served(folder, **keys.options()) as s, s.http() as client:
        for _ in range(2):
            answer = await asks(client, "k", prompt=[TEXT, TEXT, TEXT])
            assert_error(answer, 429, "key_requests_exhausted", None, "2 requests a minute")
        for _ in range(2):
            assert (await asks(client, "k")).status_code == 200
        assert s.dispatcher.running == {}


@in_loop
async def test_a_prompt_that_arrives_in_parts_counts_once(folder: Path, keys: Keys) -> None:
    keys.set(key("k", "acme", requests_per_minute=2, tokens_per_minute=1000))
    async with (
        served(folder, **keys.options()) as s,
        AsyncClient(s.grpc_address, api_key="k") as mine,
    ):
        parts = [[1, *range(5, 200)], [*range(200, 300)]]
        async for _ in mine.stream_input(parts, max_tokens=1):
            pass
        meter = s.servers.service.caller_of(bearer("k")).meter
        assert meter.running == 0
        assert 1000 - 296 - 2 < meter._tokens.level < 1000 - 296 + 5
        with pytest.raises(InvalidRequest):
            await anext(mine.stream_input([[1, 2], "text"]))  # type: ignore[list-item]
        await mine.generate(TEXT)
        with pytest.raises(Refused):
            await anext(mine.stream_input([TEXT]))


@in_loop
async def test_what_is_computed_ahead_is_paid_though_the_rest_never_comes(
    folder: Path, keys: Keys
) -> None:
    keys.set(key("k", "acme", tokens_per_minute=1000))
    never = asyncio.Event()

    async def parts() -> AsyncIterator[list[int]]:
        yield [1, *range(5, 260)]
        await never.wait()

    async with (
        served(folder, **keys.options()) as s,
        AsyncClient(s.grpc_address, api_key="k") as mine,
    ):
        meter = s.servers.service.caller_of(bearer("k")).meter
        stream = mine.stream_input(parts())

        async def is_computed() -> bool:
            return bool(s.dispatcher.generations) and not s.dispatcher.running

        async def is_gone() -> bool:
            return meter.running == 0 and not s.dispatcher.running

        await eventually(is_computed)
        stream.close()
        await eventually(is_gone)
        assert meter._tokens.level < 1000 - 256 + 100, "less what came back meanwhile"


# --- without keys -----------------------------------------------------------------------------


@in_loop
async def test_without_keys_everything_is_as_it_was(folder: Path) -> None:
    async with served(folder) as s, s.http() as client:
        answer = await completion(client, cache_salt="mine")
        assert answer.status_code == 200
        assert s.dispatcher.requests[-1].tenant == "mine"
        async with AsyncClient(s.grpc_address, api_key="whatever") as anybody:
            await anybody.generate(TEXT, request_id="r", tenant="mine")
        assert s.dispatcher.requests[-1].request_id == "r"
