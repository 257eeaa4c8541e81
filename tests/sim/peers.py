"""The network between simulated workers. A broken link loses what is on its way."""

from __future__ import annotations

from functools import partial
from itertools import count
from random import Random
from typing import TYPE_CHECKING

from kvpool.core.transfer.commands import DropLink, FromPeer, LinkMeasured, PeerLost, SendPeer
from kvpool.core.transfer.messages import PeerHello
from kvpool.transport.peer.base import MAX_MESSAGE_BYTES
from kvpool.wire.peer import decode, encode
from kvrelay.errors import FailureReason
from kvrelay.types import Incarnation
from tests.sim.model import AnyWay
from tests.sim.simulation import TICK_S, Simulation
from tests.sim.worker import Shape, Worker

if TYPE_CHECKING:
    from tests.sim.pool_links import SimulatedPoolLinks


class PeerNet(Simulation):
    """`workers` are those that live. With `measures` each worker learns what its links cost."""

    def __init__(self, seed: int, *, measures: bool = True, tick_s: float = TICK_S) -> None:
        super().__init__(seed, tick_s=tick_s)
        self.workers: dict[Incarnation, Worker] = {}
        self._measures = measures
        self._broken: set[int] = set()  # connections
        self._ids = count(1)

    def next_id(self) -> int:
        return next(self._ids)

    def open_pool(self, worker: Worker) -> SimulatedPoolLinks | None:
        return None

    def add_worker(self, name: str, life: int, shape: Shape) -> Worker:
        worker = Worker(self, name, life, shape)
        self.workers[worker.incarnation] = worker
        self.born(worker.incarnation)
        return worker

    def on_tick(self) -> None:
        for worker in list(self.workers.values()):
            self.let(worker.incarnation, worker.tick)

    def validate(self) -> None:
        for worker in self.workers.values():
            worker.validate()

    # --- links ----------------------------------------------------------------------------------

    def linked(self, worker: Worker, peer: Incarnation) -> Worker | None:
        """The peer, if it lives and the link to it is whole."""
        link = worker.links.get(peer)
        return None if link is None or link in self._broken else self.workers.get(peer)

    def cut(self, one: Incarnation, other: Incarnation) -> None:
        """Break the connection of two workers; each side notices in its own time."""
        for mine, theirs in ((one, other), (other, one)):
            worker = self.workers.get(mine)
            if worker is not None and theirs in worker.links:
                link = worker.links[theirs]
                self._break(link)
                self._notice(mine, theirs, link)

    def half_open_peers(self, one: Incarnation, other: Incarnation) -> None:
        """Nothing comes through their connection any more. The other side notices soon, and this
        one after long."""
        for mine, theirs, scale_s in ((one, other, 8.0), (other, one, 0.1)):
            worker = self.workers.get(mine)
            if worker is not None and theirs in worker.links:
                link = worker.links[theirs]
                self._broken.add(link)
                self._notice(mine, theirs, link, scale_s)

    def drop(self, worker: Worker, command: DropLink) -> None:
        """The worker hears of its loss at once, the peer in its own time."""
        me, peer = worker.incarnation, command.peer
        link = worker.links.get(peer)
        if link is None:
            return
        if link not in self._broken and peer in self.workers:
            self._notice(peer, me, link)
        self._break(link)
        lost = partial(self._lost, me, peer, link, FailureReason.TRANSFER_TIMEOUT)
        self.by(me, f"dropped {me} {link}", lost, 1e-6)

    def _break(self, link: int) -> None:
        self._broken.add(link)
        for worker in self.workers.values():
            worker.mover.broken(link)

    def _notice(
        self, mine: Incarnation, theirs: Incarnation, link: int, scale_s: float | None = None
    ) -> None:
        scale_s = scale_s or self.random.choice([0.01, 0.1, 1.0])
        lost = partial(self._lost, mine, theirs, link)
        self.by(mine, f"notice {mine} {link}", lost, scale_s)

    def _lost(
        self,
        mine: Incarnation,
        theirs: Incarnation,
        link: int,
        failure: FailureReason = FailureReason.PEER_LOST,
    ) -> None:
        worker = self.workers[mine]
        worker.mover.broken(link)
        if worker.links.get(theirs) == link:
            del worker.links[theirs]
            worker.post(PeerLost(peer=theirs, reason="lost", failure=failure))

    def send(self, worker: Worker, command: SendPeer) -> None:
        """Connects for a message with addresses, drops an answer without."""
        peer = command.peer
        if peer not in worker.links:
            if not command.addresses:
                return
            worker.links[peer] = next(self._ids)
            if peer not in self.workers:
                self._broken.add(worker.links[peer])
                self._notice(worker.incarnation, peer, worker.links[peer])
                return
            self.send(worker, SendPeer(peer=peer, message=worker.peer_hello))
        link, payload = worker.links[peer], encode(command.message)
        assert len(payload) <= MAX_MESSAGE_BYTES
        hear = partial(self._hear, worker.incarnation, peer, link, payload)
        self.by(peer, f"{worker.incarnation} {link}", hear)

    def _hear(self, sender: Incarnation, to: Incarnation, link: int, payload: bytes) -> None:
        worker = self.workers.get(to)
        if worker is None or link in self._broken:
            return
        if worker.links.get(sender) != link:
            worker.links[sender] = link
            self.send(worker, SendPeer(peer=sender, message=worker.peer_hello))
        message = decode(payload)
        worker.post(FromPeer(peer=sender, message=message))
        if isinstance(message, PeerHello) and self._measures:
            self._probe(worker, sender, link)

    def _probe(self, worker: Worker, peer: Incarnation, link: int) -> None:
        """Some time later it knows what the link costs."""
        cost = AnyWay.of(Random(self.random.random()))

        def measured() -> None:
            if worker.links.get(peer) == link:
                worker.post(LinkMeasured(peer=peer, cost=cost))

        self.by(worker.incarnation, f"probe {worker.incarnation}", measured, 0.1)
