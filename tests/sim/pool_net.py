"""The pool nodes of the simulated hosts and their workers' links to them.

Nodes die and come back with what is on their disk, stop for a while, and links break at any moment;
each end notices in its own time.
"""

from __future__ import annotations

from functools import partial
from itertools import count

from kvpool.core.node.events import (
    DropWorker,
    FromPoolWorker,
    PoolCommand,
    PoolTick,
    PoolWorkerJoined,
    PoolWorkerLost,
    TellWorker,
)
from kvpool.core.node.messages import (
    FromPool,
    PoolFormat,
    PoolHello,
    PoolMessage,
    PoolWelcome,
    ToPool,
)
from kvpool.wire.pool import Assembler, encode
from kvrelay.types import WIRE_VERSION, Incarnation
from tests.sim.contents import GARBAGE
from tests.sim.pool_links import Link, SimulatedPoolLinks
from tests.sim.pool_node import Host, PoolNode
from tests.sim.simulation import LEASE_S, Simulation
from tests.sim.worker import Worker


class PoolNet:
    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self.hosts: dict[str, Host] = {}
        self.sides: dict[Incarnation, SimulatedPoolLinks] = {}
        self._links: dict[int, tuple[Link, SimulatedPoolLinks]] = {}
        self._numbers = count(1)

    # --- lives ----------------------------------------------------------------------------------

    def start_node(self, host: Host) -> None:
        self.hosts[host.name] = host
        host.lives += 1
        node = PoolNode(self._simulation, host, lambda command: self._obey(node, command))
        host.node = node
        self._simulation.born(node.incarnation)
        for side in self.sides.values():
            if side.host == host.name:
                self._connect_later(side)

    def kill_node(self, host: Host) -> None:
        """It comes back, before or after its workers have noticed."""
        node, host.node = host.node, None
        if node is None:
            return
        self._simulation.die(node.incarnation)
        for link, _ in list(self._links.values()):
            if link.node is node:
                self.cut(link)
        restart = partial(self.start_node, host)
        self._simulation.after(f"restart {node.incarnation}", restart, 0.5)

    def join(self, worker: Worker) -> SimulatedPoolLinks:
        side = self.sides[worker.incarnation] = SimulatedPoolLinks(worker, self.send)
        self._connect_later(side)
        return side

    def worker_died(self, incarnation: Incarnation) -> None:
        side = self.sides.pop(incarnation, None)
        if side is not None and side.link is not None:
            self.cut(side.link)

    def tick(self) -> None:
        for host in self.hosts.values():
            if host.node is not None:
                node = host.node
                self._simulation.let(node.incarnation, lambda n=node: n.decide(PoolTick()))

    def damage_disk(self, host: Host) -> None:
        if host.slots:
            place = self._simulation.random.choice(list(host.slots))
            host.slots[place].content = GARBAGE

    # --- links ----------------------------------------------------------------------------------

    def cut(self, link: Link) -> None:
        """What is on its way is lost."""
        if link.broken:
            return
        link.broken = True
        _, side = self._links.pop(link.number)
        number, node = link.number, link.node
        self._simulation.by(
            side.incarnation, f"notice {number}", lambda: self._worker_lost(side, link), 0.2
        )
        self._simulation.by(
            node.incarnation, f"node notices {number}", lambda: self._node_lost(node, number), 0.2
        )

    def _connect_later(self, side: SimulatedPoolLinks) -> None:
        name = side.incarnation
        self._simulation.by(name, f"connect {name}", lambda: self._connect(side), 0.2)

    def _connect(self, side: SimulatedPoolLinks) -> None:
        node = self.hosts[side.host].node
        if side.link is not None or node is None:
            return
        side.link = Link(next(self._numbers), node)
        self._links[side.link.number] = side.link, side
        hello = PoolHello(
            wire_version=WIRE_VERSION,
            incarnation=side.incarnation,
            format=PoolFormat(fingerprint="f", physical_format="float32", block_bytes=1),
            looks_up=True,
        )
        self.send(side.link, hello)

    def _worker_lost(self, side: SimulatedPoolLinks, link: Link) -> None:
        if side.link is link:
            side.lost()
            self._connect_later(side)

    def send(self, link: Link, message: ToPool) -> None:
        sent, node = _over_the_wire(message), link.node

        def arrive() -> None:
            if not link.broken:
                self._heard(node, link, sent)

        self._simulation.by(node.incarnation, f"up {link.number}", arrive)

    def _tell(self, number: int, message: FromPool) -> None:
        if number not in self._links:
            return
        link, side = self._links[number]
        sent = _over_the_wire(message)

        def arrive() -> None:
            if side.link is link and not link.broken:
                side.heard(sent)  # type: ignore[arg-type]

        self._simulation.by(side.incarnation, f"down {number}", arrive)

    # --- nodes ----------------------------------------------------------------------------------

    def _heard(self, node: PoolNode, link: Link, message: PoolMessage) -> None:
        """As PoolLoop does."""
        if isinstance(message, PoolHello):
            self._greeted(node, link, message)
        elif link.number in node.worker_of:
            worker = node.worker_of[link.number]
            node.decide(FromPoolWorker(worker=worker, message=message))  # type: ignore[arg-type]

    def _greeted(self, node: PoolNode, link: Link, hello: PoolHello) -> None:
        before = node.link_of.get(hello.incarnation)
        if before is not None:
            self._node_lost(node, before)
        node.worker_of[link.number] = hello.incarnation
        node.link_of[hello.incarnation] = link.number
        welcome = PoolWelcome(
            wire_version=WIRE_VERSION,
            incarnation=node.incarnation,
            region=node.region,
            lease_ttl_s=LEASE_S,
        )
        self._tell(link.number, welcome)
        node.decide(PoolWorkerJoined(worker=hello.incarnation, looks_up=hello.looks_up))

    def _node_lost(self, node: PoolNode, number: int) -> None:
        worker = node.worker_of.pop(number, None)
        if worker is not None and node.link_of.get(worker) == number:
            del node.link_of[worker]
            node.decide(PoolWorkerLost(worker=worker))

    def _obey(self, node: PoolNode, command: PoolCommand) -> None:
        match command:
            case TellWorker(worker=worker, message=message):
                if worker in node.link_of:
                    self._tell(node.link_of[worker], message)
            case DropWorker(reason=reason):
                raise AssertionError(f"an honest worker is dropped: {reason}")

    def validate(self) -> None:
        for host in self.hosts.values():
            if host.node is not None:
                host.node.validate()


def _over_the_wire(message: PoolMessage) -> PoolMessage:
    assembler = Assembler()
    found = [assembler.add(part) for part in encode(message)]
    assert found[-1] is not None
    return found[-1]
