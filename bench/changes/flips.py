"""Workers change their roles under load: how soon they do the new work, and what streams notice.

The bundled model in float32, two prefill and two decode workers as plain processes. Roles change to
and fro, so that there is always one of each. Requests come at 0.8 of what the cluster serves with
its present roles. Each change stands until the worker's first request of the new kind, for at most
3 s. Before and after, the same without flips. When a worker did what is read from the router's
stories of its requests. All answers have the tokens of an undisturbed cluster.

    python -m bench.changes.flips
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import count
from math import exp, inf
from pathlib import Path
from random import Random
from statistics import mean, median

import grpc

from bench.access import ACCESS
from bench.report import Row, print_table, write_json
from bench.serving.http_load import Sent, send
from bench.serving.plain_cluster import HANDED_OVER, PlainCluster, WorkerPlan, plain_cluster
from cluster.process.admin import ask, flip
from engine.bundled import checkpoint_path
from kvrelay.types import Role
from kvrelay.v1.admin_pb2 import RequestStory, TraceRequestRequest
from kvrelay.v1.inference_pb2 import GetServerInfoRequest, WorkerInfo
from kvrelay.v1.inference_pb2_grpc import InferenceStub

PROMPTS, PROMPT_TOKENS, OUTPUT_TOKENS = 64, 120, 60
"""With these three prefill workers have little to do; of 600 and 30 they have more."""
CLIENTS, CAPACITY_S, SHARE = 12, 8.0, 0.8
PLANS = tuple(
    WorkerPlan(role=role, cores=(core,)) for role in ("prefill", "decode") for core in (0, 1)
)
ORDER = (
    ("decode-2", Role.PREFILL),
    ("prefill-0", Role.DECODE),
    ("decode-2", Role.DECODE),
    ("prefill-0", Role.PREFILL),
)
LEAST_S, MOST_S, POLL_S = 1.1, 3.0, 0.02
"""A role stands so long at least, so that a stream that decodes on there since before does not end
it, and at most if no request of its kind comes."""
CALM_S = 20.0
SETTINGS = ("model.dtype=float32", "engine.prefix_caching=off")
GOAL_KNOWN_S, GOAL_GAP_S = 1.0, 0.25
BEGINS = {Role.PREFILL: "prefill started", Role.DECODE: "decodes"}
"""# role |-> the moment of a request at which a worker begins with it in this role"""


@dataclass(slots=True)
class Load:
    """Requests of equal lengths. `expected`: # number of a prompt |-> its tokens undisturbed"""

    port: int
    lengths: tuple[int, int]
    rate: float = 0.0
    expected: list[tuple[int, ...]] = field(default_factory=list)
    sent: list[Sent] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    wrong: int = 0
    _random: Random = field(default_factory=lambda: Random(3))

    async def one(self) -> None:
        number = self._random.randrange(PROMPTS)
        try:
            sent = await send(self.port, prompt(number, self.lengths[0]), self.lengths[1])
        except (RuntimeError, OSError, AssertionError) as error:
            self.failed.append(str(error))
            return
        self.sent.append(sent)
        self.wrong += bool(self.expected) and sent.token_ids != self.expected[number]

    async def closed(self, clients: int, seconds: float) -> float:
        """Requests a second."""
        until_s = time.perf_counter() + seconds

        async def client() -> None:
            while time.perf_counter() < until_s:
                await self.one()

        await asyncio.gather(*(client() for _ in range(clients)))
        return len(self.sent) / seconds

    async def calm(self, seconds: float) -> None:
        enough = asyncio.Event()
        asyncio.get_running_loop().call_later(seconds, enough.set)
        await self.open(enough)

    async def open(self, enough: asyncio.Event) -> None:
        """Until it is enough, and all have ended."""
        async with asyncio.TaskGroup() as group:
            while not enough.is_set():
                group.create_task(self.one())
                await asyncio.sleep(self._random.expovariate(self.rate))


async def capacities(cluster: PlainCluster, lengths: tuple[int, int]) -> list[float]:
    """Requests a second, after each change of ORDER; the last are the roles of the start."""
    served = []
    for worker, role in ORDER:
        await asyncio.to_thread(_flip, cluster, worker, role, most_s=0)
        served.append(await Load(cluster.http_port, lengths).closed(CLIENTS, CAPACITY_S))
    return served


