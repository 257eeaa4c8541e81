"""An in-memory Dispatcher: scripted tokens, gates at its moments, a record of what was asked."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf

from kvrelay.counters import Counters
from kvrelay.errors import KvrelayError, Refused
from kvrelay.gc_pauses import GcPauses
from kvrelay.types import FinishReason, PromptLogprob, PromptRule, Role, TokenLogprobs
from kvrelay.v1.admin_pb2 import (
    GetKvResponse,
    TraceRequestResponse,
    WatchReport,
)
from kvrelay.v1.worker_pb2 import DebugKvResponse, SetStateRequest, SetStateResponse
from router.core.load.histograms import Histogram
from router.core.load.offered import OfferedWork
from router.core.state.generation import (
    ChoiceTokens,
    ClusterSnapshot,
    DirectoryStatus,
    GenerationRequest,
    ModelFacts,
    NeedStatus,
    PoolNodeStatus,
    QuarantinedPair,
    TierStatus,
    WorkerStatus,
)
from router.core.state.offered import PrefilledWork
from tests.unit.router_kit import STEP_TIMES

Script = Callable[[GenerationRequest, int], Sequence[int]]
"""(request, choice) |-> the tokens the model would say"""

FACTS = ModelFacts(
    architecture="LlamaForCausalLM", fingerprint="f00d", max_model_len=512, vocab_size=3072
)

WORKER = WorkerStatus(
    name="both-0",
    pool="both",
    address="127.0.0.1:1",
    incarnation="abc",
    role="both",
    device="cpu",
    transport="loopback",
    total_blocks=100,
    block_size=16,
    counters=Counters(free_blocks=75),
    step_times=STEP_TIMES,
    takes=PromptRule(min_prompt_tokens=5),
)


def echo(request: GenerationRequest, choice: int) -> Sequence[int]:
    """Says the prompt again, without its first token (the model's begin token)."""
    return request.prompt_ids[1:]


@dataclass
class FakeGeneration:
    owner: FakeDispatcher
    request: GenerationRequest
    stopped: dict[int, int] = field(default_factory=dict)
    aborted: asyncio.Event = field(default_factory=asyncio.Event)
    go_on: asyncio.Event = field(default_factory=asyncio.Event)

    async def __aiter__(self) -> AsyncIterator[ChoiceTokens]:
        try:
            await self.owner.moment("first_token", self.go_on)
            self.owner.fail_if_due(0)
            said = {c: self._spoken(c) for c in range(self.request.sampling.n)}
            if not self.request.sampling.max_tokens:
                for choice in said:
                    yield ChoiceTokens(
                        choice=choice, token_ids=(), finish_reason=FinishReason.LENGTH
                    )
                return
            for index in range(max(len(tokens) for tokens in said.values())):
                if index == 1:
                    await self.owner.moment("second_token", self.go_on)
                if self.aborted.is_set():
                    return
                for choice, tokens in said.items():
                    if index < len(tokens) and choice not in self.stopped:
                        yield self._step(choice, tokens, index)
                await asyncio.sleep(0)
                self.owner.fail_if_due(index + 1)
        finally:
            self.owner.running.pop(self.request.request_id, None)

    def _spoken(self, choice: int) -> list[int]:
        return list(self.owner.script(self.request, choice))[: self.request.sampling.max_tokens]

    def _step(self, choice: int, tokens: list[int], index: int) -> ChoiceTokens:
        token_id = tokens[index]
        stops = token_id in self.request.sampling.stop_token_ids
        if stops:
            del tokens[index + 1 :]
        last = index + 1 == len(tokens)
        limit = index + 1 == self.request.sampling.max_tokens
        reason = FinishReason.LENGTH if limit and not stops else FinishReason.STOP
        self.owner.yielded_tokens += 1
        return ChoiceTokens(
            choice=choice,
            token_ids=(token_id,),
            logprobs=self._logprobs(token_id),
            finish_reason=reason if last else None,
            stop_token_id=token_id if stops else None,
        )

    def _logprobs(self, token_id: int) -> tuple[TokenLogprobs, ...]:
        count = self.request.sampling.logprobs
        if count is None:
            return ()
        best = tuple((token_id + i, -0.5 - i) for i in range(count))
        return (TokenLogprobs(token_id, -0.5, best),)

    def stop(self, choice: int, valid_tokens: int) -> None:
        self.stopped[choice] = valid_tokens

    def abort(self) -> None:
        self.owner.abort(self.request.request_id)

    @property
    def cached_tokens(self) -> int:
        return self.owner.cached_tokens

    @property
    def prompt_logprobs(self) -> Sequence[PromptLogprob]:
        """Each token of the prompt is the second best."""
        top = self.request.sampling.prompt_logprobs
        if top is None:
            return ()
        return [
            PromptLogprob(i, -1.0, 2, ((i + 1, -0.25), (i, -1.0), (i + 2, -2.0))[:top])
            for i in self.request.prompt_ids[1:]
        ]

    @property
    def capped_tokens(self) -> int | None:
        return self.owner.capped_tokens

    def prediction_errors(self) -> dict[str, float]:
        return self.owner.prediction_errors

    def ledger(self) -> dict[str, float]:
        return {**self.request.phases_s, "prefill": 0.001, "decode": 0.002}


@dataclass
class FakeDispatcher:
    """`moment_reached[name]` is set when a request gets there; it goes on if `gates` lacks it."""

    script: Script = echo
    facts: ModelFacts | None = FACTS
    statuses: tuple[WorkerStatus, ...] = (WORKER,)
    prediction_errors: dict[str, float] = field(default_factory=dict)
    pools: tuple[PoolNodeStatus, ...] = ()
    pairs: tuple[QuarantinedPair, ...] = ()
    is_ready: bool = True
    others: int = 0
    asked_for_others: int = 0
    has_left: bool = False
    refusal: KvrelayError | None = None
    refusals_left: int = -1
    appraised: Refused | None = None
    failure: KvrelayError | Exception | None = None
    fail_after_tokens: int = -1
    gates: set[str] = field(default_factory=set)
    cached_tokens: int = 0
    capped_tokens: int | None = None
    tier_statuses: tuple[TierStatus, ...] = ()
    pauses: GcPauses = field(default_factory=GcPauses)
    starts: Mapping[str, Histogram] = field(default_factory=dict)
    shares: Mapping[str, Histogram] = field(
        default_factory=lambda: {"ttft": Histogram(counts={0.5: 1, inf: 0}, sum=0.4)}
    )
    yielded_tokens: int = 0
    requests: list[GenerationRequest] = field(default_factory=list)
    generations: list[FakeGeneration] = field(default_factory=list)
    running: dict[str, FakeGeneration] = field(default_factory=dict)
    aborted: asyncio.Queue[str] = field(default_factory=asyncio.Queue)
    reached: asyncio.Queue[str] = field(default_factory=asyncio.Queue)

    async def moment(self, name: str, opens: asyncio.Event) -> None:
        if name in self.gates:
            self.reached.put_nowait(name)
            await opens.wait()

    def fail_if_due(self, tokens: int) -> None:
        if tokens == self.fail_after_tokens:
            assert self.failure is not None
            raise self.failure

    async def submit(self, request: GenerationRequest) -> FakeGeneration:
        self.requests.append(request)
        if self.refusal is not None and self.refusals_left:
            self.refusals_left -= 1
            raise self.refusal
        try:
            await self.moment("submit", asyncio.Event())
        except asyncio.CancelledError:
            self.aborted.put_nowait(request.request_id)
            raise
        generation = FakeGeneration(self, request)
        self.generations.append(generation)
        self.running[request.request_id] = generation
        return generation

    def abort(self, request_id: str) -> None:
        generation = self.running.pop(request_id, None)
        if generation is not None:
            generation.aborted.set()
            generation.go_on.set()
        self.aborted.put_nowait(request_id)

    def appraise(self, request: GenerationRequest) -> Refused | None:
        return self.appraised

    def block_size(self) -> int:
        return self.statuses[0].block_size

    def ready(self) -> bool:
        return self.is_ready

    def not_ready(self) -> str | None:
        return None if self.is_ready else "no worker has joined yet"

    def workers(self) -> tuple[WorkerStatus, ...]:
        return self.statuses

    def snapshot(self) -> ClusterSnapshot:
        return ClusterSnapshot(
            ready=self.is_ready,
            running_requests=len(self.running),
            quarantined_pairs=len(self.pairs),
            queued_prompts=2,
            moved_requests={"leaving": 6, "hot_spot": 2},
            local_prefills=3,
            suspected_requests=4,
            poison_requests=1,
            directory=DirectoryStatus(blocks=40, used_bytes=9000, dropped_blocks=7),
            promises={"kept": 2, "broken": 1, "expired": 0},
            workers=self.statuses,
            linked=(),
            pool_nodes=self.pools,
            tiers=self.tier_statuses,
            pauses=self.pauses,
            offered={"gold": OfferedWork(requests=5, prompt_tokens=700, output_tokens=90)},
            hopeless={"gold": 6},
            prefilled={"cpu": PrefilledWork(prompts=3, tokens=20_000)},
            needs={Role.DECODE: NeedStatus(busy=1.5, desired={"both": 2.0}, saturation=0.5)},
            starts=self.starts,
            shares=self.shares,
        )

    def quarantined(self) -> tuple[QuarantinedPair, ...]:
        return self.pairs

    def model(self) -> ModelFacts | None:
        return self.facts

    def running_requests(self) -> int:
        return len(self.running)

    def leave(self) -> None:
        self.has_left = True

    def other_routers(self, since_s: float) -> int:
        self.asked_for_others += 1
        return self.others

    def watch_report(self) -> WatchReport:
        return WatchReport(open_requests=len(self.running))

    def trace(self, request_id: str) -> TraceRequestResponse:
        return TraceRequestResponse()

    async def set_worker(self, name: str, wanted: SetStateRequest) -> SetStateResponse:
        if all(worker.name != name for worker in self.statuses):
            raise LookupError(f"no worker is named {name}")
        return SetStateResponse(role=wanted.role, role_epoch=1)

    async def debug_kv(self) -> GetKvResponse:
        workers = [
            DebugKvResponse(worker=w.name, total_blocks=w.total_blocks) for w in self.statuses
        ]
        return GetKvResponse(workers=workers)
