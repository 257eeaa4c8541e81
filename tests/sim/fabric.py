"""A prefill and a decode worker without devices: the real cores, a virtual clock, random delays.

Every message, step and transfer arrives after a random delay, in order per channel.
"""

from __future__ import annotations

from itertools import count

from decode_worker.batch import Batch
from decode_worker.receiver import Receiver
from decode_worker.scheduler import DecodeScheduler
from engine.step import (
    Command,
    Emit,
    RunStep,
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
from kvpool.leases import LeaseTable
from kvpool.slabs import SlabId, SlabPool
from kvpool.tables import BlockTables
from kvrelay.messages import Abort, Prefill, WorkerEvent
from kvrelay.types import Incarnation, RequestSpec
from prefill_worker.scheduler import PrefillScheduler
from tests.sim.model import LAYOUT, SLAB_TOKENS, Content, Memory
from tests.sim.simulation import LEASE_S, Simulation


class Fabric(Simulation):
    """Runs two workers until nothing is left to happen; `events` collects what they emit."""

    def __init__(self, seed: int, *, prefill_blocks: int, decode_blocks: int, slabs: int) -> None:
        super().__init__(seed)
        self._silent = False
        self.events: list[WorkerEvent] = []
        self._busy: set[str] = set()
        self._slab_contents: dict[SlabId, tuple[int, Content]] = {}  # start, content
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

    def on_tick(self) -> None:
        self.to_prefill(Tick())
        self.to_decode(Tick())

    def validate(self) -> None:
        self.prefill.validate()
        self.decode.validate()

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
        outcome = StepOutcome(sampled=tuple(memory.sample(s) for s in step.batch.slices))

        def done() -> None:
            self._busy.discard(worker)
            event = StepDone(outcome=outcome, seconds=0.0)
            (self.to_prefill if worker == "p" else self.to_decode)(event)

        self.after(f"{worker}.device", done, 0.02)

    # --- slabs ----------------------------------------------------------------------------------

    def _write(self, job: WriteSlab) -> None:
        content = self.memories["p"].take(job.tables, job.start, job.tokens)
        self._slab_contents[job.lent.slab_id] = (job.start, content)
        filled = SlabFilled(
            key=job.lent.key,
            piece=job.lent.piece,
            slab_id=job.lent.slab_id,
            lease_id=job.lent.lease_id,
        )
        self._send("p", filled)
        self.to_prefill(SlabWritten(key=job.lent.key, piece=job.lent.piece, bytes=1, seconds=0))

    def _scatter(self, job: ScatterSlab) -> None:
        start, content = self._slab_contents.pop(job.filled.slab_id)
        self.memories["d"].put(job.tables, start, content)
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
