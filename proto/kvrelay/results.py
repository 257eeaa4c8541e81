"""The client's results, as values. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvrelay.counters import Counters
from kvrelay.starts import PhaseSeconds
from kvrelay.types import (
    FinishReason,
    MemoryPart,
    PromptLogprob,
    StepCoefficients,
    TokenLogprobs,
)


@dataclass(frozen=True, slots=True)
class ChatMessage:
    role: str
    content: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Slo:
    """Objectives of one request: time to first token, and time per token after it. None: those of
    its tier, if any."""

    ttft_s: float | None = None
    tpot_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """New text of one choice. The last chunk of a choice has its finish reason.

    `token_ids` may run ahead of `text`, which never holds half a character. `capped_tokens`: the
    router cut max_tokens to this, to serve the request rather than refuse it. The first chunk of
    all has `prompt_logprobs`, if asked for, for each token of the prompt but the first. `tier`: the
    QoS tier that was applied.
    """

    request_id: str
    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    finish_reason: FinishReason | None
    stop_string: str | None
    stop_token_id: int | None
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    seed: int
    capped_tokens: int | None
    prompt_logprobs: tuple[PromptLogprob, ...] = ()
    tier: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    finish_reason: FinishReason
    stop_string: str | None
    stop_token_id: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Generated:
    """A whole answer. `ledger_ms` is empty unless it was asked for. The KV of `cached_tokens` of
    the prompt was found, not computed. `tier`: the QoS tier that was applied."""

    request_id: str
    choices: tuple[Choice, ...]
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    seed: int
    capped_tokens: int | None = None
    prompt_logprobs: tuple[PromptLogprob, ...] = ()
    tier: str = ""
    ledger_ms: Mapping[str, float] = field(default_factory=dict)
    """# phase |-> milliseconds, in the order of events"""

    @property
    def text(self) -> str:
        """The text of the first choice."""
        return self.choices[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The token ids of the first choice."""
        return self.choices[0].token_ids


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    model: str
    architecture: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    fingerprint: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkInfo:
    """A worker's connection to the worker `peer`; speed 0 until it is measured."""

    peer: str
    transport: str
    bytes_per_s: float
    latency_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerInfo:
    """Its steps take `step_times` multiplied by the corrections. `cpus`: its own, if it has any.

    Rates and `hit_rate` are means over about the last 10 s; `hit_rate` is None when no prompt was
    looked up. `kv_used` is the share of KV blocks that requests hold, 0 to 1. `kv_token_bytes` is
    the KV of one token. `counters` are all its counters except those of its links. `start`: the
    phases of its start, in their order. `memory`: what its device's or host's memory is for.
    """

    name: str
    address: str
    incarnation: str
    role: str
    device: str
    transport: str
    total_blocks: int
    free_blocks: int
    cached_blocks: int
    block_size: int
    running: int
    waiting: int
    step_times: StepCoefficients
    prefill_correction: float
    decode_correction: float
    links: tuple[LinkInfo, ...] = ()
    cpus: str = ""
    prompt_tokens_per_s: float = 0.0
    generated_tokens_per_s: float = 0.0
    kv_used: float = 0.0
    hit_rate: float | None = None
    transfer_bytes_per_s: float = 0.0
    kv_token_bytes: int = 0
    start: tuple[PhaseSeconds, ...] = ()
    memory: tuple[MemoryPart, ...] = ()
    counters: Counters = field(default_factory=Counters)


@dataclass(frozen=True, slots=True, kw_only=True)
class QuarantinedPair:
    """Two workers, by name, between which handoffs failed recently, so other pairs are
    preferred."""

    prefill: str
    decode: str
    reason: str
    failures: int
    remaining_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerInfo:
    version: str
    cluster: str
    uptime_s: float
    ready: bool
    running_requests: int
    workers: tuple[WorkerInfo, ...]
    quarantined: tuple[QuarantinedPair, ...] = ()
