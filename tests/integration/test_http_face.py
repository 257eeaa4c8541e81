"""What the HTTP API has beyond OpenAI's: vLLM's extras, ledger, state, metrics."""

from __future__ import annotations

import time
from pathlib import Path

import grpc
from prometheus_client.parser import text_string_to_metric_families

from kvrelay import AsyncClient
from kvrelay.v1 import inference_pb2, inference_pb2_grpc
from router.core.state.generation import TierStatus
from tests.integration.faces_kit import MODEL, in_loop, served
from tests.integration.http_kit import CHAT, TEXT, completion, events
from tests.integration.http_kit import checkpoint_folder as checkpoint_folder
from tests.unit.fake_dispatcher import FakeDispatcher


@in_loop
async def test_prompts_of_token_ids_in_a_batch(folder: Path) -> None:
    async with served(folder) as s, s.http() as client:
        body = {"prompt": [[1, 7, 8], [1, 9]], "n": 2, "return_token_ids": True}
        answer = (await completion(client, **body)).json()
        got = [(c["index"], c["token_ids"], c["prompt_token_ids"]) for c in answer["choices"]]
        assert got == [
            *((0, [7, 8], [1, 7, 8]), (1, [7, 8], [1, 7, 8])),
            *((2, [9], [1, 9]), (3, [9], [1, 9])),
        ]
        assert answer["usage"] == {
            "prompt_tokens": 5,
            "completion_tokens": 6,
            "total_tokens": 11,
            "prompt_tokens_details": {"cached_tokens": 0},
        }
        streamed = events((await completion(client, **body, stream=True)).text)
        assert sorted(c["choices"][0]["index"] for c in streamed[:-1]) == [0, 0, 1, 1, 2, 3]
        assert streamed[-1] == "[DONE]"
        assert streamed[0]["choices"][0]["prompt_token_ids"] in ([1, 7, 8], [1, 9])


@in_loop
async def test_chat_gives_token_ids(folder: Path) -> None:
    async with served(folder) as s, s.http() as client:
        body = {"model": MODEL, "messages": CHAT, "return_token_ids": True}
        answer = (await client.post("/v1/chat/completions", json=body)).json()
        ids = list(s.dispatcher.requests[0].prompt_ids)
        said = ids[1 : ids.index(0) + 1]
        assert (answer["prompt_token_ids"], answer["choices"][0]["token_ids"]) == (ids, said)
        body["stream"] = True
        chunks = events((await client.post("/v1/chat/completions", json=body)).text)
        assert chunks[0]["prompt_token_ids"] == ids
        assert [i for c in chunks[:-1] for i in c["choices"][0]["token_ids"]] == said


@in_loop
async def test_every_extra_reaches_the_workers(folder: Path) -> None:
    extras = {
        "top_k": 4,
        "min_p": 0.1,
        "repetition_penalty": 1.5,
        "min_tokens": 2,
        "ignore_eos": True,
        "stop_token_ids": [77],
        "frequency_penalty": 0.25,
        "presence_penalty": -0.25,
        "logit_bias": {"5": -3},
        "top_p": 0.5,
        "seed": -1,
    }
    async with served(folder) as s, s.http() as client:
        assert (await completion(client, **extras)).status_code == 200
        sampling = s.dispatcher.requests[0].sampling
        expected = {
            **extras,
            "stop_token_ids": (77,),
            "logit_bias": ((5, -3.0),),
            "seed": 2**64 - 1,
        }
        del expected["ignore_eos"]
        assert {name: getattr(sampling, name) for name in expected} == expected


@in_loop
async def test_end_of_sequence_is_counted_but_not_said(folder: Path) -> None:
    dispatcher = FakeDispatcher(script=lambda request, choice: [7, 8, 0, 9])
    async with served(folder, dispatcher) as s, s.http() as client:
        answer = (await completion(client, skip_special_tokens=False, return_token_ids=True)).json()
        choice = answer["choices"][0]
        assert choice["text"] == s.servers.service.tokenizer.decode([7, 8])
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", None)
        assert (choice["token_ids"], answer["usage"]["completion_tokens"]) == ([7, 8, 0], 3)
        own = (await completion(client, stop_token_ids=[8], include_stop_str_in_output=True)).json()
        assert own["choices"][0]["stop_reason"] == 8
        assert own["choices"][0]["text"] == s.servers.service.tokenizer.decode([7, 8])


