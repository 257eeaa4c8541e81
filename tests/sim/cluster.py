"""Routers and workers without devices: the real cores and loops, a virtual clock, random delays.

Workers and routers die and come back as new incarnations, their streams and peer connections break
at any moment. What was on its way over a broken one is lost; the ends notice at different times.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import count
from random import Random

from kvrelay.messages import Preload
from kvrelay.types import Incarnation, RequestSpec
from router.core.core import RouterCore
from router.core.events import Command
from router.core.faults.silence import PERIOD_S
from router.core.policy.choice import DEFAULT_POLICIES, Policies
from router.core.start import Beginning
from tests.sim.controller import Controller
from tests.sim.model import TIERS
from tests.sim.peers import PeerNet
from tests.sim.pool_links import SimulatedPoolLinks
from tests.sim.pool_net import PoolNet
from tests.sim.pool_node import Host
from tests.sim.routers import RouterLife, Stream
from tests.sim.simulation import TICK_S
from tests.sim.worker import Shape, Worker

PING_S = 15.0
"""A router has lost a connection over which no ping was answered for so long."""
ON_ITS_OWN_S = 0.5
"""After about so long a dead process is back, where nobody else sees to it."""


class Cluster(PeerNet):
    """`on_command` gets what a router's core says to clients. With a tick as often as routers look
    for silent workers they do so. `dies`: who hears that a process has ended, by its name; without
    anybody it comes back by itself."""

    def __init__(
        self,
        seed: int,
        on_command: Callable[[RouterLife, Command], None],
        policies: Policies = DEFAULT_POLICIES,
        *,
        tick_s: float = TICK_S,
    ) -> None:
        super().__init__(seed, tick_s=tick_s)
        self.seed = seed
        self.pools = PoolNet(self)
        self.routers: dict[str, RouterLife] = {}  # those that live
        self.controller: Controller | None = None
        self.counts: Counter[str] = Counter()  # of routers that have died
        self.dies: Callable[[str, Incarnation], None] | None = None
        self.router_died: Callable[[RouterLife], None] = lambda life: None
        self._policies = policies
        self._on_command = on_command
        self._lives = count()

    @property
    def core(self) -> RouterCore:
        """Of the first router."""
        return next(iter(self.routers.values())).core

    def on_tick(self) -> None:
        self.pools.tick()
        super().on_tick()
        if self.controller is not None:
            self.controller.tick()
        if self.tick_s <= PERIOD_S:
            for router in [*self.routers.values()]:
                self.let(router.incarnation, router.look)

    def validate(self) -> None:
        for router in self.routers.values():
            router.validate()
        super().validate()
        self.pools.validate()

    # --- routers --------------------------------------------------------------------------------

    def start_router(self, name: str) -> RouterLife:
        """It knows nobody yet."""
        life = next(self._lives)
        own = Random(f"{self.seed} {name} {life}")
        beginning = Beginning(
            first_attempt=own.getrandbits(30),
            seed=own.getrandbits(62),
            policies=self._policies,
            tiers=TIERS,
        )
        router = RouterLife(self, name, life, beginning, self._on_command)
        self.routers[name] = router
        self.born(router.incarnation)
        return router

    def open_router(self, name: str) -> RouterLife:
        """It uses all workers and pool nodes."""
        router = self.start_router(name)
        for worker in self.workers:
            router.announce(worker)
        for host in self.pools.hosts.values():
            self.pools.announce(host, router)
        return router

    def kill_router(self, name: str) -> None:
        router = self.routers.pop(name)
        self.die(router.incarnation)
        self.pools.router_died(router)
        self.counts += router.counts
        for stream in router.streams.values():
            stream.is_deaf = self.random.random() < 0.5
            stream.end()
        self.router_died(router)
        self._ended(name, router.incarnation, lambda: self.open_router(name))

    def _ended(self, name: str, life: Incarnation, again: Callable[[], object]) -> None:
        if self.dies is not None:
            self.dies(name, life)
        else:
            self.after(f"restart {life}", again, ON_ITS_OWN_S)

    # --- workers --------------------------------------------------------------------------------

    def open_worker(self, name: str, shape: Shape) -> Worker:
        """No router knows it yet."""
        return self.add_worker(name, next(self._lives), shape)

    def start_worker(self, name: str, shape: Shape) -> None:
        worker = self.open_worker(name, shape)
        for router in self.routers.values():
            router.announce(worker.incarnation)

    def open_pool(self, worker: Worker) -> SimulatedPoolLinks | None:
        return self.pools.join(worker) if worker.shape.host else None

    def kill(self, incarnation: Incarnation, *, for_good: bool = False) -> None:
        """It comes back as another, before or after its peers and its routers have noticed."""
        dead = self.workers.pop(incarnation, None)
        if dead is None:
            return
        self.die(incarnation)
        self.pools.worker_died(incarnation)
        for router in self.routers.values():
            missed = partial(router.lose, incarnation)
            self.by(router.incarnation, f"{router.name} misses {incarnation}", missed, 0.2)
        for peer in list(dead.links):
            self.cut(incarnation, peer)
        if not for_good:
            again = partial(self.start_worker, dead.hello.name, dead.shape)
            self._ended(dead.hello.name, incarnation, again)

    def kill_pool_node(self, host: Host) -> None:
        node = self.pools.kill_node(host)
        if node is not None:
            again = partial(self.pools.start_node, host)
            self._ended(f"pool-{host.name}", node.incarnation, again)

    # --- streams between them -------------------------------------------------------------------

    def break_stream(self, incarnation: Incarnation, router: RouterLife | None = None) -> None:
        """The router notices at once and attaches again; the worker notices some time later."""
        router = router or next(iter(self.routers.values()))
        stream = router.streams.get(incarnation)
        if stream is not None:
            stream.is_deaf = stream.is_mute = True
            self.let(router.incarnation, partial(self._loses, stream))
            stream.end()

    def half_open_stream(self, stream: Stream) -> None:
        """Nothing comes through it any more. The worker thinks that it is up for long, or has
        noticed at once. The router finds it silent, or has no answer to a ping."""
        stream.is_deaf = stream.is_mute = True
        stream.end(self.random.choice([0.01, 8.0]))
        loses = partial(self.let, stream.router.incarnation, partial(self._loses, stream))
        self.at(self.now_s + PING_S, loses)

    def _loses(self, stream: Stream) -> None:
        if stream.router.streams.get(stream.worker) is stream:
            stream.router.lose(stream.worker)

    def preload(self, incarnation: Incarnation, spec: RequestSpec) -> None:
        """The routers want this prompt computed and pinned."""
        for router in self.routers.values():
            router.tell(incarnation, Preload(spec=spec))
