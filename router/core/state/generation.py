"""The seam between the faces (text, HTTP, gRPC) and the dispatcher (placement, workers).

Above it a request is text; below it token ids. The dispatcher yields tokens of each choice in
index order, without duplicates, and never takes one back.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kvrelay.counters import NO_ACTIVITY, Activity, Counters
from kvrelay.errors import Refused
from kvrelay.gc_pauses import GcPauses
from kvrelay.starts import PhaseSeconds
from kvrelay.types import (
    NO_OBJECTIVES,
    TAKES_ALL,
    FinishReason,
    MemoryPart,
    Objectives,
    PromptLogprob,
    PromptRule,
    Role,
    Sampling,
    StepCoefficients,
    TokenLogprobs,
)
from kvrelay.v1.admin_pb2 import (
    GetKvResponse,
    TraceRequestResponse,
    WatchReport,
)
from kvrelay.v1.worker_pb2 import SetStateRequest, SetStateResponse
from router.core.load.histograms import Histogram
from router.core.load.offered import OfferedWork
from router.core.promises.work import ToldPromise
from router.core.state.offered import PrefilledWork
from router.core.state.quarantine import Pair


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """A validated request. Those of different `tenant`s share no cached KV. One that lost its
    router goes on behind what was `delivered`; `admitted`: that router had taken it. `promise`: any
    router has refused it and told it to come now. `is_ahead`: its prompt is the beginning of one
    that still arrives, so it is promised nothing, and nothing is learnt of it."""

    request_id: str
    prompt_ids: Sequence[int]
    sampling: Sampling
    tenant: str = ""
    qos_tier: str = ""
    objectives: Objectives = NO_OBJECTIVES
    phases_s: Mapping[str, float] = field(default_factory=dict)
    """# phase before submission (for example tokenize) |-> seconds, in order"""
    delivered: tuple[tuple[int, ...], ...] = ()
    """# choice |-> its tokens so far; empty: it begins"""
    finished: frozenset[int] = frozenset()
    admitted: bool = False
    promise: ToldPromise | None = None
    is_ahead: bool = False


class RefusedUntil(Refused):
    """With what its client may bring back."""

    def __init__(self, reason: str, message: str, *, told: ToldPromise):
        super().__init__(reason, message, retry_after_s=told.due_in_s)
        self.told = told


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceTokens:
    """Next tokens of one choice. The last one has the finish reason and may have no tokens."""

    choice: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None


