"""A prefill and a decode worker without devices: the real cores, a virtual clock, random delays.

The model is a hash, so a request's right tokens are known whatever the schedule. Every message,
step and transfer arrives after a random delay, in order per channel.
"""

from __future__ import annotations

import heapq
import random
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

from decode_worker.batch import Batch
from decode_worker.receiver import Receiver
from decode_worker.scheduler import DecodeScheduler
from engine.step import (
    Command,
    Emit,
    RunStep,
    Sampled,
    SequenceSlice,
    StepDone,
    StepOutcome,
    StepWanted,
    Tick,
)
from kvpool.handoff import (
    CancelTransfer,
    Committed,
    FromPeer,
    ReplaceSlab,
    ScatterSlab,
    SendPeer,
    SlabFilled,
    SlabLent,
    SlabReplaced,
    SlabScattered,
    SlabWritten,
    WriteSlab,
)
from kvpool.layout import KvLayout, LayerGroup, Plane
from kvpool.leases import LeaseTable
from kvpool.slabs import SlabId, SlabPool
from kvpool.tables import BlockTables, CopyPairs
from kvrelay.messages import Abort, Prefill, WorkerEvent
from kvrelay.types import Incarnation, RequestSpec
from prefill_worker.scheduler import PrefillScheduler

BLOCK = 4
SLAB_TOKENS = 8
VOCABULARY = 50
LEASE_S = 30.0

PLANES = (Plane(name="k", heads=1, dim=1), Plane(name="v", heads=1, dim=1))
LAYOUT = KvLayout(
    groups=(
        LayerGroup(layers=(0, 2), planes=PLANES),
        LayerGroup(layers=(1,), planes=PLANES, window=8),
    ),
    dtype="float32",
    block_size=BLOCK,
)


def right_token(prompt: tuple[int, ...], choice: int, emitted: tuple[int, ...]) -> int:
    """The hash model: what follows, for one choice."""
    state = 17 + 31 * choice
    for token in (*prompt, *emitted):
        state = (state * 6364136223846793005 + token + 1442695040888963407) % 2**64
    return (state >> 33) % VOCABULARY


@dataclass(slots=True)
class Memory:
    """What a real pool's slots would hold: # group, slot |-> (sequence so far) at that position.

    A slot's KV depends on all tokens up to it, so the tuple of those tokens stands for it.
    """

    slots: dict[tuple[int, int], tuple[int, ...]] = field(default_factory=dict)

    def run(self, piece: SequenceSlice) -> tuple[int, ...]:
        """Write the slice's KV, check that all earlier KV is right; the whole sequence."""
        prefix = self.read(piece, piece.start - 1) if piece.start else ()
        for i, token in enumerate(piece.token_ids):
            prefix = (*prefix, token)
            for group, table in enumerate(piece.tables):
                self.slots[group, slot(table, piece.start + i)] = prefix
        for position in range(len(prefix)):
            assert self.read(piece, position) == prefix[: position + 1], "KV was overwritten"
        return prefix

    def copy(self, copies: tuple[CopyPairs, ...]) -> None:
        for pairs in copies:
            for group, group_pairs in enumerate(pairs):
                for source, target in group_pairs:
                    for i in range(BLOCK):
                        if (group, source * BLOCK + i) in self.slots:
                            kept = self.slots[group, source * BLOCK + i]
                            self.slots[group, target * BLOCK + i] = kept

    def read(self, piece: SequenceSlice, position: int) -> tuple[int, ...]:
        found = {
            self.slots[group, slot(table, position)] for group, table in enumerate(piece.tables)
        }
        assert len(found) == 1, "the groups disagree"
        return found.pop()


