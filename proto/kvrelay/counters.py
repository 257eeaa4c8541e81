"""What a worker counts, and tells its routers with every report; and what it did lately. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

from kvrelay.types import Incarnation, PrefixOrigin, Role


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
    `reserved_sequences` are on their way. So many `routers` are attached and stay.
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
