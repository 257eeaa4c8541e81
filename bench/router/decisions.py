"""What decisions cost the router's core, in one thread, when the cluster is full.

Half of the workers decode, each with nearly all of its slots taken. Requests of three tiers come,
none like another; how long outputs are is learnt, and many clients were told to come back.

python -m bench.router.decisions [--workers 64] [--running 250] [--promises 50000]
    [--prompt-tokens 2048]
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import NamedTuple

from bench.report import Row, print_table
from kvpool.core.layout.block_names import BlockNames
from kvrelay.counters import Counters, LinkState, TierLoad
from kvrelay.messages import (
    BlockChanges,
    Released,
    Reserved,
    StoredRun,
    Tokens,
    WorkerEvent,
    WorkerHello,
)
from kvrelay.qos import QosTier, QosTiers
from kvrelay.types import (
    NO_OBJECTIVES,
    FinishReason,
    Incarnation,
    Objectives,
    RequestKey,
    Role,
    Sampling,
    StepCoefficients,
    Tier,
)
from router.core.core import RouterCore
from router.core.events import Refuse, Send, Submitted, WorkerJoined, WorkerSaid
from router.core.policy.choice import Policies
from router.core.promises.work import Promised
from router.core.router_state import RouterState
from router.core.start import open_admission, open_placement
from router.core.state.generation import GenerationRequest

BLOCK_TOKENS = 16
SLOTS = 256
GOAL_PER_S = 2_000
GOAL_REFUSAL_P99_MS = 0.5
STEP_TIMES = StepCoefficients(
    prefill_overhead_s=0.01,
    prefill_token_s=2e-5,
    prefill_pair_s=6e-10,
    decode_knots=((1, 0.007), (64, 0.01), (256, 0.02)),
    decode_kv_token_s=3e-8,
)
TIERS = QosTiers(
    tiers=(
        QosTier(name="premium", share=0.1, objectives=Objectives(ttft_s=2.0, tpot_s=0.05)),
        QosTier(
            name="standard",
            priority=1,
            share=0.3,
            objectives=Objectives(ttft_s=5.0, tpot_s=0.04),
            capped_tokens=256,
        ),
        QosTier(
            name="free",
            priority=2,
            objectives=Objectives(ttft_s=10.0, tpot_s=0.045),
            capped_tokens=128,
        ),
    ),
    default="free",
)
PREMIUM_SHARE, STANDARD_SHARE = 0.05, 0.35
"""Of the requests that come; the rest names no tier."""
MAX_TOKENS = 2_000
STEP_S = 0.035
"""Between two tokens of a sequence."""
FILL_S, MOVE_S = 0.0025, 0.0005
"""Between two requests, while the workers fill up and afterwards."""
ENDED = 8
"""Sequences of each decode worker: by them it is known how long outputs are."""
PATIENT = Objectives(ttft_s=1e3, tpot_s=0.06)
PROMISED_WITHIN_S = 30.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=64)
    parser.add_argument("--running", type=int, default=250, help="on each decode worker")
    parser.add_argument("--promises", type=int, default=50_000)
    parser.add_argument("--blocks", type=int, default=100_000, help="different ones")
    parser.add_argument("--prompt-tokens", type=int, default=2048)
    parser.add_argument("--requests", type=int, default=4000)
    options = parser.parse_args()
    rows = [row for name in ("kv_aware", "least_loaded") for row in _rows(name, options)]
    print_table(
        f"the router alone, {options.workers} workers, {options.running} of {SLOTS} slots taken on "
        f"each decode worker, {options.promises} promises open",
        rows,
    )


def _rows(placement: str, options: argparse.Namespace) -> list[Row]:
    gc.collect()  # the world before
    world = World(placement, options.workers, options.blocks, options.prompt_tokens)
    world.fill(options.running)
    world.promise(options.promises)
    spent = Spent()
    for number in range(options.requests):
        world.decide(world.request(str(number)), spent)
    held, promises = world.core.state.directory.blocks, len(world.core.state.promises)
    method = f"CPU time of {options.requests} requests of {options.prompt_tokens} tokens, {held} "
    return spent.rows(placement, f"{method}blocks known, {promises} promises left")


@dataclass(slots=True)
class Spent:
    """Seconds of each decision."""

    refused_s: list[float] = field(default_factory=list)
    admitted_s: list[float] = field(default_factory=list)

    def rows(self, placement: str, method: str) -> list[Row]:
        rows = [self._rate(placement, method)]
        for name, seconds in (("refusal", self.refused_s), ("admission", self.admitted_s)):
            if len(seconds) > 1:
                rows += [_at_most(f"{placement}, one {name}", seconds, share) for share in (50, 99)]
        return rows

    def _rate(self, placement: str, method: str) -> Row:
        both = [*self.refused_s, *self.admitted_s]
        return Row(
            name=f"{placement}, {len(self.refused_s)} refused, {len(self.admitted_s)} admitted",
            value=len(both) / sum(both),
            unit="decisions/s",
            against="goal",
            against_value=GOAL_PER_S,
            goal=1.0,
            method=method,
        )


def _at_most(name: str, seconds: Sequence[float], percent: int) -> Row:
    bound = percent == 99 and "refusal" in name
    return Row(
        name=f"{name}, p{percent}",
        value=statistics.quantiles(seconds, n=100)[percent - 1] * 1e3,
        unit="ms",
        against="goal" if bound else "",
        against_value=GOAL_REFUSAL_P99_MS if bound else None,
        goal=1.0 if bound else None,
        lower_is_better=True,
    )


class Running(NamedTuple):
    """A sequence on a decode worker."""

    key: RequestKey
    tier: str
    since_s: float


class World:
    """A router core, and what its workers tell it. The same seed gives the same decisions."""

    def __init__(self, placement: str, workers: int, blocks: int, prompt_tokens: int) -> None:
        self._random = Random(1)
        policies = Policies(placement=placement)
        state = RouterState(
            placing=open_placement(policies, self._random),
            admitting=open_admission(policies),
            tiers=TIERS,
        )
        self.core = RouterCore(state)
        self._now_s = 0.0
        self._strands = 0
        self._links: dict[Incarnation, tuple[LinkState, ...]] = {}
        self._running: dict[Incarnation, list[Running]] = {}
        own_blocks = (prompt_tokens - prompt_tokens // 2) // BLOCK_TOKENS
        self._prompts = [self._prompt(prompt_tokens) for _ in range(-(-blocks // own_blocks))]
        for i in range(workers):
            self._join(i, Role.PREFILL if i % 2 else Role.DECODE, workers)
        for i, prompt in enumerate(self._prompts):
            self._store(Incarnation(f"w{i % workers}"), prompt)

    def _prompt(self, tokens: int) -> tuple[int, ...]:
        """All begin with the same half."""
        fixed = range(tokens // 2)
        return (*fixed, *(self._random.randrange(50_000) for _ in range(tokens - len(fixed))))

    def _join(self, number: int, role: Role, workers: int) -> None:
        name = Incarnation(f"w{number}")
        self.core.handle(WorkerJoined(hello=_hello(name, role)), 0)
        self._links[name] = tuple(
            LinkState(peer=Incarnation(f"w{i}"), transport="t", bytes_per_s=5e10, latency_s=1e-5)
            for i in range(workers)
            if i != number
        )
        if role is Role.DECODE:
            self._running[name] = []
        self._report(name)

    def _report(self, worker: Incarnation, *events: WorkerEvent) -> None:
        counters = self._counters(worker)
        self.core.handle(
            WorkerSaid(incarnation=worker, events=events, counters=counters), self._now_s
        )

    def _counters(self, worker: Incarnation) -> Counters:
        running, links = self._running.get(worker), self._links[worker]
        if running is None:
            return Counters(links=links)
        outlook, sequences = self.core.state.workers[worker].outlook, len(running)
        tiers = [one.tier for one in running]
        loads = (TierLoad(tier=t.name, running=tiers.count(t.name), waiting=0) for t in TIERS.tiers)
        return Counters(
            running=sequences,
            decode_sequences=sequences,
            decode_kv_tokens=outlook.kv_tokens,
            active_blocks=outlook.kv_tokens // BLOCK_TOKENS,
            links=links,
            tiers=tuple(loads),
        )

    def _store(self, holder: Incarnation, prompt: tuple[int, ...]) -> None:
        names = BlockNames(fingerprint="f", physical_format="p")
        chain = names.chain("", len(prompt), BLOCK_TOKENS)
        chain.extend(prompt, len(prompt))
        self._strands += 1
        run = StoredRun(
            number=self._strands, parent=0, start=0, hashes=chain.full(len(prompt)).packed_from(0)
        )
        changes = BlockChanges(tier=Tier.DEVICE, stored=(run,))
        said = WorkerSaid(incarnation=holder, events=(), counters=Counters(), blocks=(changes,))
        self.core.handle(said, 0)

    # --- the state ------------------------------------------------------------------------------

    def fill(self, running: int) -> None:
        """With requests that ask for little, until every decode worker has so many sequences."""
        for _ in range(running * len(self._running)):
            self._take_one(FILL_S)
        for worker, there in self._running.items():
            assert len(there) == running, f"{worker} has {len(there)} sequences"
            self._report(worker, *(self._progress(one) for one in there))
        for worker in self._running:
            for _ in range(ENDED):
                self._end_one(worker)
                self._take_one(MOVE_S)

    def _take_one(self, after_s: float) -> None:
        self._now_s += after_s
        request = self.request(f"filled {self._now_s}", PATIENT)
        commands = self.core.handle(Submitted(request=request), self._now_s)
        assert isinstance(commands[0], Send), commands
        self.core.handle(self._reserved(request, commands[0].worker), self._now_s)
        self._joined(request, commands[0].worker)

    def promise(self, promises: int) -> None:
        """To clients that come back in half of the cases."""
        work = Promised(prefill_s=0.06, sequences=1, kv_tokens=2_300)
        made = self.core.state.promises
        for number in range(promises):
            due_in_s = self._random.uniform(0.1, PROMISED_WITHIN_S)
            made.make(number, work, due_in_s, self._now_s, self._random.choice((1, 2)))
        for claimed in (True, False) * 20:
            made.claims.first.learn(claimed)

    def request(self, name: str, objectives: Objectives = NO_OBJECTIVES) -> GenerationRequest:
        """Like no other; some of its prompt, at least the half that all share, is known."""
        known = self._random.choice(self._prompts)
        same = self._random.randrange(len(known) // 2, len(known))
        drawn = self._random.random()
        tier = "premium" if drawn < PREMIUM_SHARE else ""
        if not tier and drawn < PREMIUM_SHARE + STANDARD_SHARE:
            tier = "standard"
        return GenerationRequest(
            request_id=name,
            prompt_ids=(*known[:same], *self._random.choices(range(50_000), k=len(known) - same)),
            sampling=Sampling(max_tokens=MAX_TOKENS, seed=1),
            objectives=objectives,
            qos_tier=tier,
        )

    # --- what is measured -----------------------------------------------------------------------

    def decide(self, request: GenerationRequest, spent: Spent) -> None:
        """Until it is refused, or the prefill worker is told to begin."""
        self._now_s += MOVE_S
        began_s = time.thread_time()
        commands = self.core.handle(Submitted(request=request), self._now_s)
        if isinstance(commands[0], Refuse):
            spent.refused_s.append(time.thread_time() - began_s)
            return
        assert isinstance(commands[0], Send)
        worker = commands[0].worker
        reserved = self._reserved(request, worker)
        self.core.handle(reserved, self._now_s)
        spent.admitted_s.append(time.thread_time() - began_s)
        self._joined(request, worker)
        self._end_one(worker)

    def _reserved(self, request: GenerationRequest, worker: Incarnation) -> WorkerSaid:
        key = self.core.state.requests[request.request_id].key
        reserved = Reserved(key=key, at_s=self._now_s)
        counters = self.core.state.workers[worker].counters
        return WorkerSaid(incarnation=worker, events=(reserved,), counters=counters)

    def _joined(self, request: GenerationRequest, worker: Incarnation) -> None:
        key = self.core.state.requests[request.request_id].key
        one = Running(key, request.qos_tier or TIERS.default, self._now_s)
        self._running[worker].append(one)
        self._report(worker, self._progress(one))

    def _end_one(self, worker: Incarnation) -> None:
        there = self._running[worker]
        one = there.pop(self._random.randrange(len(there)))
        last = self._progress(one, FinishReason.STOP)
        self._report(worker, last, Released(key=one.key, at_s=self._now_s))

    def _progress(self, one: Running, reason: FinishReason | None = None) -> Tokens:
        """As many tokens as there were steps."""
        known = self.core.state.requests[one.key.request_id].choices[0].next_index
        tokens = 1 + int((self._now_s - one.since_s) / STEP_S)
        return Tokens(
            key=one.key,
            at_s=self._now_s,
            choice=0,
            first_index=known,
            token_ids=(5,) * max(1, tokens - known),
            finish_reason=reason,
            stop_token_id=None if reason is None else 5,
        )


def _hello(name: Incarnation, role: Role) -> WorkerHello:
    return WorkerHello(
        name=name,
        pool=role,
        incarnation=name,
        role=role,
        device="cuda",
        transport="t",
        transfer_addresses=(f"t:{name}",),
        fingerprint="f",
        architecture="Llama",
        block_size=BLOCK_TOKENS,
        total_blocks=50_000,
        max_model_len=32_768,
        max_running_requests=SLOTS,
        prefill_chunk_tokens=8192,
        mixed_chunk_tokens=8192,
        vocab_size=50_000,
        physical_format="p",
        step_times=STEP_TIMES,
        kv_token_bytes=131_072,
    )


if __name__ == "__main__":
    main()
