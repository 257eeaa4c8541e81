"""Small schedulers, and shorthands for what goes into them and comes out."""

from __future__ import annotations

from decode_worker.batch import Batch
from decode_worker.reservations import Reservations
from decode_worker.running_set import TierShares
from decode_worker.scheduler import DecodeScheduler
from engine.core.step import Command, Emit, RunStep, Sampled, StepDone, StepOutcome, StepWanted
from engine.core.step_times import StepTimes
from kvpool.core.blocks.leases import LeaseTable
from kvpool.core.blocks.tables import BlockTables
from kvpool.core.fetch.cost import RestoreCost
from kvpool.core.fetch.prefix_lookup import PrefixLookup
from kvpool.core.layout.layout import KvLayout, LayerGroup, Plane
from kvpool.core.transfer.commands import FromPeer, SendPeer
from kvpool.core.transfer.messages import HandoffMode, PeerHello, PeerMessage, PiecesAhead
from kvpool.core.transfer.piece import Piece, PieceBlocks
from kvpool.core.transfer.pool_map import KvFacts
from kvpool.core.transfer.slabs import SlabId, SlabPool
from kvpool.core.transfer.write import TokenSpan
from kvrelay.messages import Lifetime, Prefill, Reserve, Tokens, WorkerEvent
from kvrelay.qos import ONE_TIER, QosTiers
from kvrelay.types import Incarnation, RequestKey, RequestSpec, Sampling
from prefill_worker.scheduler import PrefillScheduler

BLOCK = 4
SLAB_TOKENS = 8
TTL_S = 30.0
P, D = Incarnation("p"), Incarnation("d")
LAYOUT = KvLayout(
    groups=(LayerGroup(layers=(0,), planes=(Plane(name="k", heads=1, dim=1),)),),
    dtype="float32",
    block_size=BLOCK,
)
TOKEN_BYTES = LAYOUT.bytes_per_token
FACTS = KvFacts(
    dtype=LAYOUT.dtype,
    block_size=BLOCK,
    blocks=16,
    slab_bytes=SLAB_TOKENS * TOKEN_BYTES,
    region="pool",
)


def key(name: str) -> RequestKey:
    return RequestKey(name, 0)


def spec(
    name: str,
    tokens: int,
    *,
    n: int = 1,
    max_tokens: int = 8,
    stops: tuple[int, ...] = (),
    prompt_logprobs: int | None = None,
) -> RequestSpec:
    """Its prompt is 0, 1, 2 ..."""
    sampling = Sampling(
        max_tokens=max_tokens,
        seed=1,
        n=n,
        stop_token_ids=stops,
        prompt_logprobs=prompt_logprobs,
    )
    return RequestSpec(key=key(name), prompt_ids=tuple(range(tokens)), sampling=sampling)


def reserve(request: RequestSpec) -> Reserve:
    return Reserve(spec=request, source=P)


def prefill_of(request: RequestSpec) -> Prefill:
    return Prefill(spec=request, target_addresses=("sim:d",), target=D)


def hello(peer: Incarnation, facts: KvFacts = FACTS) -> FromPeer:
    message = PeerHello(wire_version=1, incarnation=peer, fingerprint="f", kv=facts)
    return FromPeer(peer=peer, message=message)


def local_lookup(tables: BlockTables) -> PrefixLookup:
    """Of a worker without pools and peers that give prefixes."""
    return PrefixLookup(tables=tables, cost=RestoreCost(tables.layout.block_size))


def prefill_scheduler(
    *,
    blocks: int = 16,
    chunk: int = 8,
    mode: HandoffMode = HandoffMode.PUSH,
    canary_every: int = 0,
) -> PrefillScheduler:
    """D has said hello to it."""
    scheduler = PrefillScheduler(
        lookup=local_lookup(BlockTables(LAYOUT, blocks)),
        chunk_tokens=chunk,
        mode=mode,
        canary_every=canary_every,
    )
    scheduler.handle(hello(D), 0)
    return scheduler


