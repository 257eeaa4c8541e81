"""How long the router's event loop stands still for one call of a client, at the worst.

    python -m bench.router.loop_lag [--repeats 5]

A router in a process of its own, with its real core, HTTP and gRPC servers and the bundled model's
tokenizer; one worker that never lets one wait. Of each kind of call the smallest of the repeats is
shown: the machine may be busy. `wall` is the time between two turns of the loop, `own` is the CPU
time of its thread within it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, cast

import grpc
import httpx
import uvloop

from bench.report import Row, print_table
from engine.bundled import checkpoint_path
from kvrelay.counters import Counters
from kvrelay.gc_pauses import freeze
from kvrelay.messages import Generate, Released, Reserved, Tokens, ToWorker, WorkerHello
from kvrelay.types import FinishReason, Incarnation, RequestKey, Role, StepCoefficients
from kvrelay.v1 import inference_pb2 as pb
from kvrelay.v1 import inference_pb2_grpc
from kvrelay.wire import encode_to_worker
from router.core.policy.choice import Policies
from router.live.dispatcher import WorkerDispatcher
from router.live.link import WorkerLink
from router.server import RouterServers, ServerOptions
from router.text.tokenizer import TextTokenizer

CONTEXT = 40_000
TOKENS = 32_000
ALLOWED_MS = 20.0
TICK_S = 0.001
NAME = "model"


class AnsweringLink:
    """A worker that decodes a step in each turn of the loop."""

    address = "bench:1"

    def __init__(self, dispatcher: WorkerDispatcher) -> None:
        self._dispatcher = dispatcher

    def send(self, message: ToWorker) -> None:
        encode_to_worker(message)
        if isinstance(message, Generate):
            asyncio.get_running_loop().call_soon(self._answer, message)

    async def close(self) -> None:
        pass

    def _answer(self, message: Generate) -> None:
        spec = message.spec
        self._said(Reserved(key=spec.key, at_s=time.monotonic()))
        first = spec.context_tokens - len(spec.prompt_ids)
        self._step(message, first, spec.sampling.max_tokens)

    def _step(self, message: Generate, index: int, most: int) -> None:
        """A token of each choice; the next step is in the loop's next turn."""
        spec, last = message.spec, index + 1 >= most
        for choice in range(spec.sampling.n):
            self._said(self._token(spec.key, choice, index, last))
        if last:
            self._said(Released(key=spec.key, at_s=time.monotonic()))
        else:
            asyncio.get_running_loop().call_soon(self._step, message, index + 1, most)

    def _token(self, key: RequestKey, choice: int, index: int, last: bool) -> Tokens:
        return Tokens(
            key=key,
            at_s=time.monotonic(),
            choice=choice,
            first_index=index,
            token_ids=(300 + index % 50,),
            finish_reason=FinishReason.LENGTH if last else None,
        )

    def _said(self, event: Reserved | Tokens | Released) -> None:
        self._dispatcher.said(WORKER, (event,), Counters(), ())


WORKER = Incarnation("bench")


def _hello(vocab_size: int) -> WorkerHello:
    return WorkerHello(
        name="bench",
        pool="bench",
        incarnation=WORKER,
        role=Role.BOTH,
        device="cpu",
        transport="loopback",
        transfer_addresses=(),
        fingerprint="f00d",
        architecture="Llama",
        block_size=16,
        total_blocks=200_000,
        max_model_len=CONTEXT,
        max_running_requests=256,
        prefill_chunk_tokens=8192,
        mixed_chunk_tokens=8192,
        vocab_size=vocab_size,
        step_times=StepCoefficients(),
        kv_token_bytes=1000,
    )


@dataclass(slots=True)
class Probe:
    """The longest times between two turns of the loop, since the last reset."""

    wall_s: float = 0.0
    own_s: float = 0.0

    async def run(self) -> None:
        while True:
            wall_s, own_s = time.perf_counter(), time.thread_time()
            await asyncio.sleep(TICK_S)
            self.wall_s = max(self.wall_s, time.perf_counter() - wall_s - TICK_S)
            self.own_s = max(self.own_s, time.thread_time() - own_s)


