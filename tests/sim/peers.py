"""What goes on between the workers of a simulated cluster: messages, slabs, direct reads."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from random import Random

from engine.core.step import Command, Tick
from kvpool.core.transfer.commands import (
    FetchPiece,
    FromPeer,
    LinkMeasured,
    PeerLost,
    ScatterSlab,
    SendPeer,
    SlabWritten,
    WriteSlab,
)
from kvpool.core.transfer.messages import TO_PREFILL, DigestBlocks, PeerHello
from kvpool.core.transfer.slabs import SlabId
from kvpool.core.transfer.write import Side
from kvpool.wire.peer import decode, encode
from kvrelay.messages import Abort
from kvrelay.types import Incarnation
from tests.sim.model import AnyWay
from tests.sim.simulation import Simulation
from tests.sim.worker import Fetch, Worker, fetched


class PeerFabric(Simulation):
    """`workers` are those that live. A broken link loses what is on its way."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.workers: dict[Incarnation, Worker] = {}
        self._broken: set[int] = set()  # streams and connections
        self._ids = count(1)

    @abstractmethod
    def _settle(self, worker: Worker, commands: Sequence[Command]) -> None:
        """Do them, and whatever the worker then does by itself."""

    def _both(self, worker: Worker, event: Abort | FromPeer | PeerLost | Tick) -> None:
        self._settle(worker, worker.prefill.handle(event, self.now_s))
        self._settle(worker, worker.decode.handle(event, self.now_s))

    def _lost(self, mine: Incarnation, theirs: Incarnation, link: int) -> None:
        worker = self.workers.get(mine)
        if worker is not None and worker.links.get(theirs) == link:
            del worker.links[theirs]
            self._both(worker, PeerLost(peer=theirs, reason="lost"))

    def _move(self, worker: Worker, action: Callable[[], None], scale_s: float = 0.01) -> None:
        """On its transfer thread."""
        self.by(worker.incarnation, f"mover {worker.incarnation}", action, scale_s)

    def _send(self, worker: Worker, command: SendPeer) -> None:
        """As PeerLinks does: connects for a message with addresses, drops an answer without."""
        peer = command.peer
        if peer not in worker.links:
            if not command.addresses:
                return
            if peer not in self.workers:
                link = -next(self._ids)
                worker.links[peer] = link
                mine = worker.incarnation
                self.by(mine, f"notice {mine} {link}", lambda: self._lost(mine, peer, link))
                self._broken.add(link)
                return
            worker.links[peer] = next(self._ids)
            self._send(worker, SendPeer(peer=peer, message=worker.peer_hello))
        link, payload = worker.links[peer], encode(command.message)
        hear = partial(self._hear, worker.incarnation, peer, link, payload)
        self.by(peer, f"{worker.incarnation} {link}", hear)

    def _hear(self, sender: Incarnation, to: Incarnation, link: int, payload: bytes) -> None:
        worker = self.workers.get(to)
        if worker is None or link in self._broken:
            return
        if worker.links.get(sender) != link:
            worker.links[sender] = link
            self._send(worker, SendPeer(peer=sender, message=worker.peer_hello))
        event = FromPeer(peer=sender, message=decode(payload))
        if isinstance(event.message, PeerHello):
            self._both(worker, event)
            self._probe(worker, sender, link)
        else:
            to_prefill = isinstance(event.message, TO_PREFILL)
            scheduler = worker.prefill if to_prefill else worker.decode
            self._settle(worker, scheduler.handle(event, self.now_s))

    def _probe(self, worker: Worker, peer: Incarnation, link: int) -> None:
        """Some time later it knows what the link costs."""
        cost = AnyWay(Random(self.random.random()))
        event = LinkMeasured(peer=peer, cost=cost)  # type: ignore[arg-type]

        def measured() -> None:
            if worker.links.get(peer) == link:
                self._settle(worker, worker.decode.handle(event, self.now_s))

        self.by(worker.incarnation, f"probe {worker.incarnation}", measured, 0.1)

    def _write(self, worker: Worker, job: WriteSlab) -> None:
        lent, error = job.lent, None
        owner = self.workers.get(job.peer)
        link = worker.links.get(job.peer)
        if (
            owner is None
            or link is None
            or link in self._broken
            or lent.region not in owner.regions
        ):
            error = "the region is gone"
        else:
            source = Side(tables=job.tables, block_size=worker.shape.layout.block_size)
            filled = owner.fill(job, worker.memory.take(job.write, source))
            self._send(worker, SendPeer(peer=job.peer, message=filled))
        written = SlabWritten(key=lent.key, piece=lent.piece, bytes=1, seconds=0, error=error)
        self._settle(worker, worker.prefill.handle(written, self.now_s))

    def _fetch(self, worker: Worker, job: FetchPiece) -> None:
        """The reader maps the memory: it reads on when the link breaks while it does."""
        fetch: Fetch | None = None

        def begin() -> None:
            nonlocal fetch
            owner, link = self.workers.get(job.peer), worker.links.get(job.peer)
            if owner is not None and link is not None:
                fetch = Fetch(reader=worker, owner=owner.memory, job=job)
                fetch.first_half()

        def end() -> None:
            event = fetched(job, "it is gone") if fetch is None else fetch.second_half()
            self._settle(worker, worker.decode.handle(event, self.now_s))

        self._move(worker, begin)
        self._move(worker, end, self.random.choice([0.01, 0.5]))

    def _scatter(self, worker: Worker, job: ScatterSlab) -> None:
        self._settle(worker, worker.decode.handle(worker.scatter(job), self.now_s))

    def _digest(self, worker: Worker, job: DigestBlocks) -> None:
        scheduler = worker.prefill if job.holder.side == "prefill" else worker.decode
        self._settle(worker, scheduler.handle(worker.digest(job), self.now_s))

    def _replace(self, worker: Worker, slab_id: SlabId) -> None:
        event = worker.replace(slab_id, f"{worker.incarnation}-new-{next(self._ids)}")
        self._settle(worker, worker.decode.handle(event, self.now_s))
