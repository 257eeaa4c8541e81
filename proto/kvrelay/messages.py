"""Messages between routers and workers, as values, and what a worker did lately. Pure.

`wire.py` turns them into protobuf. Times are the sender's clock; only ages cross the wire.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from enum import StrEnum

from kvrelay.starts import PhaseSeconds
from kvrelay.types import (
    FinishReason,
    Incarnation,
    PrefixOrigin,
    PromptLogprob,
    RequestKey,
    RequestSpec,
    Role,
    StepCoefficients,
    Tier,
    TokenLogprobs,
    value,
)

# --- router -> worker ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixSource:
    """A worker, or the pool node of another host, that seems to have the KV of the prompt's first
    `blocks` blocks, or will have it when the prompt is computed."""

    peer: Incarnation
    addresses: tuple[str, ...]
    blocks: int
    is_pool_node: bool = False


@value
class Reserve:
    """To the decode worker: hold blocks until the KV arrives from `source`. None: from whoever
    comes with it first, as long as the router that asks is here. The router has judged its pace,
    and what of so many sequences will be there by then (`counted`), or promises none, however many
    there are; None: it has not. Where handoffs go through the pool, the worker fetches the KV from
    `prefix_source`, unless its host's pool node has as much. A `displaced` request was admitted
    before and has lost its worker: lower tiers make room for it."""

    spec: RequestSpec
    source: Incarnation | None
    counted: int | None = None
    prefix_source: PrefixSource | None = None
    displaced: bool = False


@value
class Prefill:
    """To the prefill worker: compute the KV, sample the next token of each choice, hand over all
    but the first `held_tokens` tokens' KV, which the target has cached. `prefix_source` has more
    of it than the prefill worker itself. Its first token is due `within_s` of now.

    Without a target no token is wanted: nothing is handed over, and the worker says Reserved at
    once. As attempt `leaves` it has decoded at this worker, which ends that first; one that drains
    takes it too. The last `since` tokens that each choice has `resumed` were emitted after its
    target was asked, which hears of them with the commit; empty: there are none."""

    spec: RequestSpec
    target_addresses: tuple[str, ...]
    target: Incarnation | None
    held_tokens: int = 0
    prefix_source: PrefixSource | None = None
    within_s: float | None = None
    leaves: int | None = None
    since: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Generate:
    """To a worker that decodes: prefill here too. `prefix_source` has more of the KV than the
    worker itself. Its first token is due `within_s` of now. `displaced` as in Reserve."""

    spec: RequestSpec
    prefix_source: PrefixSource | None = None
    within_s: float | None = None
    displaced: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Preload:
    """To a worker that prefills: compute the prompt's KV and keep it. Said again, it changes
    nothing."""

    spec: RequestSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Abort:
    key: RequestKey


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """A stop string was found: only the first `valid_tokens` of this choice count."""

    key: RequestKey
    choice: int
    valid_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspect:
    """Another worker is silent: drop the connections to it, and take back the slabs that it
    holds."""

    incarnation: Incarnation


ToWorker = Reserve | Prefill | Generate | Preload | Abort | Stop | Suspect


# --- worker -> router ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerHello:
    """`prefill_chunk_tokens`: of a prompt in a step; `mixed_chunk_tokens`: while it is a decode
    worker. `physical_format` and `rope_border_tokens`, with the fingerprint, name its blocks;
    `kv_token_bytes` is the KV of one token; `cpus`, such as 0-3, are its own, if it has any.
    `handoff_by_pool`: prompts that are computed elsewhere come to it through the pool. When it has
    died, the process at `witness` tells how, to those who have the key. `start`: the phases of its
    start; the first router that hears of it (`is_new`) counts them."""

    name: str
    incarnation: Incarnation
    role: Role
    device: str
    transport: str
    transfer_addresses: tuple[str, ...]
    fingerprint: str
    architecture: str
    block_size: int
    total_blocks: int
    max_model_len: int
    max_running_requests: int
    prefill_chunk_tokens: int
    mixed_chunk_tokens: int
    vocab_size: int
    step_times: StepCoefficients
    physical_format: str = ""
    rope_border_tokens: int | None = None
    kv_token_bytes: int = 0
    cpus: str = ""
    handoff_by_pool: bool = False
    witness: str = ""
    witness_key: str = ""
    start: tuple[PhaseSeconds, ...] = ()
    is_new: bool = False


@value
class Reserved:
    """`held_tokens`: the KV of so many first tokens is cached here."""

    key: RequestKey
    at_s: float
    held_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReserveRefused:
    key: RequestKey
    at_s: float
    reason: str


class LifetimeMoment(StrEnum):
    """Named moments of a request, at a worker (`Lifetime.name`) or at the router."""

    PLACED = "placed"
    RESERVED = "reserved"
    DISPATCHED = "dispatched"
    PREFILL_RECEIVED = "prefill_received"
    PREFILL_STARTED = "prefill_started"
    PREFILL_CHUNK = "prefill_chunk"
    FIRST_TOKEN = "first_token"
    FIRST_TOKEN_RECEIVED = "first_token_received"
    HANDOFF_COMMITTED = "handoff_committed"
    KV_CHECKED = "kv_checked"
    DECODE_JOINED = "decode_joined"
    LAST_TOKEN = "last_token"
    LAST_TOKEN_RECEIVED = "last_token_received"


@value
class Lifetime:
    """A LifetimeMoment: prefill_received, prefill_started (`tokens` found cached or fetched, of a
    PrefixOrigin `source`), prefill_chunk (`tokens` computed), handoff_committed, kv_checked (the
    canary passed), decode_joined."""

    key: RequestKey
    at_s: float
    name: str
    tokens: int = 0
    source: str = ""


@value
class Tokens:
    """Consecutive tokens of one choice. `finish_reason` only on the choice's last message, with for
    how long it stood back for others while it decoded."""

    key: RequestKey
    at_s: float
    choice: int
    first_index: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    stood_back_s: float = 0.0


@value
class PromptLogprobs:
    """Of consecutive tokens of the prompt, from `first_position` on. The prompt's first token has
    none, so an attempt tells from position 1 to the last, in order."""

    key: RequestKey
    at_s: float
    first_position: int
    entries: tuple[PromptLogprob, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestFailed:
    """The worker gave this request up; `reason` is machine readable."""

    key: RequestKey
    at_s: float
    reason: str
    message: str


@value
class Released:
    """The worker holds nothing of this request any more."""

    key: RequestKey
    at_s: float


WorkerEvent = (
    Reserved | ReserveRefused | Lifetime | PromptLogprobs | Tokens | RequestFailed | Released
)


@value
class StoredRun:
    """The strand `number` has these blocks, at depths from `start` on; 32 bytes of `hashes` each.

    They follow the block at depth `start` - 1 of the strand `parent`. 0: they begin a sequence.
    `parent` is `number` itself where a strand grows that the receiver knows.
    """

    number: int
    parent: int
    start: int
    hashes: bytes


@value
class CutRun:
    """The strand `number` has no block at depth `end` or deeper. If it begins there, it is gone."""

    number: int
    end: int


@value
class BlockChanges:
    """What a holder's tier holds now, for the directory: first strands lose their ends, then others
    are stored, both in this order.

    A strand is a contiguous part of a sequence of blocks, from one depth to another. Only its end
    moves, and other strands may begin below any of its blocks. Its number is used once.
    """

    tier: Tier
    cut: tuple[CutRun, ...] = ()
    stored: tuple[StoredRun, ...] = ()


@value
class PoolUpdate:
    """A message of a pool node's stream to a router: first all that it holds, then each change.

    `sequence` counts from 0 in each stream. `addresses` are for workers of other hosts, `workers`
    are those of its own host that look prompts up in it.
    """

    sequence: int
    node: Incarnation
    addresses: tuple[str, ...] = ()
    workers: tuple[Incarnation, ...] = ()
    blocks: tuple[BlockChanges, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkState:
    """A connection that the worker opened to `peer`; no speed (0) until it is measured."""

    peer: Incarnation
    transport: str
    bytes_per_s: float = 0.0
    latency_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TierLoad:
    """What a worker has of one QoS tier: `running` sequences count against its share of places,
    those on their way and those that wait included. `waiting` are prompts to be computed, and
    sequences that lost their blocks."""

    tier: str
    running: int
    waiting: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """How one of the counters is shown: in /metrics as `kvrelay:{metric}` with the help `text`, and
    in `kvrelay status` under `column`, if it has one. Counters of the same metric follow one
    another, each with its own `label`: a name and a value."""

    metric: str
    text: str
    is_total: bool
    label: tuple[str, str] | None = None
    column: str = ""


def _gauge(metric: str, text: str, column: str = "") -> dict[str, Shown]:
    return {"shown": Shown(metric=metric, text=text, is_total=False, column=column)}


def _total(
    metric: str, text: str, column: str = "", label: tuple[str, str] | None = None
) -> dict[str, Shown]:
    """What only grows while the worker lives."""
    return {"shown": Shown(metric=metric, text=text, is_total=True, label=label, column=column)}


def _canaries(result: str) -> dict[str, Shown]:
    text = "Handed-over KV whose digest was compared with that of the prefill worker."
    return _total("canary_checks", text, label=("result", result))


def _prefixes(source: PrefixOrigin) -> dict[str, Shown]:
    text = "Sequences begun, by where the KV of their prefix came from."
    return _total("prefix_source", text, label=("source", source))


@dataclass(slots=True, kw_only=True, unsafe_hash=True)
class Counters:
    """A worker's own state, sent with every batch of events, so that all routers see the same. It
    is not frozen, because making a frozen one of so many fields takes three times as long.

    A field with metadata appears in /metrics, and perhaps in `kvrelay status` (see Shown). The
    message Counters in counters.proto has the same fields.

    A request can get `free_blocks`, which are neither held nor cached, and `cached_blocks`.
    (`BlockTables.free_blocks` is both together.)

    The worker's steps take the hello's times multiplied by the corrections. Of the `running`
    sequences, `decode_sequences` are in each decode step; their contexts sum to `decode_kv_tokens`.
    `reserved_sequences` are on their way. So many `routers` are attached.
    `tiers` is empty where there is one tier only. A worker that is `draining` takes nothing new.
    Its `role` is another one with each `role_epoch`; in epoch 0 that of its hello.
    """

    running: int = field(
        default=0,
        metadata=_gauge("worker_requests_running", "Requests running at the worker.", "running"),
    )
    waiting: int = field(
        default=0,
        metadata=_gauge("num_requests_waiting", "Requests waiting at the worker.", "waiting"),
    )
    free_blocks: int = field(
        default=0, metadata=_gauge("kv_blocks_free", "KV blocks neither held nor cached.")
    )
    cached_blocks: int = field(
        default=0, metadata=_gauge("kv_blocks_cached", "KV blocks kept for reuse.")
    )
    routers: int = 0
    leased_blocks: int = 0
    active_blocks: int = 0
    orphaned_blocks: int = 0
    steps: int = field(default=0, metadata=_total("worker_steps", "Engine steps."))
    busy_s: float = field(
        default=0.0, metadata=_total("worker_busy_seconds", "Time spent in engine steps.")
    )
    prompt_tokens: int = field(
        default=0, metadata=_total("worker_prompt_tokens", "Prompt tokens computed.")
    )
    generated_tokens: int = field(
        default=0, metadata=_total("worker_generated_tokens", "Tokens decoded.")
    )
    preemptions: int = field(default=0, metadata=_total("num_preemptions", "Sequences preempted."))
    prefix_queried_tokens: int = field(
        default=0, metadata=_total("prefix_cache_queries", "Prompt tokens looked up.")
    )
    prefix_hit_tokens: int = field(
        default=0, metadata=_total("prefix_cache_hits", "Prompt tokens found cached.")
    )
    pool_queried_tokens: int = field(
        default=0, metadata=_total("pool_queries", "Prompt tokens sought in a pool.")
    )
    pool_host_tokens: int = field(
        default=0, metadata=_total("pool_host_hits", "Fetched from a host tier.")
    )
    pool_disk_tokens: int = field(
        default=0, metadata=_total("pool_disk_hits", "Fetched from a disk tier.")
    )
    pool_remote_tokens: int = field(
        default=0, metadata=_total("pool_remote_hits", "Fetched from another host's pool.")
    )
    pool_declined_tokens: int = field(
        default=0, metadata=_total("pool_declined", "There, but faster computed.")
    )
    peer_tokens: int = field(
        default=0, metadata=_total("peer_hits", "Pulled out of another worker's cache.")
    )
    transfers: int = field(
        default=0, metadata=_total("kv_transfers", "Slabs written or scattered.")
    )
    transfer_bytes: int = field(
        default=0, metadata=_total("kv_transfer_bytes", "KV bytes written or scattered.")
    )
    transfer_s: float = field(
        default=0.0, metadata=_total("kv_transfer_seconds", "Time in gather and scatter.")
    )
    canaries_passed: int = field(default=0, metadata=_canaries("passed"))
    canaries_mismatched: int = field(default=0, metadata=_canaries("mismatched"))
    prefixes_device: int = field(default=0, metadata=_prefixes(PrefixOrigin.DEVICE))
    prefixes_host: int = field(default=0, metadata=_prefixes(PrefixOrigin.HOST))
    prefixes_disk: int = field(default=0, metadata=_prefixes(PrefixOrigin.DISK))
    prefixes_peer: int = field(default=0, metadata=_prefixes(PrefixOrigin.PEER))
    prefixes_remote: int = field(default=0, metadata=_prefixes(PrefixOrigin.REMOTE))
    prefixes_computed: int = field(default=0, metadata=_prefixes(PrefixOrigin.COMPUTED))
    decode_sequences: int = 0
    decode_kv_tokens: int = 0
    reserved_sequences: int = 0
    prefill_correction: float = 1.0
    decode_correction: float = 1.0
    prefill_waiting_tokens: int = 0
    links: tuple[LinkState, ...] = ()
    tiers: tuple[TierLoad, ...] = ()
    draining: bool = False
    gc_pauses: int = 0
    gc_pause_s: float = 0.0
    gc_longest_pause_s: float = 0.0
    role: Role | None = None
    role_epoch: int = 0


SHOWN: tuple[tuple[str, Shown], ...] = tuple(
    (one.name, one.metadata["shown"]) for one in fields(Counters) if "shown" in one.metadata
)
"""(field of Counters, how it is shown)"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Activity:
    """Rates are means over the time between two readings; the rest is as of the later one.

    `prompt_tokens_per_s` counts prompt tokens computed, `generated_tokens_per_s` tokens decoded.
    `kv_used` is the share of KV blocks that requests hold, 0 to 1. `hit_rate` is the share of
    prompt tokens found in this worker's cache; None when no prompt was looked up.
    """

    prompt_tokens_per_s: float = 0.0
    generated_tokens_per_s: float = 0.0
    running: int = 0
    waiting: int = 0
    kv_used: float = 0.0
    hit_rate: float | None = None
    transfer_bytes_per_s: float = 0.0

    @property
    def idle(self) -> bool:
        """Nothing runs or waits, and nothing was computed or moved."""
        rates = self.prompt_tokens_per_s, self.generated_tokens_per_s, self.transfer_bytes_per_s
        return not (self.running or self.waiting or any(rates))