def serve(control: Connection) -> None:
    """Sends the two ports, then answers each message with what the probe has found since."""
    uvloop.run(_serve(control))


async def _serve(control: Connection) -> None:
    tokenizer = TextTokenizer.load(checkpoint_path())
    dispatcher = WorkerDispatcher(policies=Policies(admission="none"))
    link = cast(WorkerLink, AnsweringLink(dispatcher))
    dispatcher.joined(link, _hello(tokenizer.vocab_size))
    options = ServerOptions(
        host="127.0.0.1", http_port=0, grpc_port=0, max_body_bytes=4 << 20, cluster="bench"
    )
    servers = RouterServers(dispatcher, checkpoint_path(), tokenizer, NAME, options)
    public, _ = await servers.start()
    freeze()
    probe = Probe()
    tasks = asyncio.create_task(probe.run()), asyncio.create_task(_reporting(dispatcher))
    control.send((public.http, public.grpc))
    while await asyncio.to_thread(control.recv) is not None:
        control.send((probe.wall_s, probe.own_s))
        probe.wall_s = probe.own_s = 0.0
    for task in tasks:
        task.cancel()
    await servers.stop(0.0)


async def _reporting(dispatcher: WorkerDispatcher) -> None:
    """A worker that says nothing would be lost."""
    while True:
        dispatcher.said(WORKER, (), Counters(), ())
        await asyncio.sleep(0.5)


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """`body` of an HTTP call, or a message of gRPC."""

    name: str
    path: str = "/v1/completions"
    body: bytes = b""
    message: pb.GenerateRequest | None = None


def _json(**fields: Any) -> bytes:
    return json.dumps({"max_tokens": 4, "ignore_eos": True, **fields}).encode()


WORDS = "The quick brown fox jumps over the lazy dog, and 12345 others. "


