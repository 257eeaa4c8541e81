"""Clients: each stream is asked of the next client, and notes when its tokens came."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import count, cycle
from random import Random

from bench.chaos.prompts import Answer, Asked
from kvrelay import AsyncClient, AsyncStream
from kvrelay.errors import KvrelayError, Refused

HUNG_AFTER_S = 300.0
"""Without a token for so long a stream has failed."""
SHARED_PREFIXES = 0.5
"""This share of requests has no tenant of its own, so that what was computed is found again."""


class Outcome(StrEnum):
    LIVE = "live"
    COMPLETED = "completed"
    REFUSED = "refused"
    FAILED = "failed"


@dataclass(slots=True, kw_only=True)
class StreamRecord:
    """`came_s`: when chunks came. `router`: the one that it was asked of, or went on at."""

    number: int
    index: int
    request_id: str
    asked_s: float
    router: int = 0
    came_s: list[float] = field(default_factory=list)
    tokens: int = 0
    answer: Answer = ()
    outcome: Outcome = Outcome.LIVE
    error: str = ""
    ended_s: float = 0.0


class Clients:
    """Several, each with the routers in another order. A stream is told apart by its id."""

    def __init__(self, routers: Sequence[str], clients: int) -> None:
        self._count = len(routers)
        orders = [[*routers[i:], *routers[:i]] for i in (n % len(routers) for n in range(clients))]
        self._clients = [AsyncClient(order) for order in orders]
        self._turns = cycle(enumerate(self._clients))

    def stream(self, asked: Asked, request_id: str, tenant: str) -> tuple[AsyncStream, int]:
        """(the stream, the place of its client among them)"""
        number, client = next(self._turns)
        options = asked.options() | {"request_id": request_id, "tenant": tenant}
        return client.stream(asked.prompt_ids, **options), number

    def router_of(self, stream: AsyncStream, client: int) -> int:
        """The place of the router that it uses now."""
        return (stream._tour._at + client) % self._count

    async def close(self) -> None:
        for client in self._clients:
            await client.close()


class Load:
    def __init__(self, clients: Clients, requests: Sequence[Asked], seed: int, name: str) -> None:
        self.records: list[StreamRecord] = []
        self.requests = requests
        self._clients = clients
        self._rng = Random(seed)
        self._numbers = count()
        self._name = name
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def live(self) -> list[StreamRecord]:
        return [one for one in self.records if one.outcome is Outcome.LIVE]

    def begin(self, index: int | None = None) -> asyncio.Task[None]:
        """Another stream: this request, or any."""
        number = next(self._numbers)
        record = StreamRecord(
            number=number,
            index=self._rng.randrange(len(self.requests)) if index is None else index,
            request_id=f"{self._name}-{number}",
            asked_s=time.monotonic(),
        )
        self.records.append(record)
        task = asyncio.create_task(self._run(record))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def in_a_closed_loop(self, indexes: Iterable[int], at_once: int) -> float:
        """Requests a second, of the middle of the run."""
        waiting = iter(indexes)

        async def client() -> None:
            for index in waiting:
                await self.begin(index)

        await asyncio.gather(*(client() for _ in range(at_once)))
        return throughput(self.records, at_once)

    async def in_an_open_loop(self, rate_per_s: float, until: asyncio.Event) -> None:
        """Poisson arrivals, whatever the cluster does."""
        due_s = time.monotonic()
        while not until.is_set():
            due_s += self._rng.expovariate(rate_per_s)
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))
            self.begin()

    def fill_up(self, streams: int) -> int:
        """Begins as many as are missing to so many live ones. Returns how many."""
        missing = max(0, streams - len(self.live))
        for _ in range(missing):
            self.begin()
        return missing

    async def until_ended(self, patience_s: float) -> None:
        """What has not ended by then has failed."""
        if self._tasks:
            _, late = await asyncio.wait(self._tasks, timeout=patience_s)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)

    async def _run(self, record: StreamRecord) -> None:
        tenant = "" if self._rng.random() < SHARED_PREFIXES else f"t{record.number}"
        asked = self.requests[record.index]
        stream, client = self._clients.stream(asked, record.request_id, tenant)
        record.router = self._clients.router_of(stream, client)
        try:
            await self._follow(record, stream, client, asked.choices)
            record.outcome = Outcome.COMPLETED
        except Refused as error:
            record.outcome, record.error = Outcome.REFUSED, repr(error)
        except (KvrelayError, TimeoutError) as error:
            record.outcome, record.error = Outcome.FAILED, f"{type(error).__name__}: {error}"
        except asyncio.CancelledError:
            record.outcome, record.error = Outcome.FAILED, "it did not end"
        finally:
            record.ended_s = time.monotonic()
            stream.close()

    async def _follow(
        self, record: StreamRecord, stream: AsyncStream, client: int, choices: int
    ) -> None:
        ids: list[list[int]] = [[] for _ in range(choices)]
        texts: list[list[str]] = [[] for _ in range(choices)]
        try:
            while True:
                async with asyncio.timeout(HUNG_AFTER_S):
                    chunk = await anext(stream)
                record.came_s.append(time.monotonic())
                record.router = self._clients.router_of(stream, client)
                record.tokens += len(chunk.token_ids)
                ids[chunk.index] += chunk.token_ids
                texts[chunk.index].append(chunk.text)
        except StopAsyncIteration:
            pass
        finally:
            told = zip(ids, texts, strict=True)
            record.answer = tuple((tuple(own), "".join(text)) for own, text in told)


def throughput(records: Sequence[StreamRecord], at_once: int) -> float:
    """Requests a second while all clients had work: without the first and last `at_once` ends."""
    ends = sorted(one.ended_s for one in records if one.outcome is Outcome.COMPLETED)
    middle = ends[at_once // 2 : len(ends) - at_once] or ends
    if len(middle) < 2:
        return 0.0
    return (len(middle) - 1) / (middle[-1] - middle[0])
