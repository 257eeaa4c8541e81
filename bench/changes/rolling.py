"""Workers and routers that are replaced one after another, under load: does any request notice?

Two routers behind haproxy, two prefill and two decode workers, plain processes, the bundled model
in float32. First what they serve in a closed loop, then Poisson arrivals at 0.6 of that: in turn by
the `openai` package through haproxy, and by `kvrelay.AsyncClient` and `kvrelay.Client` with both
routers' addresses. Each cycle starts one more worker, waits until both routers know it, and tells
an old one to stop (SIGTERM). At the end both routers are stopped and started in turn. An answer has
to be the one that an undisturbed cluster gives: token by token by our clients, in its text by
`openai`.

    python -m bench.changes.rolling --cycles 100        # needs haproxy on the PATH
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import signal
import socket
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import httpx
from openai import AsyncOpenAI

from bench.report import Row, print_table, write_json
from engine.bundled import checkpoint_path
from kvrelay import AsyncClient, Client

CLIENTS, CAPACITY_S, SHARE = 12, 15.0, 0.6
OUTPUT_TOKENS = 120
MOST_THREADS = 64
KINDS = ("prefill", "decode")
PATIENCE_S = 600.0
FACES = ("http", "grpc", "internal_http", "internal_grpc")
HAPROXY = """
defaults
  mode http
  timeout connect 2s
  timeout client 120s
  timeout server 120s
  option redispatch
  retries 3
frontend all
  bind 127.0.0.1:{port}
  default_backend routers
backend routers
  balance roundrobin
  option httpchk GET /ready
  default-server check inter 500ms fall 1 rise 1
{servers}
"""


SMALL = ("engine.kv_memory=128MiB", "engine.profile=off", "model.dtype=float32")
"""In bfloat16 oneDNN adds up otherwise for another number of rows, so tokens may change with what
else runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    prompt: str
    n: int = 1
    temperature: float = 0.0
    seed: int = 0

    @property
    def options(self) -> dict[str, Any]:
        return {
            "n": self.n,
            "temperature": self.temperature,
            "seed": self.seed,
            "max_tokens": OUTPUT_TOKENS,
        }


WORDS, PLACES = ("Then", "So", "Once", "Now"), ("end", "sea", "hill", "town")
PROMPTS = tuple(f"{word} it was the {place}" * 20 for word in WORDS for place in PLACES)
QUESTIONS = (
    *(Question(prompt=prompt) for prompt in PROMPTS),
    Question(prompt=PROMPTS[0], temperature=1.0, seed=7),
    Question(prompt=PROMPTS[1], n=2, temperature=1.0, seed=8),
)


@dataclass(slots=True)
class Process:
    command: list[str]
    running: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        environment = {**os.environ, "KVRELAY_LOG": "warning", "OMP_NUM_THREADS": "1"}
        self.running = await asyncio.create_subprocess_exec(
            *self.command, env=environment, stdout=asyncio.subprocess.DEVNULL
        )

    async def stop(self) -> float:
        """Seconds until it has ended; raises where it did not end well."""
        assert self.running is not None
        began_s = time.perf_counter()
        self.running.send_signal(signal.SIGTERM)
        code = await asyncio.wait_for(self.running.wait(), PATIENCE_S)
        if code:
            raise RuntimeError(f"{self.command[3:6]} ended with {code}")
        return time.perf_counter() - began_s


@dataclass(slots=True)
class Answers:
    """`longest_gap_s`: between two pieces of an answer."""

    right: Counter[str] = field(default_factory=Counter)
    wrong: Counter[str] = field(default_factory=Counter)
    failed: list[str] = field(default_factory=list)
    told: list[str] = field(default_factory=list)
    longest_gap_s: float = 0.0

    @property
    def count(self) -> int:
        return self.right.total() + self.wrong.total() + len(self.failed)

    def add(self, kind: str, question: Question, heard: Heard, expected: Said) -> None:
        self.longest_gap_s = max(self.longest_gap_s, heard.longest_gap_s)
        if heard.said.is_like(expected):
            self.right[kind] += 1
        else:
            self.wrong[kind] += 1
            self.told.append(f"{kind}: {question}: {heard.said}, not {expected}")