def slot(table: tuple[int, ...], position: int) -> int:
    return table[position // BLOCK] * BLOCK + position % BLOCK


class Fabric:
    """Runs two workers until nothing is left to happen; `events` collects what they emit."""

    def __init__(self, seed: int, *, prefill_blocks: int, decode_blocks: int, slabs: int) -> None:
        self.random = random.Random(seed)
        self.now_s = 0.0
        self._silent = False
        self._next_tick_s = 10.0
        self.events: list[WorkerEvent] = []
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self._channel_s: dict[str, float] = defaultdict(float)
        self._busy: set[str] = set()
        self._slab_contents: dict[SlabId, tuple[tuple[int, int], dict[int, list[tuple[int, ...]]]]]
        self._slab_contents = {}
        self._regions = count(slabs)
        self.memories = {"p": Memory(), "d": Memory()}
        self.tables = {
            "p": BlockTables(LAYOUT, prefill_blocks),
            "d": BlockTables(LAYOUT, decode_blocks),
        }
        self.prefill = PrefillScheduler(
            tables=self.tables["p"], chunk_tokens=12, slab_tokens=SLAB_TOKENS
        )
        receiver = Receiver(
            tables=self.tables["d"],
            slabs=SlabPool(SLAB_TOKENS * LAYOUT.bytes_per_token, slabs),
            regions={SlabId(i): f"region-{i}" for i in range(slabs)},
            leases=LeaseTable(LEASE_S),
        )
        self.decode = DecodeScheduler(
            receiver=receiver,
            batch=Batch(tables=self.tables["d"], chunk_tokens=12),
            max_running=8,
        )

    # --- time -----------------------------------------------------------------------------------

    def after(self, channel: str, action: Callable[[], None], scale_s: float = 0.01) -> None:
        """In order per channel, after a random delay."""
        at_s = self.now_s + self.random.expovariate(1 / scale_s)
        at_s = max(at_s, self._channel_s[channel])
        self._channel_s[channel] = at_s
        heapq.heappush(self._heap, (at_s, next(self._order), action))

    def run(self, until_s: float = 10_000.0) -> None:
        """Until nothing happens any more, with a tick every ten seconds."""
        while self._heap and self._heap[0][0] <= until_s:
            if self._heap[0][0] >= self._next_tick_s:
                self.now_s = self._next_tick_s
                self._next_tick_s += 10.0
                self.tick()
                continue
            self.now_s, _, action = heapq.heappop(self._heap)
            action()
            self.prefill.validate()
            self.decode.validate()
        assert not self._heap or until_s < 10_000.0, "it never ends"

    def settle(self) -> None:
        """Let every lease end."""
        for _ in range(3):
            self.now_s += 1.1 * LEASE_S
            self.tick()
            self.run()

    # --- workers --------------------------------------------------------------------------------

    def silence_prefill(self) -> None:
        """From now on the prefill worker does nothing and says nothing, without being gone."""
        self._silent = True

    def to_prefill(self, event: object) -> None:
        if self._silent:
            return
        self._settle("p", self.prefill.handle(event, self.now_s))  # type: ignore[arg-type]

    def to_decode(self, event: object) -> None:
        self._settle("d", self.decode.handle(event, self.now_s))  # type: ignore[arg-type]

    def abort(self, spec: RequestSpec) -> None:
        self.after("router>p", lambda: self.to_prefill(Abort(key=spec.key)))
        self.after("router>d", lambda: self.to_decode(Abort(key=spec.key)))

    def prefill_request(self, spec: RequestSpec) -> None:
        message = Prefill(spec=spec, target_address="d", target=Incarnation("d"))
        self.after("router>p", lambda: self.to_prefill(message))

    def tick(self) -> None:
        self.to_prefill(Tick())
        self.to_decode(Tick())

    def _settle(self, worker: str, commands: list[Command]) -> None:
        for command in commands:
            self._execute(worker, command)
        if worker not in self._busy:
            scheduler = self.prefill if worker == "p" else self.decode
            for command in scheduler.handle(StepWanted(), self.now_s):
                self._execute(worker, command)

    def _execute(self, worker: str, command: Command) -> None:
        match command:
            case Emit(events=events):
                self.events += events
            case RunStep():
                self._run_step(worker, command)
            case SendPeer(message=message):
                self._send(worker, message)
            case WriteSlab():
                self.after("p.mover", lambda: self._write(command))
            case ScatterSlab():
                self.after("d.mover", lambda: self._scatter(command))
            case ReplaceSlab(slab_id=slab_id):
                region = f"region-{next(self._regions)}"
                event = SlabReplaced(slab_id=slab_id, region=region)
                self.after("d.mover", lambda: self.to_decode(event))

    def _send(self, worker: str, message: object) -> None:
        if worker == "p" and self._silent:
            return
        if worker == "p":
            event = FromPeer(peer=Incarnation("p"), message=message)  # type: ignore[arg-type]
            self.after("p>d", lambda: self.to_decode(event))
        else:
            assert isinstance(message, SlabLent | Committed | CancelTransfer)
            reply = FromPeer(peer=Incarnation("d"), message=message)
            self.after("d>p", lambda: self.to_prefill(reply))

    def _run_step(self, worker: str, step: RunStep) -> None:
        assert worker not in self._busy
        self._busy.add(worker)
        memory = self.memories[worker]
        memory.copy(step.copies)
        outcome = StepOutcome(sampled=tuple(self.sample(memory, s) for s in step.batch.slices))

        def done() -> None:
            self._busy.discard(worker)
            event = StepDone(outcome=outcome, seconds=0.0)
            (self.to_prefill if worker == "p" else self.to_decode)(event)

        self.after(f"{worker}.device", done, 0.02)

    @staticmethod
    def sample(memory: Memory, piece: SequenceSlice) -> tuple[Sampled, ...]:
        whole = memory.run(piece)
        samples = []
        for wanted in piece.samples:
            prompt_end = len(whole) - wanted.index
            token = right_token(whole[:prompt_end], wanted.choice, whole[prompt_end:])
            samples.append(Sampled(token_id=token))
        return tuple(samples)

    # --- slabs ----------------------------------------------------------------------------------

    def _write(self, job: WriteSlab) -> None:
        span = range(job.start, job.start + job.tokens)
        content = {
            group: [self.memories["p"].slots[group, slot(table, at)] for at in span]
            for group, table in enumerate(job.tables)
        }
        self._slab_contents[job.lent.slab_id] = ((job.start, job.tokens), content)
        filled = SlabFilled(
            key=job.lent.key,
            piece=job.lent.piece,
            slab_id=job.lent.slab_id,
            lease_id=job.lent.lease_id,
        )
        self._send("p", filled)
        self.to_prefill(SlabWritten(key=job.lent.key, piece=job.lent.piece, bytes=1, seconds=0))

    def _scatter(self, job: ScatterSlab) -> None:
        (start, tokens), content = self._slab_contents.pop(job.filled.slab_id)
        for group, table in enumerate(job.tables):
            for i in range(tokens):
                self.memories["d"].slots[group, slot(table, start + i)] = content[group][i]
        filled = job.filled
        self.to_decode(
            SlabScattered(
                key=filled.key,
                piece=filled.piece,
                slab_id=filled.slab_id,
                lease_id=filled.lease_id,
                bytes=1,
                seconds=0,
            )
        )
