"""Messages between routers and workers, as values. Pure.

`wire.py` turns them into protobuf. Times are the sender's clock; only ages cross the wire.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from kvrelay.starts import PhaseSeconds
from kvrelay.types import (
    TAKES_ALL,
    FinishReason,
    Incarnation,
    MemoryPart,
    PromptLogprob,
    PromptRule,
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


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterLeaving:
    """The router will take nothing new: it counts no more among the routers."""


ToWorker = Reserve | Prefill | Generate | Preload | Abort | Stop | Suspect | RouterLeaving


# --- worker -> router ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerHello:
    """`pool`: of workers. `prefill_chunk_tokens`: of a prompt in a step; `mixed_chunk_tokens`: as
    long as it is a decode worker. `physical_format` and `rope_border_tokens`, with the fingerprint,
    name its blocks; `kv_token_bytes` is the KV of one token; `cpus`, such as 0-3, are its own, if
    it has any.
    `handoff_by_pool`: prompts that are computed elsewhere come to it through the pool. When it has
    died, the process at `witness` tells how, to those who have the key. `start`: the phases of its
    start; the first router that hears of it (`is_new`) counts them. `takes`: the prompts that it
    computes where others could. `memory`: as it was divided at its start."""

    name: str
    pool: str
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
    takes: PromptRule = TAKES_ALL
    memory: tuple[MemoryPart, ...] = ()


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