@in_loop
async def test_stop_string_is_cut_or_kept(folder: Path) -> None:
    async with served(folder) as s, s.http() as client:
        cut = (await completion(client, stop=["th and", " 😀 a"])).json()["choices"][0]
        assert (cut["text"], cut["stop_reason"]) == ("the earth", " 😀 a")
        kept = await completion(client, stop=" 😀 a", include_stop_str_in_output=True, stream=True)
        chunks = [c["choices"][0] for c in events(kept.text)[:-1]]
        assert "".join(c["text"] for c in chunks) == "the earth 😀 a"
        assert chunks[-1]["stop_reason"] == " 😀 a"
        assert s.dispatcher.yielded_tokens < 2 * len(s.dispatcher.requests[0].prompt_ids) - 4


@in_loop
async def test_ledger_on_demand(folder: Path) -> None:
    async with served(folder) as s, s.http() as client:
        asked = {"x-kvrelay-ledger": "1"}
        body = {"model": MODEL, "prompt": TEXT}
        whole = (await client.post("/v1/completions", json=body, headers=asked)).json()
        names = ["receive", "tokenize", "prefill", "decode", "respond"]
        assert list(whole["kvrelay"]["ledger_ms"]) == names
        stream = await client.post("/v1/completions", json={**body, "stream": True}, headers=asked)
        *_, last, done = events(stream.text)
        assert (list(last["kvrelay"]["ledger_ms"]), done) == (names, "[DONE]")
        assert "kvrelay" not in (await completion(client)).json()


@in_loop
async def test_answers_are_not_held_back_by_the_network_stack(folder: Path) -> None:
    """Nagle's algorithm and a delayed acknowledgement together cost 40 ms for each answer
    on a connection but, at times, the first."""
    async with served(folder) as s, s.http() as client:
        times_s = []
        for _ in range(11):
            began_s = time.perf_counter()
            await completion(client, max_tokens=1)
            times_s.append(time.perf_counter() - began_s)
        assert sorted(times_s[1:])[3] < 0.03


@in_loop
async def test_tokenize_and_detokenize(folder: Path) -> None:
    async with served(folder) as s, s.http() as client:
        body = {"model": MODEL, "prompt": TEXT, "return_token_strs": True}
        got = (await client.post("/tokenize", json=body)).json()
        ids = list(s.servers.service.tokenizer.encode(TEXT))
        assert (got["tokens"], got["count"], got["max_model_len"]) == (ids, len(ids), 512)
        assert "".join(got["token_strs"]).startswith("<|begin|>theĠearth")
        plain = {"prompt": TEXT, "add_special_tokens": False}
        assert (await client.post("/tokenize", json=plain)).json()["tokens"] == ids[1:]
        chat = (await client.post("/tokenize", json={"messages": CHAT})).json()["tokens"]
        assert chat[-1] == s.servers.service.tokenizer.backend.token_to_id("<|assistant|>")
        back = (await client.post("/detokenize", json={"tokens": ids})).json()
        assert back == {"prompt": f"<|begin|>{TEXT}"}


@in_loop
async def test_request_id_is_echoed(folder: Path) -> None:
    async with served(folder) as s, s.http() as client:
        given = await client.get("/health", headers={"x-request-id": "abc-1"})
        assert given.headers["x-request-id"] == "abc-1"
        wrong = await client.get("/nowhere", headers={"x-request-id": "a b"})
        assert wrong.status_code == 404
        assert len(wrong.headers["x-request-id"]) == 32


@in_loop
async def test_ready_says_why_not(folder: Path) -> None:
    dispatcher = FakeDispatcher(is_ready=False, statuses=())
    async with served(folder, dispatcher) as s, s.http() as client:
        assert (await client.get("/health")).status_code == 200
        answer = await client.get("/ready")
        assert answer.status_code == 503
        assert answer.json() == {"ready": False, "reason": "no worker has joined yet"}
        dispatcher.is_ready = True
        assert (await client.get("/ready")).json() == {"ready": True}


