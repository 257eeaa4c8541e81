"""A lean streaming client: many requests, every token's arrival time, little work of its own."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from ssl import SSLContext


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """One request's measurements, in seconds; `token_s` are arrival times since sending, at
    `sent_s` by perf_counter. `request_id` is the answer's, as its `token_ids` are."""

    token_s: tuple[float, ...]
    ledger_ms: dict[str, float]
    request_id: str = ""
    sent_s: float = 0.0
    token_ids: tuple[int, ...] = ()

    @property
    def ttft_s(self) -> float:
        return self.token_s[0]

    @property
    def tpot_s(self) -> float:
        return (self.token_s[-1] - self.token_s[0]) / max(1, len(self.token_s) - 1)

    @property
    def gaps_s(self) -> list[float]:
        return [b - a for a, b in zip(self.token_s, self.token_s[1:], strict=False)]


SendOne = Callable[[Sequence[int], int], Awaitable[Sent]]
"""(prompt, output tokens)"""


async def send(
    port: int,
    prompt: Sequence[int],
    output_tokens: int,
    *,
    key: str = "",
    tls: SSLContext | None = None,
    **more: object,
) -> Sent:
    """POST /v1/completions, streaming, greedy, exactly `output_tokens` tokens. `key`: an API key;
    `tls`: over TLS, by a connection of its own like every request."""
    body = {
        "prompt": list(prompt),
        "max_tokens": output_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
        **more,
    }
    payload = json.dumps(body).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: bench\r\nConnection: close\r\n"
        "Content-Type: application/json\r\n"
        f"x-kvrelay-ledger: 1\r\nContent-Length: {len(payload)}\r\n"
    )
    head += f"Authorization: Bearer {key}\r\n\r\n" if key else "\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=tls)
    started_s = time.perf_counter()
    writer.write(head.encode() + payload)
    arrived: list[tuple[float, bytes]] = []
    try:
        status = await reader.readline()
        if b" 200 " not in status:
            raise RuntimeError((status + await reader.read()).decode())
        while line := await reader.readline():
            if line.startswith(b"data: {"):
                arrived.append((time.perf_counter() - started_s, line))
    finally:
        writer.close()
    return _parse(arrived, output_tokens, started_s)


def _parse(arrived: Sequence[tuple[float, bytes]], output_tokens: int, sent_s: float) -> Sent:
    token_s: list[float] = []
    token_ids: list[int] = []
    ledger_ms: dict[str, float] = {}
    request_id = ""
    for at_s, line in arrived:
        event = json.loads(line.removeprefix(b"data: "))
        request_id = event["id"]
        ledger_ms = event.get("kvrelay", {}).get("ledger_ms", ledger_ms)
        for choice in event["choices"]:
            new = choice.get("token_ids") or ()
            token_s += [at_s] * len(new)
            token_ids += new
    if len(token_s) != output_tokens:
        raise RuntimeError(f"{len(token_s)} tokens came, {output_tokens} were asked for")
    return Sent(
        token_s=tuple(token_s),
        ledger_ms=ledger_ms,
        request_id=request_id,
        sent_s=sent_s,
        token_ids=tuple(token_ids),
    )


def closed_loop(port: int, prompts: Sequence[Sequence[int]], output_tokens: int) -> list[Sent]:
    """All at once."""
    return all_at_once(partial(send, port), prompts, output_tokens)


def all_at_once(
    send_one: SendOne, prompts: Sequence[Sequence[int]], output_tokens: int
) -> list[Sent]:
    async def run() -> list[Sent]:
        return await asyncio.gather(*(send_one(prompt, output_tokens) for prompt in prompts))

    return asyncio.run(run())


def open_loop(
    port: int, prompts: Sequence[Sequence[int]], output_tokens: int, *, rate_per_s: float
) -> list[Sent]:
    """Poisson arrivals of a fixed seed, whatever the server does."""
    return arriving(partial(send, port), prompts, output_tokens, rate_per_s=rate_per_s)


def arriving(
    send_one: SendOne,
    prompts: Sequence[Sequence[int]],
    output_tokens: int,
    *,
    rate_per_s: float,
) -> list[Sent]:
    async def run() -> list[Sent]:
        rng, tasks = random.Random(0), []
        for prompt in prompts:
            tasks.append(asyncio.ensure_future(send_one(prompt, output_tokens)))
            await asyncio.sleep(rng.expovariate(rate_per_s))
        return await asyncio.gather(*tasks)

    return asyncio.run(run())
