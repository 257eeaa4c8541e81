"""Workers and routers that are replaced one after another, under load: does any request notice?

Two routers behind haproxy, two prefill and two decode workers, plain processes, the bundled model
in float32. Clients ask all the time: the `openai` package through haproxy, and
`kvrelay.AsyncClient` with both routers' addresses. Each cycle starts one more worker, waits until
both routers know it, and tells an old one to stop (SIGTERM). At the end both routers are stopped
and started in turn. An answer has
to be the one that an undisturbed cluster gives, token by token.

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
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
from openai import AsyncOpenAI

from bench.report import Row, print_table, write_json
from engine.bundled import checkpoint_path
from kvrelay import AsyncClient

CLIENTS = 3
"""Of each kind."""
PROMPTS = tuple(
    f"{word} it was the {place}" * 20 for word in ("Then", "So") for place in ("end", "sea")
)
OUTPUT_TOKENS = 120
KINDS = ("prefill", "decode")
PATIENCE_S = 120.0
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


@dataclass(slots=True)
class Rolling:
    ports: list[dict[str, int]]
    haproxy_port: int
    routers: list[Process] = field(default_factory=list)
    workers: dict[str, Process] = field(default_factory=dict)
    answers: Answers = field(default_factory=Answers)
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

Ask = Callable[[str], Awaitable[tuple[str, float]]]
"""A prompt |-> its answer, and the longest gap in it, in seconds."""


async def by_openai(client: AsyncOpenAI, prompt: str) -> tuple[str, float]:
    stream = await client.completions.create(
        model="bundled",
        prompt=prompt,
        max_tokens=OUTPUT_TOKENS,
        temperature=0.0,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    pieces = (chunk.choices[0].text async for chunk in stream if chunk.choices)
    return await _joined(pieces)


async def by_kvrelay(client: AsyncClient, prompt: str) -> tuple[str, float]:
    async with client.stream(
        prompt, max_tokens=OUTPUT_TOKENS, temperature=0.0, ignore_eos=True
    ) as stream:
        return await _joined(chunk.text async for chunk in stream)


async def _joined(pieces: AsyncIterator[str]) -> tuple[str, float]:
    text, last_s, longest_s = "", 0.0, 0.0
    async for piece in pieces:
        now_s = time.perf_counter()
        longest_s = max(longest_s, now_s - last_s if last_s else 0.0)
        text, last_s = text + piece, now_s
    return text, longest_s


async def keep_asking(
    kind: str, ask: Ask, expected: dict[str, str], answers: Answers, enough: asyncio.Event
) -> None:
    number = 0
    while not enough.is_set():
        prompt = PROMPTS[number % len(PROMPTS)]
        number += 1
        try:
            text, gap_s = await ask(prompt)
        except Exception as error:
            answers.failed.append(f"{kind}: {type(error).__name__}: {error}")
            continue
        answers.longest_gap_s = max(answers.longest_gap_s, gap_s)
        if text == expected[prompt]:
            answers.right[kind] += 1
        else:
            answers.wrong[kind] += 1
            answers.told.append(f"{kind}: wrong: {_difference(expected[prompt], text)}")


def _difference(expected: str, text: str) -> str:
    pairs = enumerate(zip(expected, text, strict=False))
    same = next((at for at, (right, got) in pairs if right != got), len(text))
    return f"{expected!r} for the first {same} characters, then {text[same:]!r}"


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


async def measure(cycles: int) -> list[Row]:
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        rolling = await stack.enter_async_context(cluster(folder))
        openai = await stack.enter_async_context(
            AsyncOpenAI(base_url=f"http://127.0.0.1:{rolling.haproxy_port}/v1", api_key="none")
        )
        own = await stack.enter_async_context(AsyncClient(rolling.grpc))
        asks: dict[str, Ask] = {
            "openai through haproxy": lambda prompt: by_openai(openai, prompt),
            "kvrelay.AsyncClient": lambda prompt: by_kvrelay(own, prompt),
        }
        expected = {prompt: (await by_kvrelay(own, prompt))[0] for prompt in PROMPTS}
        enough = asyncio.Event()
        asking = [
            asyncio.create_task(keep_asking(kind, ask, expected, rolling.answers, enough))
            for kind, ask in asks.items()
            for _ in range(CLIENTS)
        ]
        began_s = time.perf_counter()
        for cycle in range(cycles):
            await rolling.replace(KINDS[cycle % 2])
        for number in range(len(rolling.routers)):
            await rolling.roll_router(number)
        enough.set()
        await asyncio.gather(*asking)
        return rows(rolling, cycles, time.perf_counter() - began_s, [*asks])


def rows(rolling: Rolling, cycles: int, took_s: float, kinds: Sequence[str]) -> list[Row]:
    answers = rolling.answers
    for text in [*answers.failed[:10], *answers.told[:10]]:
        print(text)
    method = f"{cycles} workers replaced, then both routers, in {took_s:.0f} s"
    found = [
        Row(
            name=f"answers by {kind} that were right",
            value=answers.right[kind],
            unit="",
            against="all",
            against_value=answers.right[kind]
            + answers.wrong[kind]
            + sum(text.startswith(kind) for text in answers.failed),
            goal=1.0,
            method=method,
        )
        for kind in kinds
    ]
    left = sorted(rolling.left_s)
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
