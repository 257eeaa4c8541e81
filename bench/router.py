"""Decisions per second of the router's core, in one thread: placement and admission of requests
over many workers, a full directory and running requests.

python -m bench.router [--workers 64] [--blocks 100000] [--prompt-tokens 2048]
"""

from __future__ import annotations

import argparse
import time
from random import Random

from bench.report import Row, print_table
from kvpool.block_names import BlockNames
from kvrelay.messages import BlockChanges, Counters, LinkState, Released, Reserved, WorkerHello
from kvrelay.step_times import StepCoefficients
from kvrelay.types import Incarnation, Objectives, RequestKey, Role, Sampling, Tier
from router.core import RouterCore
from router.events import Aborted, Refuse, Send, Submitted, WorkerJoined, WorkerSaid
from router.generation import GenerationRequest
from router.policies import Policies, open_admission, open_placement

BLOCK_TOKENS = 16
GOAL_PER_S = 2_000
STEP_TIMES = StepCoefficients(
    prefill_overhead_s=0.01,
    prefill_token_s=2e-5,
    prefill_pair_s=6e-10,
    decode_knots=((1, 0.007), (64, 0.01), (256, 0.02)),
    decode_kv_token_s=3e-8,
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=64)
    parser.add_argument("--blocks", type=int, default=100_000, help="different ones")
    parser.add_argument("--prompt-tokens", type=int, default=2048)
    parser.add_argument("--requests", type=int, default=3000)
    options = parser.parse_args()
    rows = [_row(name, options) for name in ("least_loaded", "kv_aware")]
    print_table(f"the router alone, {options.workers} workers", rows)


def _row(placement: str, options: argparse.Namespace) -> Row:
    world = World(placement, options.workers, options.blocks, options.prompt_tokens)
    requests = [world.request(i) for i in range(options.requests)]
    spent_s = sum(world.decide(request) for request in requests)
    return Row(
        name=f"{placement}, predictive admission",
        value=len(requests) / spent_s,
        unit="decisions/s",
        against="goal",
        against_value=GOAL_PER_S,
        goal=1.0,
        method=f"{options.prompt_tokens} prompt tokens, {world.core.directory.entries} blocks, "
        f"{world.refused} refused",
    )


class World:
    def __init__(self, placement: str, workers: int, blocks: int, prompt_tokens: int) -> None:
        self._random = Random(1)
        policies = Policies(placement=placement)
        self.core = RouterCore(
            placing=open_placement(policies, self._random), admitting=open_admission(policies)
        )
        self.refused = 0
        self._running: list[tuple[Incarnation, RequestKey]] = []
        self._now_s = 0.0
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
        links = tuple(
            LinkState(peer=Incarnation(f"w{i}"), transport="t", bytes_per_s=5e10, latency_s=1e-5)
            for i in range(workers)
            if i != number
        )
        said = WorkerSaid(incarnation=name, events=(), counters=Counters(links=links))
        self.core.handle(said, 0)

    def _store(self, holder: Incarnation, prompt: tuple[int, ...]) -> None:
        names = BlockNames(fingerprint="f", physical_format="p")
        stored = tuple(names.chain("", len(prompt), BLOCK_TOKENS).walk(prompt, len(prompt)))
        changes = BlockChanges(holder=Incarnation(""), tier=Tier.DEVICE, stored=stored)
        said = WorkerSaid(incarnation=holder, events=(), counters=Counters(), blocks=(changes,))
        self.core.handle(said, 0)

    def request(self, number: int) -> GenerationRequest:
        return GenerationRequest(
            request_id=str(number),
            prompt_ids=self._random.choice(self._prompts),
            sampling=Sampling(max_tokens=200, seed=1),
            objectives=Objectives(ttft_s=5.0, tpot_s=0.05),
        )

    def decide(self, request: GenerationRequest) -> float:
        """Seconds from submission to the order for the prefill worker, or the refusal."""
        self._now_s += 0.005
        began_s = time.thread_time()
        (command,) = self.core.handle(Submitted(request=request), self._now_s)
        if isinstance(command, Refuse):
            self.refused += 1
            return time.thread_time() - began_s
        assert isinstance(command, Send)
        key = self.core.requests[request.request_id].key
        reserved = Reserved(key=key, at_s=self._now_s)
        said = WorkerSaid(incarnation=command.worker, events=(reserved,), counters=Counters())
        self.core.handle(said, self._now_s)
        spent_s = time.thread_time() - began_s
        self._running.append((command.worker, key))
        self._end_some()
        return spent_s

    def _end_some(self) -> None:
        """Some 1,000 requests run at a time."""
        while len(self._running) > 1000:
            worker, key = self._running.pop(0)
            self.core.handle(Aborted(request_id=key.request_id), self._now_s)
            for one in self.core.workers:
                event = Released(key=key, at_s=self._now_s)
                if one == worker or key in self.core.workers[one].queue:
                    said = WorkerSaid(incarnation=one, events=(event,), counters=Counters())
                    self.core.handle(said, self._now_s)


def _hello(name: Incarnation, role: Role) -> WorkerHello:
    return WorkerHello(
        name=name,
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
        max_running_requests=256,
        prefill_chunk_tokens=8192,
        vocab_size=50_000,
        physical_format="p",
        step_times=STEP_TIMES,
        kv_token_bytes=131_072,
    )


if __name__ == "__main__":
    main()