@in_loop
async def test_metrics_are_valid_and_count(folder: Path) -> None:
    async with served(folder) as s, s.http() as client:
        latencies = {("ttft", "0.99"): 1.5}
        s.dispatcher.tier_statuses = (TierStatus(name="gold", step=2, latencies_s=latencies),)
        s.dispatcher.prediction_errors = {"ttft": 0.7, "tpot": 1.3}
        await completion(client)
        await completion(client, temperature=-1)
        text = (await s.get_internal("/metrics")).text
        samples = {
            (sample.name, *sorted(sample.labels.items())): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }
        model = ("model_name", MODEL)
        tokens = len(s.dispatcher.requests[0].prompt_ids)
        assert samples["kvrelay:prompt_tokens_total", model] == tokens
        assert samples["kvrelay:generation_tokens_total", model] == tokens - 1
        assert samples["kvrelay:time_to_first_token_seconds_count", model] == 1
        assert samples["kvrelay:inter_token_latency_seconds_count", model] == tokens - 2
        assert samples["kvrelay:e2e_request_latency_seconds_count", model] == 1
        assert samples["kvrelay:num_requests_running", model] == 0
        worker = (model, ("worker", "both-0"))
        assert samples["kvrelay:kv_cache_usage_perc", *worker] == 0.25
        assert samples["kvrelay:request_success_total", ("finished_reason", "stop"), model] == 1
        tier = ("tier", "default")
        rejected = ("kvrelay:request_rejections_total", model, ("reason", "invalid_value"), tier)
        assert samples[rejected] == 1
        gold = ("tier", "gold")
        assert samples["kvrelay:qos_ladder_step", model, gold] == 2
        assert samples["kvrelay:offered_requests_total", model, gold] == 5
        assert samples["kvrelay:offered_prompt_tokens_total", model, gold] == 700
        assert samples["kvrelay:offered_hopeless_requests_total", model, gold] == 6
        role = ("role", "decode")
        assert samples["kvrelay:desired_workers", model, ("pool", "both"), role] == 2.0
        assert samples["kvrelay:saturation", model, role] == 0.5
        seen = (("kind", "ttft"), model, ("quantile", "0.99"), gold)
        assert samples["kvrelay:qos_latency_seconds", *seen] == 1.5
        phase = ("kvrelay:request_phase_seconds_count", model, ("phase", "tokenize"))
        assert samples[phase] == 1
        for kind, ratio in (("ttft", 0.7), ("tpot", 1.3)):
            error = ("kvrelay:prediction_error_ratio_sum", ("kind", kind), model)
            assert samples[error] == ratio


@in_loop
async def test_debug_and_version(folder: Path) -> None:
    async with served(folder) as s, s.http() as client:
        kv = (await s.get_internal("/debug/kv")).json()
        (worker,) = kv.pop("workers")
        assert (worker["worker"], worker["total_blocks"]) == ("both-0", 100)
        assert kv == {"pool_nodes": [], "silent": []}
        assert (await client.get("/version")).json() == {"version": "0.1.0"}


@in_loop
async def test_an_answer_names_the_tier_that_was_applied(folder: Path) -> None:
    async with served(folder) as s, s.http() as client:
        for stream in (False, True):
            answer = await completion(client, stream=stream)
            assert answer.headers["x-kvrelay-tier"] == "default"
        async with grpc.aio.insecure_channel(s.grpc_address) as channel:
            asked = inference_pb2.GenerateRequest(text="hello")
            responses = inference_pb2_grpc.InferenceStub(channel).Generate(asked)
            assert {response.tier async for response in responses} == {"default"}


@in_loop
async def test_an_answer_says_that_its_output_was_capped(folder: Path) -> None:
    async with served(folder) as s, s.http() as client:
        assert "x-kvrelay-capped" not in (await completion(client)).headers
        s.dispatcher.capped_tokens = 7
        for stream in (False, True):
            answer = await completion(client, stream=stream)
            assert answer.headers["x-kvrelay-capped"] == "7"
        async with AsyncClient(s.grpc_address) as typed:
            assert (await typed.generate("hello")).capped_tokens == 7
            s.dispatcher.capped_tokens = None
            assert (await typed.generate("hello")).capped_tokens is None