def calls(tokenizer: TextTokenizer) -> Iterator[Call]:
    text = WORDS * (TOKENS // len(tokenizer.encode(WORDS)))
    ids = [300 + i % 1000 for i in range(TOKENS)]
    chat, tokenize = "/v1/chat/completions", "/tokenize"
    told = {"choices": [{"token_ids": [300] * (CONTEXT - TOKENS - 10)}]}
    yield Call(name="32,000 token ids", body=_json(prompt=ids))
    yield Call(name="a text of 32,000 tokens", body=_json(prompt=text))
    yield Call(name="one word of 30,000 letters", body=_json(prompt="a" * 30_000))
    message = pb.GenerateRequest(tokenized=pb.TokenizedInput(input_ids=ids))
    message.sampling_params.max_tokens = 4
    yield Call(name="gRPC: 32,000 token ids", message=message)
    yield Call(name="gRPC: the text", message=_grpc_text(text))
    yield Call(name="a chat of one long message", path=chat, body=_chat([text]))
    yield Call(name="a chat of 4,096 messages", path=chat, body=_chat(["a b"] * 4096))
    yield Call(name="256 prompts of 100 tokens", body=_json(prompt=[ids[:100]] * 256))
    yield Call(name="128 texts of 1,000 tokens", body=_json(prompt=[text[:3000]] * 128))
    yield Call(name="n of 128, 200 tokens each", body=_json(prompt="a", n=128, max_tokens=200))
    stop = ["a" * 1000 + str(i) for i in range(16)]
    yield Call(name="16 stop strings of 1 KiB", body=_json(prompt="a", stop=stop, max_tokens=500))
    biases = {str(i): 1 for i in range(1024)}
    yield Call(name="1,024 biases, 256 stop ids", body=_biased(biases))
    yield Call(name="8,000 delivered tokens", body=_continued(ids[: TOKENS // 2], told))
    yield Call(name="echo of 32,000 token ids", body=_json(prompt=ids, echo=True))
    lines = b"\n".join(_part(text, i) for i in _steps(text))
    yield Call(
        name="the text in parts", path="/v1/completions/stream", body=_json() + b"\n" + lines
    )
    yield Call(name="tokenize", path=tokenize, body=_named(prompt=text, return_token_strs=True))
    yield Call(name="detokenize", path="/detokenize", body=_named(tokens=ids))
    yield from refused()


def refused() -> Iterator[Call]:
    yield Call(name="refused: 2,000,000 numbers", body=b'{"prompt":[' + b"1," * 2_000_000 + b"1]}")
    yield Call(name="refused: 1,300,000 lists", body=b'{"prompt":[' + b"[]," * 1_300_000 + b"[]]}")
    yield Call(name="refused: 4 MiB of text", body=_json(prompt="hello, world " * 300_000))
    yield Call(name="refused: 4 MiB of quotes", body=_json(prompt='"\\' * 900_000))
    yield Call(name="refused: lists within lists", body=b'{"prompt":' + b"[" * 4_000_000)
    yield Call(name="refused: a stop string of 4 MB", body=_json(prompt="a", stop="a" * 4_000_000))
    yield Call(name="refused: numbers of 4,000 digits", body=b"[" + b"7" * 4000 * 900 + b"]")
    yield Call(name="refused: 130,000 wrong numbers", body=_json(prompt=[-1] * 130_000))


def _steps(text: str) -> range:
    return range(0, len(text), 20_000)


def _part(text: str, at: int) -> bytes:
    return json.dumps({"text": text[at : at + 20_000]}).encode()


def _named(**fields: Any) -> bytes:
    return json.dumps(fields).encode()


def _grpc_text(text: str) -> pb.GenerateRequest:
    message = pb.GenerateRequest(text=text)
    message.sampling_params.max_tokens = 4
    return message


def _chat(contents: list[str]) -> bytes:
    return _json(messages=[{"role": "user", "content": content} for content in contents])


def _biased(biases: dict[str, int]) -> bytes:
    stops = list(range(1000, 1256))
    return _json(prompt="a", logit_bias=biases, stop_token_ids=stops, max_tokens=200)


def _continued(ids: list[int], told: dict[str, Any]) -> bytes:
    return _json(prompt=ids, continuation=told, max_tokens=8000)


def measure(call: Call, client: httpx.Client, stub: Any, control: Connection) -> tuple[float, ...]:
    control.send("reset")
    control.recv()
    if call.message is not None:
        for _ in stub.Generate(call.message):
            pass
        status = "served"
    else:
        answer = client.post(call.path, content=call.body)
        status = "served" if answer.status_code == 200 else answer.json()["error"]["code"]
    if ("refused" in call.name) == (status == "served"):
        raise SystemExit(f"{call.name}: {status}")
    control.send("read")
    found: tuple[float, ...] = control.recv()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    control, theirs = context.Pipe()
    router = context.Process(target=serve, args=(theirs,))
    router.start()
    try:
        http_port, grpc_port = control.recv()
        print_table("loop lag", list(_rows(http_port, grpc_port, control, options.repeats)))
    finally:
        control.send(None)
        router.join()


def _rows(http_port: int, grpc_port: int, control: Connection, repeats: int) -> Iterator[Row]:
    tokenizer = TextTokenizer.load(checkpoint_path())
    channel = grpc.insecure_channel(f"127.0.0.1:{grpc_port}")
    stub: Any = inference_pb2_grpc.InferenceStub(channel)  # type: ignore[no-untyped-call]
    base = f"http://127.0.0.1:{http_port}"
    with httpx.Client(base_url=base, timeout=60, trust_env=False) as client, channel:
        for call in calls(tokenizer):
            found = [measure(call, client, stub, control) for _ in range(repeats)]
            wall_ms, own_ms = (1000 * min(one) for one in zip(*found, strict=True))
            yield Row(
                name=call.name,
                value=wall_ms,
                unit="ms",
                against="allowed",
                against_value=ALLOWED_MS,
                goal=1.0,
                lower_is_better=True,
                method=f"least of {repeats}; own {own_ms:.1f} ms",
            )


if __name__ == "__main__":
    main()
