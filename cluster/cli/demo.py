"""`kvrelay demo`: starts the default cluster, streams three answers, prints their ledgers,
stops."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from urllib.request import Request, urlopen

from rich.console import Console
from rich.table import Table

from cluster.config.load import load_config
from cluster.config.overrides import Override
from cluster.config.schema import Config
from cluster.on_ray.connect import connected
from kvrelay import Client
from kvrelay.errors import KvrelayError

PROMPT = "It was"
QUESTION = "Who are you?"
MAX_TOKENS = 48
TIMEOUT_S = 120.0
SSE_DATA = b"data: "

_Event = Mapping[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoAnswer:
    """`ledger_ms`: # phase |-> milliseconds, from the router; `seen_ms`: measured by the client."""

    title: str
    ledger_ms: Mapping[str, float]
    seen_ms: float


def demo_config() -> Config:
    """The default cluster on ports that the system chooses, so that other clusters can run beside
    it. It lives too short for a pool."""
    settings: dict[str, object] = {
        "name": "demo",
        "ray.address": "local",
        "router.http_port": 0,
        "router.grpc_port": 0,
        "pool.enabled": "off",
    }
    return load_config(None, [Override(tuple(k.split(".")), v) for k, v in settings.items()])


def run_demo() -> None:
    """Raises KvrelayError when the cluster can't start or an answer is wrong."""
    began_s = time.monotonic()
    config = demo_config()
    with connected(config, log_to_driver=False) as here:
        from cluster.on_ray.launch import Stopwatch, start

        say = Stopwatch(began_s)
        say("Ray has started")
        driver = start(config, here, detach=False, say=say)
        try:
            router = driver.wait_ready().routers[0]
            answers = [*_over_grpc(router.grpc), *_over_http(router.http)]
            _print_ledgers(answers)
        finally:
            driver.stop()
            driver.follow()
        say("stopped, nothing is left")


def _over_grpc(address: str) -> Iterator[DemoAnswer]:
    """Asks for the model first, so that no request includes the time to connect."""
    with Client(address, timeout_s=TIMEOUT_S) as client:
        client.model_info()
        began_s = _begin("gRPC", PROMPT)
        with client.stream(PROMPT, max_tokens=MAX_TOKENS, ledger=True) as stream:
            for chunk in stream:
                print(chunk.text, end="", flush=True)
            yield _end("gRPC", stream.ledger_ms, began_s)


def _over_http(base: str) -> Iterator[DemoAnswer]:
    began_s = _begin("HTTP completions", PROMPT)
    events = _events(f"{base}/v1/completions", {"prompt": PROMPT})
    yield _stream_http("HTTP completions", events, began_s)
    began_s = _begin("HTTP chat", QUESTION)
    question = [{"role": "user", "content": QUESTION}]
    events = _events(f"{base}/v1/chat/completions", {"messages": question})
    yield _stream_http("HTTP chat", events, began_s)


def _stream_http(title: str, events: Iterator[_Event], began_s: float) -> DemoAnswer:
    ledger: Mapping[str, float] = {}
    for event in events:
        print(_text(event), end="", flush=True)
        ledger = _ledger(event) or ledger
    return _end(title, ledger, began_s)


def _events(url: str, body: Mapping[str, object]) -> Iterator[_Event]:
    """Server-sent events as `curl -N` shows them, parsed, up to [DONE]."""
    data = json.dumps(dict(body) | {"stream": True, "max_tokens": MAX_TOKENS}).encode()
    headers = {"content-type": "application/json", "x-kvrelay-ledger": "1"}
    with urlopen(Request(url, data, headers), timeout=TIMEOUT_S) as reply:
        for line in reply:
            payload = line.strip().removeprefix(SSE_DATA)
            if payload and payload != b"[DONE]":
                yield json.loads(payload)


def _text(event: _Event) -> str:
    for choice in _mappings(event.get("choices")):
        delta = choice.get("delta")
        text = delta.get("content") if isinstance(delta, dict) else choice.get("text")
        return text if isinstance(text, str) else ""
    return ""


def _ledger(event: _Event) -> Mapping[str, float] | None:
    extra = event.get("kvrelay")
    return extra["ledger_ms"] if isinstance(extra, dict) else None


def _mappings(value: object) -> list[dict[str, object]]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def _begin(title: str, prompt: str) -> float:
    print(f"\n{title}: {prompt}\n  ", end="", flush=True)
    return time.monotonic()


def _end(title: str, ledger_ms: Mapping[str, float], began_s: float) -> DemoAnswer:
    print(flush=True)
    if not ledger_ms:
        raise KvrelayError(f"{title}: the answer came without its ledger")
    seen_ms = (time.monotonic() - began_s) * 1000
    return DemoAnswer(title=title, ledger_ms=dict(ledger_ms), seen_ms=seen_ms)


def _print_ledgers(answers: list[DemoAnswer]) -> None:
    """One column per request, one row per phase, in the order of events."""
    table = Table(title="\nWhere the time went, in ms", box=None, title_justify="left")
    table.add_column("phase")
    for answer in answers:
        table.add_column(answer.title, justify="right")
    for phase in dict.fromkeys(phase for answer in answers for phase in answer.ledger_ms):
        times = (answer.ledger_ms.get(phase) for answer in answers)
        table.add_row(phase, *("-" if time_ms is None else f"{time_ms:.1f}" for time_ms in times))
    table.add_row("sum", *(f"{sum(answer.ledger_ms.values()):.1f}" for answer in answers))
    table.add_row("client saw", *(f"{answer.seen_ms:.1f}" for answer in answers))
    Console(soft_wrap=True).print(table)
    print(flush=True)