NO_ACTIVITY = Activity()


def activity(before: Counters, after: Counters, seconds: float, total_blocks: int) -> Activity:
    """`seconds` lie between the two readings; rates are 0 when there are none."""
    queried = after.prefix_queried_tokens - before.prefix_queried_tokens
    hits = after.prefix_hit_tokens - before.prefix_hit_tokens
    return Activity(
        prompt_tokens_per_s=_rate(after.prompt_tokens - before.prompt_tokens, seconds),
        generated_tokens_per_s=_rate(after.generated_tokens - before.generated_tokens, seconds),
        running=after.running,
        waiting=after.waiting,
        kv_used=kv_used(after, total_blocks),
        hit_rate=hits / queried if queried > 0 else None,
        transfer_bytes_per_s=_rate(after.transfer_bytes - before.transfer_bytes, seconds),
    )


def kv_used(counters: Counters, total_blocks: int) -> float:
    """Cached blocks that no request holds are not in use."""
    available = counters.free_blocks + counters.cached_blocks
    return 1 - available / total_blocks if total_blocks else 0.0


def speed_text(bytes_per_s: float) -> str:
    if bytes_per_s >= 1e9:
        return f"{bytes_per_s / 1e9:.1f} GB/s"
    return f"{bytes_per_s / 1e6:.1f} MB/s"


def _rate(count: int, seconds: float) -> float:
    return max(0, count) / seconds if seconds > 0 else 0.0