@dataclass(slots=True)
class Rolling:
    ports: list[dict[str, int]]
    haproxy_port: int
    routers: list[Process] = field(default_factory=list)
    workers: dict[str, Process] = field(default_factory=dict)
    left_s: list[float] = field(default_factory=list)
    _names: int = 0

    @property
    def grpc(self) -> list[str]:
        return [f"127.0.0.1:{one['grpc']}" for one in self.ports]

    def router(self, number: int) -> Process:
        one = self.ports[number]
        return Process(
            [
                *(sys.executable, "-m", "cluster", "router", "--host", "127.0.0.1"),
                *(f"--{face.replace('_', '-')}-port={one[face]}" for face in ("http", "grpc")),
                "--set=model.served_name=bundled",
                f"--set=router.internal_http_port={one['internal_http']}",
                f"--set=router.internal_grpc_port={one['internal_grpc']}",
            ]
        )

    def worker(self, role: str) -> tuple[str, Process]:
        name, self._names = f"{role}-{self._names}", self._names + 1
        joins = (f"--join=127.0.0.1:{one['internal_grpc']}" for one in self.ports)
        small = [f"--set={key}" for key in SMALL]
        command = [sys.executable, "-m", "cluster", "worker", f"--role={role}", f"--name={name}"]
        return name, Process([*command, "--device=cpu", "--cpu-threads=1", *joins, *small])

    # --- a cycle --------------------------------------------------------------------------------

    async def add(self, role: str) -> None:
        name, process = self.worker(role)
        await process.start()
        self.workers[name] = process
        await until(lambda: self._known_everywhere(name))

    async def replace(self, role: str) -> None:
        """The oldest of this role, once another one is there."""
        oldest = next(name for name in self.workers if name.startswith(role))
        await self.add(role)
        self.left_s.append(await self.workers.pop(oldest).stop())

    async def roll_router(self, number: int) -> None:
        await self.routers[number].stop()
        await self.routers[number].start()
        await until(lambda: self._is_ready(self.ports[number]["http"]))

    async def _known_everywhere(self, name: str) -> bool:
        for address in self.grpc:
            async with AsyncClient(address) as client:
                known = await client.server_info()
            if name not in {one.name for one in known.workers}:
                return False
        return True

    async def _is_ready(self, port: int) -> bool:
        async with httpx.AsyncClient() as client:
            try:
                return (await client.get(f"http://127.0.0.1:{port}/ready")).status_code == 200
            except httpx.TransportError:
                return False


async def until(holds: Callable[[], Awaitable[bool]]) -> None:
    until_s = time.monotonic() + PATIENCE_S
    while True:
        try:
            if await holds():
                return
        except Exception:
            if time.monotonic() > until_s:
                raise
        if time.monotonic() > until_s:
            raise TimeoutError("the cluster is not as it should be")
        await asyncio.sleep(0.1)


# --- clients --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """Of each choice. By `openai` only texts are known."""

    texts: tuple[str, ...]
    token_ids: tuple[tuple[int, ...], ...] = ()

    def is_like(self, expected: Said) -> bool:
        return self.texts == expected.texts and self.token_ids in ((), expected.token_ids)


@dataclass(slots=True)
class Heard:
    """One answer as it comes; `longest_gap_s`: between two pieces."""

    choices: int
    longest_gap_s: float = 0.0
    _texts: dict[int, str] = field(default_factory=dict)
    _ids: dict[int, tuple[int, ...]] = field(default_factory=dict)
    _last_s: float | None = None

    def add(self, choice: int, text: str, token_ids: Sequence[int] = ()) -> None:
        now_s = time.perf_counter()
        if self._last_s is not None:
            self.longest_gap_s = max(self.longest_gap_s, now_s - self._last_s)
        self._last_s = now_s
        self._texts[choice] = self._texts.get(choice, "") + text
        self._ids[choice] = (*self._ids.get(choice, ()), *token_ids)

    @property
    def said(self) -> Said:
        numbers = range(self.choices)
        ids = tuple(self._ids.get(i, ()) for i in numbers) if any(self._ids.values()) else ()
        return Said(texts=tuple(self._texts.get(i, "") for i in numbers), token_ids=ids)


Ask = Callable[[Question], Awaitable[Heard]]


async def by_openai(client: AsyncOpenAI, question: Question) -> Heard:
    heard = Heard(question.n)
    stream = await client.completions.create(
        model="bundled",
        prompt=question.prompt,
        stream=True,
        extra_body={"ignore_eos": True},
        **question.options,
    )
    async for chunk in stream:
        for choice in chunk.choices:
            heard.add(choice.index, choice.text)
    return heard


async def by_kvrelay(client: AsyncClient, question: Question) -> Heard:
    heard = Heard(question.n)
    async with client.stream(question.prompt, ignore_eos=True, **question.options) as stream:
        async for chunk in stream:
            heard.add(chunk.index, chunk.text, chunk.token_ids)
    return heard


def by_thread(client: Client, question: Question) -> Heard:
    heard = Heard(question.n)
    with client.stream(question.prompt, ignore_eos=True, **question.options) as stream:
        for chunk in stream:
            heard.add(chunk.index, chunk.text, chunk.token_ids)
    return heard


