"""A router core with workers, and shorthands for what they say."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.core.desired import pool_of
from engine.core.step_times import StepWork
from kvrelay.counters import Counters
from kvrelay.messages import (
    Lifetime,
    Released,
    RequestFailed,
    Reserved,
    ReserveRefused,
    Tokens,
    WorkerEvent,
    WorkerHello,
)
from kvrelay.qos import QosTier
from kvrelay.types import (
    FinishReason,
    Incarnation,
    Objectives,
    RequestKey,
    RequestSpec,
    Role,
    Sampling,
    StepCoefficients,
)
from router.core.core import RouterCore
from router.core.events import Command, Submitted, WorkerJoined, WorkerSaid
from router.core.state.demand import Demand, HeldPrefixes
from router.core.state.directory import Directory
from router.core.state.generation import ChoiceTokens, GenerationRequest
from router.core.state.worker_view import WorkerView
from router.core.workers import Workers

PROMPT = (1, 2, 3)
STEP_TIMES = StepCoefficients(
    prefill_overhead_s=0.01,
    prefill_token_s=0.001,
    prefill_pair_s=1e-6,
    prefill_sequence_s=0.002,
    decode_knots=((1, 0.01), (4, 0.02)),
    decode_kv_token_s=1e-5,
    error=0.05,
)


def hello(
    name: str,
    role: Role,
    *,
    places: int = 4,
    max_model_len: int = 64,
    handoff_by_pool: bool = False,
) -> WorkerHello:
    return WorkerHello(
        name=name,
        pool=pool_of(name),
        incarnation=Incarnation(name),
        role=role,
        device="cpu",
        transport="loopback",
        transfer_addresses=(f"loopback:{name}",),
        fingerprint="f00d",
        architecture="Llama",
        block_size=4,
        total_blocks=16,
        max_model_len=max_model_len,
        max_running_requests=places,
        prefill_chunk_tokens=8,
        mixed_chunk_tokens=8,
        vocab_size=50,
        step_times=STEP_TIMES,
        physical_format="float32/block4",
        rope_border_tokens=4096,
        kv_token_bytes=1_000_000,
        cpus="0-1",
        handoff_by_pool=handoff_by_pool,
    )


def view(name: str, role: Role, **options: int) -> WorkerView:
    return WorkerView(hello=hello(name, role, **options))


def demand(
    *,
    n: int = 1,
    prompt_tokens: int = 3,
    output_tokens: int = 8,
    ttft_s: float | None = None,
    tpot_s: float | None = None,
    waited_s: float = 0.0,
    priority: int = 0,
    tier: QosTier | None = None,
    directory: Directory | None = None,
    name: str = "r",
) -> Demand:
    asked = RequestSpec(
        key=key(name),
        prompt_ids=tuple(range(prompt_tokens)),
        sampling=Sampling(max_tokens=output_tokens, seed=1, n=n),
    )
    return Demand(
        spec=asked,
        output_tokens=output_tokens,
        held=HeldPrefixes(asked, directory or Directory()),
        objectives=Objectives(ttft_s=ttft_s, tpot_s=tpot_s),
        waited_s=waited_s,
        tier=tier or QosTier(name="default", priority=priority),
    )


def workers_of(*views: WorkerView) -> Workers:
    return Workers({view.incarnation: view for view in views})


@dataclass(frozen=True, slots=True, kw_only=True)
class PerToken:
    """ToldTimes: so long for each token of a prompt, each sequence and each token of context."""

    token_s: float = 0.0
    sequence_s: float = 0.0
    context_s: float = 0.0

    def step_s(self, work: StepWork) -> float:
        prompts_s = work.prefill_tokens * self.token_s
        return prompts_s + self.decode_s(work.decode_sequences, work.kv_tokens)

    def prefill_s(self, new_tokens: int, context_tokens: int) -> float:
        return new_tokens * self.token_s

    def prompt_s(self, tokens: int, cached: int, chunk: int) -> float:
        return (tokens - cached) * self.token_s

    def decode_s(self, sequences: int, kv_tokens: int) -> float:
        return sequences * self.sequence_s + kv_tokens * self.context_s


def core_with(*, places: int = 4, **roles: Role) -> RouterCore:
    core = RouterCore()
    for name, role in roles.items():
        core.handle(WorkerJoined(hello=hello(name, role, places=places)), 0)
    return core


def split(*, places: int = 4) -> RouterCore:
    return core_with(places=places, p=Role.PREFILL, d=Role.DECODE)


def request(name: str = "r", *, n: int = 1, max_tokens: int = 8) -> GenerationRequest:
    sampling = Sampling(max_tokens=max_tokens, seed=1, n=n)
    return GenerationRequest(request_id=name, prompt_ids=PROMPT, sampling=sampling)


def submit(core: RouterCore, name: str = "r", *, n: int = 1, now_s: float = 1) -> list[Command]:
    return core.handle(Submitted(request=request(name, n=n)), now_s)


def key(name: str = "r", attempt: int = 0) -> RequestKey:
    return RequestKey(name, attempt)


def spec(
    name: str = "r", *, attempt: int = 0, n: int = 1, emitted: tuple[int, ...] = ()
) -> RequestSpec:
    return RequestSpec(
        key=key(name, attempt),
        prompt_ids=PROMPT,
        sampling=request(name, n=n).sampling,
        qos_tier="default",
        emitted_ids=emitted,
    )


def says(
    core: RouterCore,
    worker: str,
    *events: WorkerEvent,
    now_s: float = 2,
    running: int = 0,
    draining: bool = False,
) -> list[Command]:
    counters = Counters(running=running, draining=draining)
    event = WorkerSaid(incarnation=Incarnation(worker), events=events, counters=counters)
    return core.handle(event, now_s)


def reserved(name: str = "r", attempt: int = 0) -> Reserved:
    return Reserved(key=key(name, attempt), at_s=1.5)


def refused(reason: str, name: str = "r", attempt: int = 0) -> ReserveRefused:
    return ReserveRefused(key=key(name, attempt), at_s=1.5, reason=reason)


def released(name: str = "r", attempt: int = 0) -> Released:
    return Released(key=key(name, attempt), at_s=1.5)


def failed(reason: str, name: str = "r", attempt: int = 0) -> RequestFailed:
    return RequestFailed(key=key(name, attempt), at_s=1.5, reason=reason, message="why")


def lifetime(moment: str, name: str = "r", attempt: int = 0) -> Lifetime:
    return Lifetime(key=key(name, attempt), at_s=1.5, name=moment)


def tokens(
    first_index: int,
    *ids: int,
    name: str = "r",
    attempt: int = 0,
    choice: int = 0,
    reason: FinishReason | None = None,
) -> Tokens:
    return Tokens(
        key=key(name, attempt),
        at_s=1.5,
        choice=choice,
        first_index=first_index,
        token_ids=ids,
        finish_reason=reason,
    )


def piece(*ids: int, choice: int = 0, reason: FinishReason | None = None) -> ChoiceTokens:
    return ChoiceTokens(choice=choice, token_ids=ids, finish_reason=reason)