def prompt(number: int, tokens: int) -> list[int]:
    random = Random(number)
    return [random.randrange(3, 3000) for _ in range(tokens)]


async def undisturbed(port: int, lengths: tuple[int, int]) -> list[tuple[int, ...]]:
    asked = [prompt(number, lengths[0]) for number in range(PROMPTS)]
    return [(await send(port, one, lengths[1])).token_ids for one in asked]


def _told(cluster: PlainCluster, worker: str) -> WorkerInfo:
    with grpc.insecure_channel(f"127.0.0.1:{cluster.grpc_port}") as channel:
        info = InferenceStub(channel).GetServerInfo(GetServerInfoRequest(), timeout=9)
    return next(one for one in info.workers if one.name == worker)


@dataclass(frozen=True, slots=True, kw_only=True)
class Flip:
    """`known_s`: from the command at `at_s` until the router goes by the new role."""

    worker: str
    role: Role
    at_s: float
    known_s: float


def _flip(cluster: PlainCluster, worker: str, role: Role, *, most_s: float = MOST_S) -> Flip:
    """Returns when it has stood long enough."""
    began_s = time.perf_counter()
    flip(worker, role, cluster.internal_grpc, ACCESS)
    while (told := _told(cluster, worker)).role != role:
        time.sleep(0.001)
    one = Flip(worker=worker, role=role, at_s=began_s, known_s=time.perf_counter() - began_s)
    before = _done(told, role)
    while (stands_s := time.perf_counter() - began_s) < most_s:
        if stands_s >= LEAST_S and _done(_told(cluster, worker), role) > before:
            break
        time.sleep(POLL_S)
    return one


def _done(told: WorkerInfo, role: Role) -> int:
    """Tokens in this role."""
    counters = told.counters
    return counters.prompt_tokens if role is Role.PREFILL else counters.generated_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """`first_s`: of each flip, from the command to the first request of the new kind; MOST_S: none
    came while it stood."""

    flips: list[Flip]
    first_s: list[float]
    load: Load
    calm: Load
    rates: list[float]


async def run(cluster: PlainCluster, count: int, lengths: tuple[int, int]) -> Measured:
    port = cluster.http_port
    expected = await undisturbed(port, lengths)
    rates = [SHARE * served for served in await capacities(cluster, lengths)]
    load, calm = (Load(port, lengths, rates[-1], expected) for _ in range(2))
    enough, done = asyncio.Event(), []
    await calm.calm(CALM_S)
    asking = asyncio.create_task(load.open(enough))
    for number in range(count):
        worker, role = ORDER[number % len(ORDER)]
        load.rate = rates[number % len(ORDER)]
        done.append(await asyncio.to_thread(_flip, cluster, worker, role))
    enough.set()
    await asking
    began = await asyncio.to_thread(_began, cluster, load.sent)
    await calm.calm(CALM_S)
    first_s = [_first_s(done, number, began) for number in range(count)]
    return Measured(flips=done, first_s=first_s, load=load, calm=calm, rates=rates)


Began = tuple[float, str, str]
"""When a worker began with a request, which worker, with which moment."""


def _began(cluster: PlainCluster, sent: list[Sent]) -> list[Began]:
    return sorted(
        (one.sent_s + event.at_s, event.workers[-1], event.moment)
        for one in sent
        for story in _stories(cluster, one.request_id)
        for event in story.events
        if event.moment in BEGINS.values()
    )


def _stories(cluster: PlainCluster, request_id: str) -> Iterable[RequestStory]:
    asked = TraceRequestRequest(request_id=request_id)
    address = cluster.internal_grpc
    return ask(address, lambda stub: stub.TraceRequest, asked, ACCESS, timeout_s=9).stories


def _first_s(done: list[Flip], number: int, began: list[Began]) -> float:
    one = done[number]
    again = (later.at_s for later in done[number + 1 :] if later.worker == one.worker)
    until_s = min(one.at_s + MOST_S, next(again, inf))
    for at_s, worker, moment in began:
        if one.at_s <= at_s < until_s and (worker, moment) == (one.worker, BEGINS[one.role]):
            return at_s - one.at_s
    return MOST_S


