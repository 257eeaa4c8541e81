"""vLLM's servers: its own prefill/decode split over NIXL, a core each; one server on all cores.

Of the split the client asks first the one and then the other, as vLLM's proxy does, without a
proxy's cost.
"""

from __future__ import annotations

import asyncio
import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from bench.peer_vllm.process import Peer, peer
from bench.serving.http_load import Sent, send
from bench.serving.start_up import free_port

PATIENCE_S = 420.0
"""The first start compiles, on one core each."""
PREFILLED = "prefilled"
ASKED_OF_PREFILL = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    prefill_port: int
    decode_port: int
    servers: tuple[Peer, Peer]

    @contextmanager
    def at_work(self) -> Iterator[None]:
        prefill, decode = self.servers
        with prefill.at_work(), decode.at_work():
            yield

    async def send(self, prompt: Sequence[int], output_tokens: int) -> Sent:
        """Times since it was sent to the prefill server; the ledger says when that had answered."""
        begun_s = time.perf_counter()
        body = {
            "prompt": list(prompt),
            "max_tokens": 1,
            "temperature": 0,
            "kv_transfer_params": ASKED_OF_PREFILL,
        }
        answer = await _post(self.prefill_port, body)
        before_s = time.perf_counter() - begun_s
        found = await send(
            self.decode_port,
            prompt,
            output_tokens,
            kv_transfer_params=answer["kv_transfer_params"],
        )
        return replace(
            found,
            token_s=tuple(before_s + one for one in found.token_s),
            ledger_ms={PREFILLED: 1000 * before_s},
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Aggregated:
    port: int
    server: Peer

    def at_work(self) -> AbstractContextManager[None]:
        return self.server.at_work()

    async def send(self, prompt: Sequence[int], output_tokens: int) -> Sent:
        return await send(self.port, prompt, output_tokens)


@contextmanager
def vllm_aggregated(
    model: Path, max_model_len: int, requests: int, cores: Sequence[int]
) -> Iterator[Aggregated]:
    """One server that prefills and decodes, a thread on each core. Halted but for `at_work`."""
    port = free_port()
    with _server(model, port, cores, _limits(max_model_len, requests)) as server:
        _wait_ready(port, server)
        server.halt()
        yield Aggregated(port=port, server=server)


@contextmanager
def vllm_split(model: Path, max_model_len: int, requests: int) -> Iterator[Split]:
    """Both are halted but for `at_work`."""
    ports = free_port(), free_port()
    limits = _limits(max_model_len, requests)
    with (
        _half(model, "kv_producer", ports[0], 0, limits) as prefill,
        _half(model, "kv_consumer", ports[1], 1, limits) as decode,
    ):
        for port, server in zip(ports, (prefill, decode), strict=True):
            _wait_ready(port, server)
        for server in (prefill, decode):
            server.halt()
        yield Split(prefill_port=ports[0], decode_port=ports[1], servers=(prefill, decode))


def _limits(max_model_len: int, requests: int) -> list[str]:
    return ["--max-model-len", str(max_model_len), "--max-num-seqs", str(requests)]


@contextmanager
def _half(model: Path, role: str, port: int, core: int, more: Sequence[str]) -> Iterator[Peer]:
    transfer = {"kv_connector": "NixlConnector", "kv_role": role, "kv_buffer_device": "cpu"}
    channel = {
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
    }
    arguments = ["--kv-transfer-config", json.dumps(transfer), *more]
    with _server(model, port, [core], arguments, **channel) as started:
        yield started


@contextmanager
def _server(
    model: Path, port: int, cores: Sequence[int], more: Sequence[str], **environment: str
) -> Iterator[Peer]:
    arguments = [
        *("-m", "vllm.entrypoints.openai.api_server", "--model", str(model)),
        *("--host", "127.0.0.1", "--port", str(port), "--dtype", "bfloat16"),
        *("--no-enable-prefix-caching", "--disable-uvicorn-access-log", *more),
    ]
    with peer(arguments, cores, **environment) as started:
        yield started


def _wait_ready(port: int, server: Peer) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not _is_healthy(port):
        server.check_alive()
        if time.monotonic() > deadline_s:
            raise RuntimeError(f"vLLM did not serve within {PATIENCE_S:g} s")
        time.sleep(0.5)


def _is_healthy(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


async def _post(port: int, body: dict[str, object]) -> dict[str, object]:
    payload = json.dumps(body).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: bench\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(payload)}\r\n\r\n"
    )
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(head.encode() + payload)
        status, _, found = (await reader.read()).partition(b"\r\n\r\n")
    finally:
        writer.close()
    if b" 200 " not in status.partition(b"\r\n")[0]:
        raise RuntimeError((status + found).decode())
    answer: dict[str, object] = json.loads(found)
    return answer
