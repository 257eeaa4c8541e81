"""The pool nodes of the simulated hosts, their links to workers and their streams to routers.

Nodes die and come back with what is on their disk, stop for a while, and links break at any moment;
each end notices in its own time.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import count
from typing import TYPE_CHECKING

from kvpool.core.fetch.client_events import OWN_NODE
from kvpool.core.node.events import (
    DropRouter,
    DropWorker,
    FromPoolWorker,
    PoolCommand,
    PoolTick,
    PoolWorkerJoined,
    PoolWorkerLost,
    RouterCall,
    RouterCalled,
    RouterHungUp,
    RouterTook,
    TellRouter,
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
from kvrelay.messages import PoolUpdate
from kvrelay.types import WIRE_VERSION, Incarnation
from router.core.events import PoolNodeLost, PoolNodeSaid
from tests.sim.contents import GARBAGE
from tests.sim.pool_links import Link, SimulatedPoolLinks
from tests.sim.pool_node import Host, PoolNode
from tests.sim.simulation import LEASE_S
from tests.sim.worker import Worker

if TYPE_CHECKING:
    from tests.sim.cluster import Cluster
    from tests.sim.routers import RouterLife


class PoolNet:
    def __init__(self, cluster: Cluster) -> None:
        self._simulation = cluster
        self._calls: dict[RouterCall, tuple[RouterLife, PoolNode]] = {}
        self.hosts: dict[str, Host] = {}
        self.sides: dict[Incarnation, SimulatedPoolLinks] = {}
        self._links: dict[int, tuple[Link, SimulatedPoolLinks]] = {}
        self._numbers = count(1)

    # --- lives ----------------------------------------------------------------------------------

    def start_node(self, host: Host) -> None:
        self.open_node(host)
        for router in self._simulation.routers.values():
            self.announce(host, router)

    def open_node(self, host: Host) -> PoolNode:
        """No router knows it yet."""
        self.hosts[host.name] = host
        host.lives += 1
        node = PoolNode(self._simulation, host, lambda command: self._obey(node, command))
        host.node = node
        self._simulation.born(node.incarnation)
        for side in self.sides.values():
            if side.host == host.name:
                self._connect_later(side)
        return node

    def announce(self, host: Host, router: RouterLife) -> None:
        """The router asks the node what it holds, unless it has done so."""
        node = host.node
        if node is None or (router, node) in self._calls.values():
            return
        call = RouterCall(next(self._numbers))
        self._calls[call] = router, node
        called = RouterCalled(router=call)
        self._simulation.by(
            node.incarnation, f"{router.name} calls", lambda: node.decide(called), 0.2
        )

    def kill_node(self, host: Host) -> PoolNode | None:
        """Before or after its workers and routers have noticed it may come back."""
        node, host.node = host.node, None
        if node is None:
            return None
        self._simulation.die(node.incarnation)
        for link, _ in list(self._links.values()):
            if link.node is node:
                self.cut(link)
        for call, (router, called) in list(self._calls.items()):
            if called is node:
                lost = partial(self._lost_node, call)
                self._by_router(router, node, lost, 0.2)
        return node

    def _lost_node(self, call: RouterCall) -> None:
        router, node = self._calls.pop(call)
        router.handle(PoolNodeLost(node=node.incarnation))

    def router_died(self, router: RouterLife) -> None:
        for call, (caller, node) in list(self._calls.items()):
            if caller is router:
                del self._calls[call]
                gone = RouterHungUp(router=call)
                self._simulation.by(
                    node.incarnation, f"{router.name} calls", partial(node.decide, gone), 0.2
                )

    def _by_router(
        self, router: RouterLife, node: PoolNode, action: Callable[[], None], scale_s: float = 0.01
    ) -> None:
        channel = f"{node.incarnation} to {router.incarnation}"
        self._simulation.by(router.incarnation, channel, action, scale_s)

    def join(self, worker: Worker) -> SimulatedPoolLinks:
        side = self.sides[worker.incarnation] = SimulatedPoolLinks(worker, self)
        self._connect_later(side)
        return side

    def worker_died(self, incarnation: Incarnation) -> None:
        side = self.sides.pop(incarnation, None)
        for link in [] if side is None else [*side.links.values()]:
            self.cut(link)

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
        if side.link is None and node is not None:
            self._open(side, node, OWN_NODE)

    def reach(self, side: SimulatedPoolLinks, node: Incarnation) -> None:
        def connect() -> None:
            found = [host.node for host in self.hosts.values() if host.node is not None]
            there = next((one for one in found if one.incarnation == node), None)
            if there is None:
                side.unreachable(node)
            else:
                self._open(side, there, node)

        self._simulation.by(side.incarnation, f"connect {side.incarnation} {node}", connect, 0.2)

    def _open(self, side: SimulatedPoolLinks, node: PoolNode, name: Incarnation) -> None:
        link = side.links[name] = Link(next(self._numbers), node, name)
        self._links[link.number] = link, side
        hello = PoolHello(
            wire_version=WIRE_VERSION,
            incarnation=side.incarnation,
            format=PoolFormat(fingerprint="f", physical_format="float32", block_bytes=1),
            looks_up=name == OWN_NODE,
        )
        self.send(link, hello)

    def _worker_lost(self, side: SimulatedPoolLinks, link: Link) -> None:
        if side.links.get(link.name) is link:
            side.lost(link)
            if link.name == OWN_NODE:
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
            if side.links.get(link.name) is link and not link.broken:
                side.heard(link, sent)  # type: ignore[arg-type]

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
            if before in self._links:
                self.cut(self._links[before][0])
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
            case TellRouter():
                self._update(node, command)
            case DropWorker(reason=reason) | DropRouter(reason=reason):
                raise AssertionError(f"an honest one is dropped: {reason}")

    def _update(self, node: PoolNode, told: TellRouter) -> None:
        """The router hears it as long as it hasn't noticed that the node died."""
        update = PoolUpdate(
            sequence=told.sequence,
            node=node.incarnation,
            addresses=(f"sim:{node.incarnation}",),
            workers=told.workers,
            blocks=told.blocks,
        )

        called = self._calls.get(told.router)
        if called is None:
            return
        router = called[0]

        def arrive() -> None:
            router.handle(PoolNodeSaid(update=update))
            took = RouterTook(router=told.router)
            self._simulation.let(node.incarnation, lambda: node.decide(took))

        self._by_router(router, node, arrive)

    def validate(self) -> None:
        for host in self.hosts.values():
            if host.node is not None:
                host.node.validate()


def _over_the_wire(message: PoolMessage) -> PoolMessage:
    assembler = Assembler()
    found = [assembler.add(part) for part in encode(message)]
    assert found[-1] is not None
    return found[-1]
