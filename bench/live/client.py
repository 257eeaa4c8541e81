"""The load generator: a process of its own, which does little between sending and listening.

    python -m bench.live.client PORT[,PORT...] PLAN OUTCOMES --patience SECONDS

reads a JSON list of Offered, sends each to the next of the routers, and writes one of Outcome. What
arrives is parsed when all is over.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import cycle
from pathlib import Path

import uvloop

from bench.live.offered import Offered
from bench.live.outcome import Outcome

_EVENT = b"data: {"


@dataclass(slots=True)
class _Heard:
    sent_s: float = 0.0
    head: list[bytes] = field(default_factory=list)
    events: list[tuple[float, bytes]] = field(default_factory=list)
    body: bytes = b""
    answered_s: float = 0.0
    over: bool = False


def request_bytes(one: Offered) -> bytes:
    body = {
        "prompt": one.prompt_ids,
        "max_tokens": one.max_tokens,
        **({"temperature": 0, "ignore_eos": True} if one.ignore_eos else {"seed": one.seed}),
        "stream": True,
        "return_token_ids": True,
    }
    payload = json.dumps(body).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: bench\r\nConnection: close\r\n"
    for name, value in _headers(one).items():
        head += f"{name}: {value}\r\n"
    return f"{head}Content-Length: {len(payload)}\r\n\r\n".encode() + payload


def _headers(one: Offered) -> dict[str, str]:
    found = {"x-customer-tier": one.tier} if one.tier else {}
    for kind, seconds in (("ttft", one.ttft_s), ("tpot", one.tpot_s)):
        if seconds is not None:
            found[f"x-slo-{kind}-ms"] = f"{1000 * seconds:.3f}"
    return found


async def _send(port: int, request: bytes, heard: _Heard) -> None:
    """Fills `heard` as it goes, so that nothing is lost when it is cancelled."""
    heard.sent_s = time.monotonic()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(request)
        while (line := await reader.readline()).strip():
            heard.head.append(line)
        heard.answered_s = time.monotonic()
        if b" 200 " not in heard.head[0]:
            heard.body = await reader.read()
        else:
            while line := await reader.readline():
                if line.startswith(_EVENT):
                    heard.events.append((time.monotonic(), line))
        heard.over = True
    finally:
        writer.close()


async def offer(
    ports: Sequence[int], offered: Sequence[Offered], patience_s: float
) -> list[Outcome]:
    """Sends each at its time, whatever the server does; gives up `patience_s` after the last."""
    requests = [request_bytes(one) for one in offered]
    heard = [_Heard() for _ in offered]
    tasks: list[asyncio.Task[None]] = []
    started_s = time.monotonic()
    for port, one, request, ear in zip(cycle(ports), offered, requests, heard, strict=False):
        await asyncio.sleep(max(0.0, started_s + one.at_s - time.monotonic()))
        tasks.append(asyncio.create_task(_send(port, request, ear)))
    await _give_up(tasks, patience_s)
    return [outcome(ear) for ear in heard]


async def one_by_one(
    ports: Sequence[int], offered: Sequence[Offered], at_once: int
) -> list[Outcome]:
    """A closed loop: `at_once` clients, each of which sends its next when the last is answered."""
    waiting, heard = zip(cycle(ports), [request_bytes(one) for one in offered], strict=False), []

    async def client() -> None:
        for port, request in waiting:
            heard.append(ear := _Heard())
            await _send(port, request, ear)

    await asyncio.gather(*(client() for _ in range(at_once)))
    return [outcome(ear) for ear in heard]


async def _give_up(tasks: Sequence[asyncio.Task[None]], patience_s: float) -> None:
    _, left = await asyncio.wait(tasks, timeout=patience_s)
    for task in left:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def outcome(heard: _Heard) -> Outcome:
    if heard.body:
        return _refused(heard)
    token_s = [at_s - heard.sent_s for at_s, line in heard.events for _ in range(_tokens(line))]
    finished = any(_finish(line) for _, line in heard.events)
    return Outcome(
        sent_s=heard.sent_s,
        ended="done" if finished else "failed" if heard.over else "cut",
        answered_s=heard.answered_s - heard.sent_s if heard.head else None,
        first_s=token_s[0] if token_s else None,
        last_s=token_s[-1] if token_s else None,
        tokens=len(token_s),
    )


def _refused(heard: _Heard) -> Outcome:
    retry = [line.split(b":")[1] for line in heard.head if line.startswith(b"retry-after-ms")]
    return Outcome(
        sent_s=heard.sent_s,
        ended="refused",
        reason=str(json.loads(heard.body)["error"]["code"]),
        retry_after_s=float(retry[0]) / 1000 if retry else None,
        answered_s=heard.answered_s - heard.sent_s,
    )


def _tokens(line: bytes) -> int:
    choices = json.loads(line.removeprefix(b"data: ")).get("choices", ())
    return sum(len(choice.get("token_ids") or ()) for choice in choices)


def _finish(line: bytes) -> bool:
    choices = json.loads(line.removeprefix(b"data: ")).get("choices", ())
    return any(choice.get("finish_reason") for choice in choices)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("ports", type=lambda given: [int(port) for port in given.split(",")])
    parser.add_argument("plan", type=Path)
    parser.add_argument("outcomes", type=Path)
    parser.add_argument("--patience", type=float, default=10.0)
    parser.add_argument("--at-once", type=int, help="a closed loop of so many clients")
    args = parser.parse_args()
    offered = [Offered(**row) for row in json.loads(args.plan.read_text())]
    if args.at_once:
        run = one_by_one(args.ports, offered, args.at_once)
    else:
        run = offer(args.ports, offered, args.patience)
    args.outcomes.write_text(json.dumps([asdict(one) for one in uvloop.run(run)]))


if __name__ == "__main__":
    main()