def _p99(values: list[float]) -> float:
    return sorted(values)[int(0.99 * (len(values) - 1))]


def measure(count: int, lengths: tuple[int, int]) -> list[Row]:
    router = (*HANDED_OVER, "router.admission.policy=none")
    with plain_cluster(checkpoint_path(), PLANS, SETTINGS, router_settings=router) as cluster:
        found = asyncio.run(run(cluster, count, lengths))
    load, calm = found.load, found.calm
    known_s = [one.known_s for one in found.flips]
    gaps_s = [max(one.gaps_s) for one in load.sent]
    calm_s = [max(one.gaps_s) for one in calm.sent]
    rates = ", ".join(f"{rate:.1f}" for rate in found.rates)
    method = (
        f"{count} flips, {len(load.sent)} requests of {lengths[0]} tokens in and {lengths[1]} out "
        f"at {rates}/s, 0.8 of what each split serves"
    )
    known = Row(
        name="from the command until the router goes by it, p99",
        value=_p99(known_s),
        unit="s",
        against="goal",
        against_value=GOAL_KNOWN_S,
        goal=1.0,
        lower_is_better=True,
        method=method,
    )
    gap = Row(
        name="longest gap in a stream, p99 of the streams",
        value=_p99(gaps_s),
        unit="s",
        against="goal",
        against_value=GOAL_GAP_S,
        goal=1.0,
        lower_is_better=True,
        method=method,
        spread=f"longest {max(gaps_s):.3f}",
    )
    beside = Row(
        name="the same, by that without flips",
        value=_p99(gaps_s),
        unit="s",
        against=f"{len(calm.sent)} streams before and after",
        against_value=_p99(calm_s),
        lower_is_better=True,
        method=method,
        spread=f"longest {max(calm_s):.3f}",
    )
    failed = Row(name="requests that failed", value=len(load.failed), unit="", method=method)
    wrong = Row(
        name="answers with other tokens than undisturbed", value=load.wrong, unit="", method=method
    )
    firsts = [row for role in BEGINS for row in _first(found, role, method)]
    return [known, *firsts, gap, beside, failed, wrong]


def by_chance_s(rates: list[float], role: Role) -> float:
    """p99 of the time from a change to `role` to the worker's first request, if each request took
    one of the role's workers by chance: requests come one by one, so what is by chance is
    exponential."""
    roles = {f"{plan.role}-{number}": plan.role for number, plan in enumerate(PLANS)}
    own_rates = []
    for (worker, becomes), rate in zip(ORDER, rates, strict=True):
        roles[worker] = becomes
        if becomes is role:
            own_rates.append(rate / sum(one == role for one in roles.values()))
    waits_s = (ms / 1000 for ms in count())
    return next(s for s in waits_s if mean(exp(-one * s) for one in own_rates) <= 0.01)


def _first(found: Measured, role: Role, method: str) -> list[Row]:
    both = zip(found.flips, found.first_s, strict=True)
    first_s = [one for flip, one in both if flip.role is role]
    goal = Row(
        name=f"from the command to the first request at a new {role} worker, p99",
        value=_p99(first_s),
        unit="s",
        against="goal",
        against_value=GOAL_KNOWN_S,
        goal=1.0,
        lower_is_better=True,
        method=method,
        spread=f"{len(first_s)} flips, median {median(first_s):.3f}, longest {max(first_s):.3f}; "
        f"none within {MOST_S:g} s, and counted so: {first_s.count(MOST_S)}",
    )
    limit = Row(
        name="the same, by that of arrivals alone",
        value=_p99(first_s),
        unit="s",
        against=f"each request takes a {role} worker by chance",
        against_value=by_chance_s(found.rates, role),
        lower_is_better=True,
        method=method,
    )
    return [goal, limit]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--flips", type=int, default=200)
    parser.add_argument("--prompt-tokens", type=int, default=PROMPT_TOKENS)
    parser.add_argument("--output-tokens", type=int, default=OUTPUT_TOKENS)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = measure(options.flips, (options.prompt_tokens, options.output_tokens))
    print_table("flips", rows)
    if options.json:
        write_json(options.json, rows)


if __name__ == "__main__":
    main()