@dataclass(slots=True)
class Load:
    """The clients, and the questions, in turn."""

    asks: dict[str, Ask]
    expected: dict[Question, Said]
    answers: Answers = field(default_factory=Answers)
    _turns: Iterator[int] = field(default_factory=count)
    _random: Random = field(default_factory=lambda: Random(3))

    async def one(self) -> None:
        turn = next(self._turns)
        kind = [*self.asks][turn % len(self.asks)]
        question = QUESTIONS[turn // len(self.asks) % len(QUESTIONS)]
        try:
            heard = await self.asks[kind](question)
        except Exception as error:
            self.answers.failed.append(f"{kind}: {type(error).__name__}: {error}")
            return
        self.answers.add(kind, question, heard, self.expected[question])

    async def closed(self, clients: int, seconds: float) -> float:
        """Answers a second."""
        until_s = time.perf_counter() + seconds

        async def client() -> None:
            while time.perf_counter() < until_s:
                await self.one()

        await asyncio.gather(*(client() for _ in range(clients)))
        return self.answers.count / seconds

    async def open(self, rate: float, enough: asyncio.Event) -> None:
        """Until it is enough, and all have ended."""
        async with asyncio.TaskGroup() as group:
            while not enough.is_set():
                group.create_task(self.one())
                await asyncio.sleep(self._random.expovariate(rate))


# --- all of it ------------------------------------------------------------------------------------


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


@asynccontextmanager
async def cluster(folder: Path) -> AsyncIterator[Rolling]:
    numbers = free_ports(9)
    ports = [dict(zip(FACES, numbers[4 * i : 4 * i + 4], strict=True)) for i in range(2)]
    rolling = Rolling(ports, numbers[8])
    servers = [f"  server r{i} 127.0.0.1:{one['http']}" for i, one in enumerate(ports)]
    file = folder / "haproxy.cfg"
    file.write_text(HAPROXY.format(port=rolling.haproxy_port, servers="\n".join(servers)))
    haproxy = Process(["haproxy", "-q", "-f", str(file)])
    try:
        rolling.routers = [rolling.router(0), rolling.router(1)]
        for router in rolling.routers:
            await router.start()
        for port in ports:
            await until(lambda port=port: _answers(port["http"]))  # type: ignore[misc]
        await asyncio.gather(*(rolling.add(role) for role in (*KINDS, *KINDS)))
        await haproxy.start()
        await until(lambda: rolling._is_ready(rolling.haproxy_port))
        yield rolling
    finally:
        for process in (haproxy, *rolling.workers.values(), *rolling.routers):
            if process.running is not None and process.running.returncode is None:
                process.running.kill()
                await process.running.wait()


async def _answers(port: int) -> bool:
    async with httpx.AsyncClient() as client:
        return (await client.get(f"http://127.0.0.1:{port}/version")).status_code == 200


@asynccontextmanager
async def clients(rolling: Rolling) -> AsyncIterator[dict[str, Ask]]:
    """The first of them is asked for what is expected."""
    url = f"http://127.0.0.1:{rolling.haproxy_port}/v1"
    with Client(rolling.grpc) as blocking, ThreadPoolExecutor(MOST_THREADS) as threads:
        async with (
            AsyncOpenAI(base_url=url, api_key="none") as openai,
            AsyncClient(rolling.grpc) as own,
        ):
            loop = asyncio.get_running_loop()
            yield {
                "kvrelay.AsyncClient": partial(by_kvrelay, own),
                "kvrelay.Client": lambda question: loop.run_in_executor(
                    threads, by_thread, blocking, question
                ),
                "openai through haproxy": partial(by_openai, openai),
            }


async def measure(cycles: int) -> list[Row]:
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        rolling = await stack.enter_async_context(cluster(folder))
        asks = await stack.enter_async_context(clients(rolling))
        ask = asks["kvrelay.AsyncClient"]
        expected = {question: (await ask(question)).said for question in QUESTIONS}
        capacity = await Load(asks, expected).closed(CLIENTS, CAPACITY_S)
        load, enough, began_s = Load(asks, expected), asyncio.Event(), time.perf_counter()
        asking = asyncio.create_task(load.open(SHARE * capacity, enough))
        await roll(rolling, cycles)
        enough.set()
        await asking
        method = (
            f"{cycles} workers replaced, then both routers, in {time.perf_counter() - began_s:.0f} "
            f"s; {SHARE * capacity:.1f}/s, {SHARE} of the {capacity:.1f}/s of {CLIENTS} clients"
        )
        return rows(rolling, load, method)


async def roll(rolling: Rolling, cycles: int) -> None:
    for cycle in range(cycles):
        await rolling.replace(KINDS[cycle % 2])
    for number in range(len(rolling.routers)):
        await rolling.roll_router(number)


def rows(rolling: Rolling, load: Load, method: str) -> list[Row]:
    answers, left = load.answers, sorted(rolling.left_s)
    for text in [*answers.failed[:10], *answers.told[:10]]:
        print(text)
    found = [_right(kind, answers, method) for kind in load.asks]
    found.append(
        Row(
            name="a worker has left",
            value=statistics.median(left),
            unit="s",
            method=method,
            spread=f"most {left[-1]:.2f} s; longest gap of an answer {answers.longest_gap_s:.2f} s",
        )
    )
    return found


def _right(kind: str, answers: Answers, method: str) -> Row:
    failed = sum(text.startswith(f"{kind}:") for text in answers.failed)
    return Row(
        name=f"answers by {kind} that were right",
        value=answers.right[kind],
        unit="",
        against="all",
        against_value=answers.right[kind] + answers.wrong[kind] + failed,
        goal=1.0,
        method=method,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cycles", type=int, default=100)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if shutil.which("haproxy") is None:
        parser.error("haproxy is not on the PATH: install it")
    assert checkpoint_path().exists()
    found = asyncio.run(measure(options.cycles))
    print_table("rolling", found)
    if options.json:
        write_json(options.json, found)


if __name__ == "__main__":
    main()
