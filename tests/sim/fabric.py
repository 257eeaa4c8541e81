"""A prefill and a decode worker without devices: the real cores, a virtual clock, random delays.

Every message, step and transfer arrives after a random delay, in order per channel.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import count
from random import Random

from engine.core.step import Command, Emit, RunStep, StepDone, StepOutcome, StepWanted, Tick
from kvpool.core.layout.layout import KvLayout
from kvpool.core.transfer.commands import (
    FetchPiece,
    FromPeer,
    LayersWritten,
    LinkMeasured,
    PeerLost,
    ReplaceSlab,
    ScatterSlab,
    SendPeer,
    SlabWritten,
    WriteSlab,
)
from kvpool.core.transfer.messages import (
    TO_PREFILL,
    DigestBlocks,
    HandoffMode,
    PeerHello,
    PeerMessage,
)
from kvpool.core.transfer.write import Side
from kvpool.transport.peer.base import MAX_MESSAGE_BYTES
from kvpool.wire.peer import decode, encode
from kvrelay.messages import Abort, Prefill, WorkerEvent
from kvrelay.types import Incarnation, RequestSpec, Role
from tests.sim.model import LAYOUT, SLAB_BYTES, AnyWay
from tests.sim.simulation import Simulation
from tests.sim.worker import Fetch, Shape, Worker, make_worker


class Fabric(Simulation):
    """Runs two workers until nothing is left to happen; `events` collects what they emit.

    `decode_block` is the decode worker's block size, where it isn't the layout's; `direct` lets
    pieces be read directly, one in two.
    """

    def __init__(
        self,
        seed: int,
        *,
        prefill_blocks: int,
        decode_blocks: int,
        slabs: int,
        slab_bytes: int = SLAB_BYTES,
        layout: KvLayout = LAYOUT,
        decode_block: int | None = None,
        direct: bool = False,
        mode: HandoffMode = HandoffMode.PUSH,
    ) -> None:
        super().__init__(seed)
        self._silent = False
        self._direct = direct
        self._links = count(1)
        self._broken: set[int] = set()
        self.events: list[WorkerEvent] = []
        self.on_events: Callable[[], None] = lambda: None
        self.sent_bytes = 0
        self.writes = 0
        self.early_writes = 0
        self.fetches = 0
        self._regions = count(slabs)
        ours = Shape(
            role=Role.PREFILL,
            blocks=prefill_blocks,
            slabs=slabs,
            slab_bytes=slab_bytes,
            layout=layout,
            mode=mode,
        )
        theirs = replace(
            ours,
            role=Role.DECODE,
            blocks=decode_blocks,
            layout=replace(layout, block_size=decode_block or layout.block_size),
        )
        self.p, self.d = make_worker("p", 0, ours), make_worker("d", 0, theirs)
        self.tables = {"p": self.p.tables, "d": self.d.tables}

    # --- workers --------------------------------------------------------------------------------

    def silence_prefill(self) -> None:
        """From now on the prefill worker does nothing and says nothing, without being gone."""
        self._silent = True

    def lose_each_other(self) -> None:
        """The connection breaks: what was on its way is lost, each side notices in its time."""
        for worker, peer in ((self.p, self.d), (self.d, self.p)):
            link = worker.links.get(peer.incarnation)
            if link is not None:
                self._broken.add(link)
                notice = partial(self._notice, worker, peer.incarnation, link)
                scale_s = self.random.choice([0.01, 1.0])
                self.after(f"notice {worker.incarnation} {link}", notice, scale_s)

    def _notice(self, worker: Worker, peer: Incarnation, link: int) -> None:
        if worker.links.get(peer) == link:
            del worker.links[peer]
            self._tell(worker, PeerLost(peer=peer, reason="broken"))

    def _tell(self, worker: Worker, event: object) -> None:
        (self.to_prefill if worker is self.p else self.to_decode)(event)

    def to_prefill(self, event: object) -> None:
        if self._silent:
            return
        self._settle(self.p, self.p.prefill.handle(event, self.now_s))  # type: ignore[arg-type]

    def to_decode(self, event: object) -> None:
        self._settle(self.d, self.d.decode.handle(event, self.now_s))  # type: ignore[arg-type]

    def abort(self, spec: RequestSpec) -> None:
        self.after("router>p", lambda: self.to_prefill(Abort(key=spec.key)))
        self.after("router>d", lambda: self.to_decode(Abort(key=spec.key)), 0.2)

    def prefill_request(self, spec: RequestSpec, held_tokens: int = 0) -> None:
        message = Prefill(
            spec=spec,
            target_addresses=("d",),
            target=self.d.incarnation,
            held_tokens=held_tokens,
            within_s=self.random.choice([None, 0.05, 1.0]),
        )
        self.after("router>p", lambda: self.to_prefill(message))

    def on_tick(self) -> None:
        self.to_prefill(Tick())
        self.to_decode(Tick())

    def validate(self) -> None:
        self.p.prefill.validate()
        self.d.decode.validate()

    def _settle(self, worker: Worker, commands: list[Command]) -> None:
        for command in commands:
            self._execute(worker, command)
        if worker.stepping is None:
            scheduler = self.p.prefill if worker is self.p else self.d.decode
            for command in scheduler.handle(StepWanted(), self.now_s):
                self._execute(worker, command)

    def _execute(self, worker: Worker, command: Command) -> None:
        match command:
            case Emit(events=events):
                self.events += events
                self.on_events()
            case RunStep():
                self._run_step(worker, command)
            case SendPeer(message=message):
                self._send(worker, message)
            case WriteSlab():
                self.writes += 1
                self.after("p.mover", lambda: self._write(command))
            case ScatterSlab():
                self.after("d.mover", lambda: self.to_decode(self.d.scatter(command)))
            case FetchPiece():
                self._fetch(command)
            case DigestBlocks():
                tell = self.to_prefill if worker is self.p else self.to_decode
                mover = "p.mover" if worker is self.p else "d.mover"
                self.after(mover, lambda: tell(worker.digest(command)))
            case ReplaceSlab(slab_id=slab_id):
                region = f"region-{next(self._regions)}"
                self.after("d.mover", lambda: self.to_decode(self.d.replace(slab_id, region)))

    def _send(self, worker: Worker, message: PeerMessage) -> None:
        """As PeerLinks does: P connects where it isn't, D's answers then go nowhere."""
        if worker is self.p and self._silent:
            return
        peer = self.d if worker is self.p else self.p
        if peer.incarnation not in worker.links:
            if worker is self.d:
                return
            worker.links[peer.incarnation] = next(self._links)
            self._send(worker, worker.peer_hello)
        link, payload = worker.links[peer.incarnation], encode(message)
        assert len(payload) <= MAX_MESSAGE_BYTES
        assert worker is self.p or isinstance(message, (*TO_PREFILL, PeerHello))
        channel = f"{worker.incarnation} {link}"
        self.after(channel, lambda: self._hear(worker.incarnation, peer, link, payload))

    def _hear(self, sender: Incarnation, worker: Worker, link: int, payload: bytes) -> None:
        if link in self._broken:
            return
        if worker.links.get(sender) != link:
            worker.links[sender] = link
            self._send(worker, worker.peer_hello)
            self._probe()
        self._tell(worker, FromPeer(peer=sender, message=decode(payload)))

    def _probe(self) -> None:
        """The decode worker learns some time later what the link costs."""
        if self._direct:
            cost = AnyWay(Random(self.random.random()))
            event = LinkMeasured(peer=self.p.incarnation, cost=cost)  # type: ignore[arg-type]
            self.after("probe", lambda: self.to_decode(event), 0.1)

    def _run_step(self, worker: Worker, step: RunStep) -> None:
        assert worker.stepping is None
        worker.stepping = self.p.prefill if worker is self.p else self.d.decode
        running = worker.memory.begin(step)
        device = f"{worker.incarnation}.device"
        tell = self.to_prefill if worker is self.p else self.to_decode

        def wrote(layer: int) -> None:
            running.write_up_to(layer)
            before = self.writes
            tell(LayersWritten(layer))
            self.early_writes += self.writes - before

        def done() -> None:
            outcome = StepOutcome(sampled=running.finish())
            worker.stepping = None
            tell(StepDone(outcome=outcome, seconds=0.0))

        for layer in sorted(step.layer_marks):
            self.after(device, lambda at=layer: wrote(at), 0.02)
        self.after(device, done, 0.02)

    # --- pieces ---------------------------------------------------------------------------------

    def _write(self, job: WriteSlab) -> None:
        source = Side(tables=job.tables, block_size=self.p.shape.layout.block_size)
        lent, error = job.lent, None
        is_broken = self.p.links.get(self.d.incarnation) in self._broken | {None}
        if is_broken or lent.region not in self.d.regions:
            error = "the region is gone"
        else:
            filled = self.d.fill(job, self.p.memory.take(job.write, source))
            self.sent_bytes += job.write.nbytes
            self._send(self.p, filled)
        self.to_prefill(
            SlabWritten(
                key=lent.key, piece=lent.piece, bytes=job.write.nbytes, seconds=0, error=error
            )
        )

    def _fetch(self, job: FetchPiece) -> None:
        """The reader maps the memory: it reads on, whatever becomes of the owner or the link."""
        self.fetches += 1
        fetch = Fetch(reader=self.d, owner=self.p.memory, job=job)

        def end() -> None:
            self.sent_bytes += job.write.nbytes
            self.to_decode(fetch.second_half())

        self.after("d.mover", fetch.first_half)
        self.after("d.mover", end, self.random.choice([0.01, 0.5]))
