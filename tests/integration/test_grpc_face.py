"""The gRPC API, through the public clients and as raw calls."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

import kvrelay
from kvrelay import (
    AsyncClient,
    ChatMessage,
    Client,
    InvalidRequest,
    ModelNotFound,
    Refused,
    RequestFailedError,
    Slo,
)
from kvrelay.client.options import GenerateOptions
from kvrelay.qos import QosTier, QosTiers
from kvrelay.results import Generated
from kvrelay.types import FinishReason, Objectives
from kvrelay.v1 import inference_pb2 as pb
from kvrelay.v1 import inference_pb2_grpc
from router.text.request_fields import TierMatch, TierRules
from tests.integration.faces_kit import MODEL, in_loop, served
from tests.tokenizer_fixture import byte_level
from tests.unit.fake_dispatcher import FACTS, FakeDispatcher

MESSAGE = pb.ChatMessage(role="user", content="a")
TEXT = "the earth 😀 and the heaven"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = byte_level(tmp_path_factory.mktemp("checkpoint"))
    (folder / "generation_config.json").write_text('{"eos_token_id": [0]}')
    return folder


@in_loop
async def test_generate(folder: Path) -> None:
    async with served(folder) as s, AsyncClient(s.grpc_address) as client:
        got = await client.generate(TEXT, n=2, logprobs=1, seed=5, ledger=True, request_id="mine")
        assert [c.text for c in got.choices] == [TEXT, TEXT]
        assert (got.request_id, got.seed, got.text) == ("mine", 5, TEXT)
        assert got.choices[0].finish_reason is FinishReason.STOP
        prompt = s.dispatcher.requests[0].prompt_ids
        assert (got.prompt_tokens, got.completion_tokens) == (len(prompt), 2 * len(prompt) - 2)
        assert got.token_ids == prompt[1:]
        entry = got.choices[1].logprobs[0]
        assert (entry.token_id, entry.logprob, entry.top) == (prompt[1], -0.5, ((prompt[1], -0.5),))
        assert list(got.ledger_ms) == ["receive", "tokenize", "prefill", "decode", "respond"]
        assert s.dispatcher.requests[0].request_id == "mine"


@in_loop
async def test_stream_never_has_half_a_character(folder: Path) -> None:
    async with served(folder) as s, AsyncClient(s.grpc_address) as client:
        async with client.stream(TEXT) as stream:
            chunks = [chunk async for chunk in stream]
            assert await stream.ledger_ms() == {}
        assert "".join(chunk.text for chunk in chunks) == TEXT
        assert not any("\ufffd" in chunk.text for chunk in chunks)
        assert [c.completion_tokens for c in chunks] == list(range(1, len(chunks) + 1))
        assert {chunk.seed for chunk in chunks} == {s.dispatcher.requests[0].sampling.seed}


@in_loop
async def test_token_ids_chat_and_stops(folder: Path) -> None:
    async with served(folder) as s, AsyncClient(s.grpc_address) as client:
        assert (await client.generate([1, 7, 8])).token_ids == (7, 8)
        stopped = (await client.generate([1, 7, 8, 9], stop_token_ids=[8])).choices[0]
        assert (stopped.stop_token_id, stopped.token_ids) == (8, (7, 8))
        assert stopped.text == s.servers.service.tokenizer.decode([7])
        cut = (await client.generate(TEXT, stop=[" 😀"])).choices[0]
        assert (cut.text, cut.stop_string) == ("the earth", " 😀")
        limited = await client.generate(TEXT, max_tokens=2)
        assert limited.choices[0].finish_reason is FinishReason.LENGTH
        await client.generate([ChatMessage("user", "hi")])
        prompt = s.dispatcher.requests[-1].prompt_ids
        assert "<|user|>hi" in s.servers.service.tokenizer.decode(prompt, skip_special_tokens=False)


@in_loop
async def test_every_option_reaches_the_workers(folder: Path) -> None:
    options: GenerateOptions = {
        "temperature": 0.5,
        "top_p": 0.25,
        "top_k": 4,
        "min_p": 0.125,
        "frequency_penalty": 0.25,
        "presence_penalty": -0.25,
        "repetition_penalty": 1.5,
        "max_tokens": 9,
        "min_tokens": 2,
        "stop_token_ids": (77,),
        "seed": 2**64 - 1,
        "n": 3,
        "logprobs": 0,
    }
    async with served(folder) as s, AsyncClient(s.grpc_address) as client:
        await client.generate(TEXT, ignore_eos=True, logit_bias={5: -3.0}, **options)
        sampling = s.dispatcher.requests[0].sampling
        assert {name: getattr(sampling, name) for name in options} == options
        assert sampling.logit_bias == ((5, -3.0),)


@in_loop
async def test_errors_come_back_as_they_were(folder: Path) -> None:
    async with served(folder) as s, AsyncClient(s.grpc_address) as client:
        with pytest.raises(InvalidRequest, match="temperature must be") as invalid:
            await client.generate(TEXT, temperature=-1)
        assert (invalid.value.code, invalid.value.param) == ("invalid_value", "temperature")
        with pytest.raises(InvalidRequest, match="the prompt is empty"):
            await client.generate("")
        with pytest.raises(InvalidRequest, match="token id 4000 of the prompt is out of"):
            await client.generate([4000])
        with pytest.raises(InvalidRequest, match=r"600 tokens .* 512") as long:
            await client.generate([1] * 600)
        assert long.value.code == "context_length_exceeded"
        with pytest.raises(ModelNotFound, match="'gpt' does not exist"):
            await client.generate(TEXT, model="gpt")
        with pytest.raises(InvalidRequest, match="wrong type or range"):
            await client.generate(TEXT, max_tokens=-1)
        assert s.dispatcher.requests == []


@pytest.mark.parametrize(
    ("reason", "code"),
    [
        ("full", grpc.StatusCode.RESOURCE_EXHAUSTED),
        ("no_capacity", grpc.StatusCode.UNAVAILABLE),
    ],
)
@in_loop
async def test_refusals_carry_a_retry_time(
    folder: Path, reason: str, code: grpc.StatusCode
) -> None:
    dispatcher = FakeDispatcher(refusal=Refused(reason, "not now", retry_after_s=1.25))
    async with served(folder, dispatcher) as s, AsyncClient(s.grpc_address) as client:
        with pytest.raises(Refused, match="not now") as caught:
            await client.generate(TEXT)
        assert (caught.value.reason, caught.value.retry_after_s) == (reason, 1.25)
        cause = caught.value.__cause__
        assert isinstance(cause, grpc.aio.AioRpcError)
        assert cause.code() is code


@in_loop
async def test_a_client_that_may_comes_back_when_it_was_told_to(folder: Path) -> None:
    refusal = Refused("tpot_unreachable", "not now", retry_after_s=0.05)
    dispatcher = FakeDispatcher(refusal=refusal, refusals_left=2)
    async with served(folder, dispatcher) as s, AsyncClient(s.grpc_address) as client:
        begun_s = time.monotonic()
        got = await client.generate(TEXT, retries=2, deadline_s=30)
        assert (got.text, len(dispatcher.requests)) == (TEXT, 3)
        assert 0.1 <= time.monotonic() - begun_s < 30
        left_s = [request.objectives.deadline_s or 0 for request in dispatcher.requests]
        assert left_s[0] <= 30.0 and left_s[2] < left_s[1] - 0.04 < left_s[0] - 0.08
        dispatcher.refusals_left = 2
        with pytest.raises(Refused, match="not now"):
            await client.generate(TEXT, retries=1)


@in_loop
async def test_threads_come_back_too_but_never_in_vain(folder: Path) -> None:
    refusal = Refused("tpot_unreachable", "not now", retry_after_s=0.05)
    dispatcher = FakeDispatcher(refusal=refusal, refusals_left=1)
    async with served(folder, dispatcher) as s:
        with Client(s.grpc_address) as client:
            got = await asyncio.to_thread(client.generate, TEXT, retries=1)
            assert (got.text, len(dispatcher.requests)) == (TEXT, 2)
            dispatcher.refusals_left = -1
            for deadline_s, retry_after_s in ((30.0, None), (0.5, 0.6)):
                dispatcher.refusal = Refused("full", "never", retry_after_s=retry_after_s)
                dispatcher.requests.clear()
                with pytest.raises(Refused, match="never"):
                    await asyncio.to_thread(client.generate, TEXT, retries=3, deadline_s=deadline_s)
                assert len(dispatcher.requests) == 1


@in_loop
async def test_the_client_tells_which_tier_was_applied(folder: Path) -> None:
    tiers = QosTiers(tiers=(QosTier(name="premium"), QosTier(name="free")), default="free")
    rules = TierRules(tiers=tiers, match=TierMatch(values={}))
    refusals = [Refused("slots_exhausted", "full", retry_after_s=after) for after in (1.0, None)]
    async with served(folder, tiers=rules) as s, AsyncClient(s.grpc_address) as client:
        assert (await client.generate(TEXT, tier="premium")).tier == "premium"
        assert {chunk.tier async for chunk in client.stream(TEXT)} == {"free"}
        for s.dispatcher.refusal in refusals:
            with pytest.raises(Refused) as told:
                await client.generate(TEXT, tier="premium")
            assert told.value.tier == "premium"


class LongAnswer(inference_pb2_grpc.InferenceServicer):
    """One message larger than the 4 MiB that gRPC takes by itself, as with log probabilities."""

    async def Generate(  # type: ignore[no-untyped-def]  # noqa: N802
        self, request: pb.GenerateRequest, context: object
    ):
        yield pb.GenerateResponse(text="x" * (5 << 20), finish_reason="stop")


@in_loop
async def test_one_message_may_be_long() -> None:
    server = grpc.aio.server()
    inference_pb2_grpc.add_InferenceServicer_to_server(LongAnswer(), server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        with Client(address) as blocking:
            told = await asyncio.to_thread(blocking.generate, TEXT)
        async with AsyncClient(address) as client:
            assert len(told.text) == len((await client.generate(TEXT)).text) == 5 << 20
    finally:
        await server.stop(None)


@in_loop
async def test_objectives_and_tiers_of_the_client_reach_the_dispatcher(folder: Path) -> None:
    tiers = QosTiers(tiers=(QosTier(name="premium"), QosTier(name="free")), default="free")
    rules = TierRules(tiers=tiers, match=TierMatch(values={"gold": "premium"}))
    async with served(folder, tiers=rules) as s, AsyncClient(s.grpc_address) as client:
        slo = Slo(ttft_s=0.2, tpot_s=0.05)
        await client.generate(TEXT, slo=slo, tier="premium", deadline_s=4)
        stub = inference_pb2_grpc.InferenceStub(client._channels[0])
        gold = (("x-customer-tier", "gold"),)
        async for _ in stub.Generate(pb.GenerateRequest(text=TEXT), metadata=gold, timeout=20):
            pass
        full, called = s.dispatcher.requests
        assert full.objectives == Objectives(ttft_s=0.2, tpot_s=0.05, deadline_s=4.0)
        assert (full.qos_tier, called.qos_tier) == ("premium", "premium")
        assert 10 < (called.objectives.deadline_s or 0) < 20.5  # gRPC rounds it up
        with pytest.raises(InvalidRequest, match="one of premium, free, not gold") as invalid:
            await client.generate(TEXT, tier="gold")
        assert invalid.value.param == "tier"


@in_loop
async def test_failures_and_bugs(folder: Path) -> None:
    lost = RequestFailedError("worker_lost", "the worker is gone")
    dispatcher = FakeDispatcher(failure=lost, fail_after_tokens=2)
    async with served(folder, dispatcher) as s, AsyncClient(s.grpc_address) as client:
        stream = client.stream(TEXT)
        assert [(await anext(stream)).completion_tokens for _ in range(2)] == [1, 2]
        with pytest.raises(RequestFailedError, match="the worker is gone") as caught:
            await anext(stream)
        assert caught.value.reason == "worker_lost"
        dispatcher.failure = KeyError("secret")
        with pytest.raises(RequestFailedError, match="internal error") as bug:
            await client.generate(TEXT)
        assert (bug.value.reason, "secret" in str(bug.value)) == ("internal", False)


@in_loop
async def test_abort_from_another_call(folder: Path) -> None:
    dispatcher = FakeDispatcher(gates={"second_token"})
    async with served(folder, dispatcher) as s, AsyncClient(s.grpc_address) as client:
        stream = client.stream(TEXT, request_id="mine")
        await anext(stream)
        await client.abort("mine", "unknown")
        assert [await s.dispatcher.aborted.get() for _ in range(2)] == ["mine", "unknown"]
        with pytest.raises(RequestFailedError, match="the request was aborted") as caught:
            await anext(stream)
        assert caught.value.reason == "aborted"
        stream = client.stream(TEXT)
        await anext(stream)
        stream.close()
        with pytest.raises(RequestFailedError, match="this stream was closed"):
            await anext(stream)


@in_loop
async def test_infos(folder: Path) -> None:
    async with served(folder) as s, AsyncClient(s.grpc_address) as client:
        info = await client.model_info()
        assert (info.model, info.max_model_len, info.eos_token_ids) == (MODEL, 512, (0,))
        assert (info.fingerprint, info.vocab_size) == (FACTS.fingerprint, FACTS.vocab_size)
        server = await client.server_info()
        assert (server.ready, server.running_requests, server.version) == (True, 0, "0.1.0")
        assert [(w.name, w.role, w.free_blocks) for w in server.workers] == [("both-0", "both", 75)]
        s.dispatcher.facts = None
        with pytest.raises(Refused, match="no worker has joined yet"):
            await client.model_info()


@in_loop
async def test_health_follows_readiness(folder: Path) -> None:
    kinds = health_pb2.HealthCheckResponse
    dispatcher = FakeDispatcher(is_ready=False)
    async with (
        served(folder, dispatcher) as s,
        grpc.aio.insecure_channel(s.grpc_address) as channel,
    ):
        stub = health_pb2_grpc.HealthStub(channel)
        asked = health_pb2.HealthCheckRequest(service="kvrelay.v1.Inference")
        watch = stub.Watch(asked)
        assert (await watch.read()).status == kinds.NOT_SERVING
        dispatcher.is_ready = True
        for service in (health_pb2.HealthCheckRequest(), asked):
            assert (await stub.Check(service)).status == kinds.SERVING
        assert (await watch.read()).status == kinds.SERVING
        dispatcher.is_ready = False
        assert (await watch.read()).status == kinds.NOT_SERVING
        watch.cancel()


@in_loop
async def test_reflection_names_the_services(folder: Path) -> None:
    async with served(folder) as s, grpc.aio.insecure_channel(s.grpc_address) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        asked = reflection_pb2.ServerReflectionRequest(list_services="")
        call = stub.ServerReflectionInfo(iter([asked]))
        names = [service.name for service in (await call.read()).list_services_response.service]
        assert {"kvrelay.v1.Inference", "grpc.health.v1.Health"} <= set(names)
        call.cancel()


@in_loop
async def test_requests_that_cannot_be_honoured_say_so(folder: Path) -> None:
    wrong = {
        "set one of tokenized, text or chat": pb.GenerateRequest(),
        "messages is empty": pb.GenerateRequest(chat=pb.ChatInput()),
        "slo.ttft_ms must be milli": pb.GenerateRequest(text="a", slo=pb.Slo(ttft_ms=0)),
        "tier must be one of default, not": pb.GenerateRequest(text="a", tier="gold"),
        "messages has 5000": pb.GenerateRequest(chat=pb.ChatInput(messages=5_000 * [MESSAGE])),
        "continuation has 129": pb.GenerateRequest(
            text="a", continuation=pb.Continuation(choices=129 * [pb.Delivered()])
        ),
        "stop has 17": pb.GenerateRequest(
            text="a", sampling_params=pb.SamplingParams(stop=17 * ["a"])
        ),
    }
    async with served(folder) as s, grpc.aio.insecure_channel(s.grpc_address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        for words, request in wrong.items():
            with pytest.raises(grpc.aio.AioRpcError, match=words) as caught:
                await stub.Generate(request).read()
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        with pytest.raises(grpc.aio.AioRpcError, match="request_ids has 257"):
            await stub.Abort(pb.AbortRequest(request_ids=257 * ["a"]))


@in_loop
async def test_a_message_over_the_limit_is_refused(folder: Path) -> None:
    async with served(folder, max_body_bytes=10_000) as s, AsyncClient(s.grpc_address) as client:
        with pytest.raises(RequestFailedError, match="larger than max") as caught:
            await client.generate("a" * 10_000)
        assert caught.value.reason == "resource_exhausted"
        assert not s.dispatcher.requests
        with pytest.raises(InvalidRequest, match="context"):
            await client.generate("a" * 9_000)


@in_loop
async def test_the_client_for_threads(folder: Path) -> None:
    def use(address: str) -> Generated:
        with Client(address) as client:
            assert client.model_info().model == MODEL
            assert client.server_info().ready
            with client.stream(TEXT, ledger=True) as stream:
                assert "".join(chunk.text for chunk in stream) == TEXT
                assert "tokenize" in stream.ledger_ms
            with client.stream(TEXT) as left:
                next(left)
            client.abort("unknown")
            with pytest.raises(InvalidRequest, match="top_p must be"):
                client.generate(TEXT, top_p=2)
            return client.generate(TEXT)

    async with served(folder) as s:
        assert (await asyncio.to_thread(use, s.grpc_address)).text == TEXT


@in_loop
async def test_nobody_listening_is_a_failure_in_words(folder: Path) -> None:
    async with served(folder) as s:
        address = s.grpc_address
    async with AsyncClient(address) as client:
        with pytest.raises(RequestFailedError) as caught:
            await client.generate(TEXT)
        assert caught.value.reason == "unavailable"


def test_light_imports() -> None:
    """Workers import kvrelay.types without gRPC; a router needs no torch."""
    code = (
        "import sys, kvrelay.types; assert 'grpc' not in sys.modules\n"
        "import router.server; assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_package_exports_its_client() -> None:
    for name in kvrelay.__all__:
        assert getattr(kvrelay, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = kvrelay.Nothing