def reservations(
    *,
    blocks: int = 16,
    slabs: int = 2,
    caching: bool = True,
    mode: HandoffMode = HandoffMode.PUSH,
) -> Reservations:
    return Reservations(
        tables=BlockTables(LAYOUT, blocks, caching=caching),
        slabs=SlabPool(SLAB_TOKENS * TOKEN_BYTES, slabs),
        regions={SlabId(i): f"region-{i}" for i in range(slabs)},
        leases=LeaseTable(TTL_S),
        mode=mode,
    )


def decode_scheduler(
    *,
    blocks: int = 16,
    slabs: int = 2,
    chunk: int = 8,
    max_running: int = 4,
    caching: bool = True,
    mode: HandoffMode = HandoffMode.PUSH,
    qos: QosTiers = ONE_TIER,
    times: StepTimes | None = None,
) -> DecodeScheduler:
    """P has said hello to it."""
    owner = reservations(blocks=blocks, slabs=slabs, caching=caching, mode=mode)
    owner.peers.met(P, FACTS)
    return DecodeScheduler(
        reservations=owner,
        batch=Batch(
            lookup=local_lookup(owner.tables),
            chunk_tokens=chunk,
            shares=TierShares(slots=max_running, qos=qos),
            times=times,
        ),
    )


def ahead(
    name: str,
    prompt: int = 3,
    *,
    number: int = 0,
    start: int = 0,
    end: int | None = None,
    index: int = 0,
    count: int = 1,
    blocks: tuple[int, ...] | None = None,
) -> PiecesAhead:
    """Tokens `[start, end)`, all of the prompt when not given, in blocks 0, 1, 2 ... of P."""
    stop = prompt if end is None else end
    span = TokenSpan(start=start, tokens=stop - start, next_position=prompt)
    first, last = start // BLOCK, -(-stop // BLOCK)
    runs = ((first, last - first),) if blocks is None else tuple((b, 1) for b in blocks)
    return PiecesAhead(
        key=key(name),
        number=number,
        piece=Piece(span=span, index=index),
        held=(PieceBlocks(group=0, first=first, runs=runs),),
        count=count,
    )


def from_p(message: PeerMessage) -> FromPeer:
    return FromPeer(peer=P, message=message)


def from_d(message: PeerMessage) -> FromPeer:
    return FromPeer(peer=D, message=message)


def events(commands: list[Command]) -> list[WorkerEvent]:
    return [event for c in commands if isinstance(c, Emit) for event in c.events]


def names(commands: list[Command]) -> list[str]:
    """What a router hears, in short: a lifetime's name, else the kind of event."""
    return [e.name if isinstance(e, Lifetime) else type(e).__name__ for e in events(commands)]


def to_peer(commands: list[Command]) -> list[PeerMessage]:
    return [c.message for c in commands if isinstance(c, SendPeer)]


def the_step(commands: list[Command]) -> RunStep:
    (step,) = [c for c in commands if isinstance(c, RunStep)]
    return step


def run(
    scheduler: PrefillScheduler | DecodeScheduler, *sampled: tuple[int, ...], now_s: float = 0.0
) -> list[Command]:
    """One step: these are the tokens sampled for each slice."""
    the_step(scheduler.handle(StepWanted(), now_s))
    return done(scheduler, *sampled, now_s=now_s)


def done(
    scheduler: PrefillScheduler | DecodeScheduler, *sampled: tuple[int, ...], now_s: float = 0.0
) -> list[Command]:
    outcome = tuple(tuple(Sampled(token_id=t) for t in tokens) for tokens in sampled)
    event = StepDone(outcome=StepOutcome(sampled=outcome), seconds=0.1)
    return scheduler.handle(event, now_s)


def said(commands: list[Command]) -> list[tuple[int, int, tuple[int, ...], str | None]]:
    """# of each Tokens event: choice, first index, ids, finish reason"""
    return [
        (e.choice, e.first_index, e.token_ids, e.finish_reason)
        for e in events(commands)
        if isinstance(e, Tokens)
    ]