class Generation(Protocol):
    """One admitted request. Closing the iterator early, or `abort`, stops all its work."""

    def __aiter__(self) -> AsyncIterator[ChoiceTokens]:
        """Raises RequestFailedError when the workers could not finish it."""

    def stop(self, choice: int, valid_tokens: int) -> None:
        """A stop string ended this choice: no more tokens of it are wanted."""

    def abort(self) -> None: ...

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens whose KV was found, not computed; known with the first token."""

    @property
    def prompt_logprobs(self) -> Sequence[PromptLogprob]:
        """Of each token of the prompt but the first, where wanted; known with the first token."""

    @property
    def capped_tokens(self) -> int | None:
        """What its max_tokens were cut to, so as to serve it; None: they weren't."""

    def ledger(self) -> dict[str, float]:
        """# phase |-> seconds, from received to the last token so far, in the order of events"""

    def prediction_errors(self) -> dict[str, float]:
        """# ttft, tpot |-> predicted by actual seconds, of those that were predicted"""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkStatus:
    """A worker's connection to the worker `peer` (its name); speed 0 until it is measured."""

    peer: str
    transport: str
    bytes_per_s: float
    latency_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStatus:
    name: str
    pool: str
    address: str
    incarnation: str
    role: str
    device: str
    transport: str
    total_blocks: int
    block_size: int
    counters: Counters
    step_times: StepCoefficients
    links: tuple[LinkStatus, ...] = ()
    cpus: str = ""
    activity: Activity = NO_ACTIVITY
    kv_token_bytes: int = 0
    start: tuple[PhaseSeconds, ...] = ()
    takes: PromptRule = TAKES_ALL
    memory: tuple[MemoryPart, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolNodeStatus:
    name: str
    orphaned_blocks: int
    blocks: Mapping[tuple[str, str], int]
    """# (tier, state) |-> blocks"""
    pauses: GcPauses = field(default_factory=GcPauses)


@dataclass(frozen=True, slots=True, kw_only=True)
class QuarantinedPair:
    """Two workers, by name, between which handoffs failed lately, so others are preferred."""

    prefill: str
    decode: str
    reason: str
    failures: int
    remaining_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TierStatus:
    """Of a QoS tier with objectives: the step that its ladder is at, and its latest latencies."""

    name: str
    step: int
    latencies_s: Mapping[tuple[str, str], float]
    """# (ttft or tpot, quantile) |-> seconds, of those known since the last step"""


@dataclass(frozen=True, slots=True, kw_only=True)
class NeedStatus:
    """Of one role, by what was offered to this router lately: `busy` workers all the time, and
    `desired` ones so that objectives are kept. `saturation`: the share of what the workers of this
    role can do. All add up over routers."""

    busy: float
    desired: Mapping[str, float]
    """# pool |-> how many of it, in this role"""
    saturation: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What the workers say about the model they serve."""

    architecture: str
    fingerprint: str
    max_model_len: int
    vocab_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectoryStatus:
    """What a router's directory knows: different blocks, an estimate of the memory that it takes,
    and blocks that were dropped since the start because it was full."""

    blocks: int
    used_bytes: int
    dropped_blocks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSnapshot:
    """What a router knows of its cluster at one moment: values that another thread may read. It is
    taken in the event loop for each scrape, so taking it copies references and little else.

    `workers` are without `links`: these are in their counters, by the peers' incarnations.
    `linked`: pairs between which KV travelled lately. `promises`: # outcome |-> how often.
    `moved_requests`: # cause |-> how many.
    """

    ready: bool
    running_requests: int
    quarantined_pairs: int
    queued_prompts: int
    moved_requests: Mapping[str, int]
    local_prefills: int
    suspected_requests: int
    poison_requests: int
    directory: DirectoryStatus
    promises: Mapping[str, int]
    workers: tuple[WorkerStatus, ...]
    linked: tuple[Pair, ...]
    pool_nodes: tuple[PoolNodeStatus, ...]
    tiers: tuple[TierStatus, ...]
    pauses: GcPauses
    offered: Mapping[str, OfferedWork]
    """# tier |-> its work"""
    hopeless: Mapping[str, int]
    """# tier |-> requests beside it that no worker could serve in time"""
    shares: Mapping[str, Histogram]
    """# ttft, tpot |-> what was predicted of offered requests over what they asked for"""
    prefilled: Mapping[str, PrefilledWork]
    """# pool |-> what its workers have begun"""
    needs: Mapping[Role, NeedStatus]
    starts: Mapping[str, Histogram]
    """# phase of a start, or whole |-> how long it took the workers that came here first"""


class Dispatcher(Protocol):
    """Admits, places and follows requests. Lives in the router's event loop."""

    async def submit(self, request: GenerationRequest) -> Generation:
        """Raises Refused (not now) or InvalidRequest (never). Returns once admitted."""

    def abort(self, request_id: str) -> None:
        """Unknown ids are ignored."""

    def appraise(self, request: GenerationRequest) -> Refused | None:
        """Why it could not be taken now; None: it could. Nothing is changed."""

    def block_size(self) -> int:
        """Tokens of a KV block; 0 until the first worker has joined."""

    def ready(self) -> bool:
        """A pair of workers, or one alone, can serve."""

    def not_ready(self) -> str | None:
        """Why none can; None: some can."""

    def workers(self) -> tuple[WorkerStatus, ...]: ...

    def snapshot(self) -> ClusterSnapshot:
        """What metrics say, to be read in another thread."""

    def quarantined(self) -> tuple[QuarantinedPair, ...]: ...

    def model(self) -> ModelFacts | None:
        """None until the first worker has said what it serves."""

    def running_requests(self) -> int: ...

    def leave(self) -> None:
        """Tells the workers that this router leaves."""

    def other_routers(self, since_s: float) -> int:
        """How many stay, as workers have told since this moment, once `leave` has reached them."""

    async def debug_kv(self) -> GetKvResponse:
        """Blocks by state, and all that is held with holder and age, of every worker and pool
        node."""

    async def set_worker(self, name: str, wanted: SetStateRequest) -> SetStateResponse:
        """Drains a worker, or gives it another role. Raises LookupError where no worker has this
        name or it doesn't answer, PeerError for a role that it can't have beside the others."""

    def watch_report(self) -> WatchReport:
        """What it knows now, for Admin.Watch."""

    def trace(self, request_id: str) -> TraceRequestResponse:
        """What happened to the requests that a client knows by this id; without stories where
        none is known."""
