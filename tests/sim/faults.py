"""What may go wrong in a simulated cluster, at any moment, and how often it did."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from random import Random
from typing import TypeVar

from cluster.worker.events import RunOnLoop
from tests.sim.clients import Clients
from tests.sim.contents import GARBAGE
from tests.sim.controller import Controller
from tests.sim.pool_node import Host
from tests.sim.routers import RouterLife, Stream
from tests.sim.worker import Worker

_T = TypeVar("_T")
SHORT_S = (0.3, 1.5, 3.0)
"""A pause that a cluster overlooks, or that makes a worker suspect."""
LONG_S = (8.0, 30.0)
"""A pause after which a worker is lost."""
DRAIN_TIMEOUT_S = 20.0


class Faults:
    """`counts`: # fault |-> how often it happened"""

    def __init__(self, clients: Clients, controller: Controller | None, rng: Random) -> None:
        self.clients, self.cluster = clients, clients.cluster
        self.counts: Counter[str] = Counter()
        self._controller, self._rng = controller, rng

    @property
    def kinds(self) -> dict[str, Callable[[], bool]]:
        """Each returns whether there was anything to disturb."""
        return {
            "worker killed": self._kill_worker,
            "worker leaves": self._let_worker_leave,
            "worker stands still for a moment": partial(self._stop_worker, SHORT_S),
            "worker stands still for long": partial(self._stop_worker, LONG_S),
            "stream of a router broken": self._break_stream,
            "stream of a router half open": self._half_open_stream,
            "peers cut off": self._cut_peers,
            "peers half open": self._half_open_peers,
            "copies stall": self._stall,
            "router killed": self._kill_router,
            "router stands still for a moment": partial(self._stop_router, SHORT_S),
            "router stands still for long": partial(self._stop_router, LONG_S),
            "pool node killed": self._kill_pool_node,
            "pool node stands still": self._stop_pool_node,
            "pool cut off": self._cut_pool,
            "disk damaged": self._damage_disk,
            "stray write into a pool": self._stray_write,
            "controller killed": self._kill_controller,
            "controller stands still": self._stop_controller,
            "client leaves": self._leave,
        }

    def strike(self) -> None:
        name, fault = self._rng.choice([*self.kinds.items()])
        self.counts[name] += fault()

    # --- processes that stand still -------------------------------------------------------------

    def _stop(self, process: str, seconds: tuple[float, ...]) -> None:
        self.cluster.stop(process)
        again_s = self.cluster.now_s + self._rng.choice(seconds)
        self.cluster.at(again_s, partial(self.cluster.resume, process))

    def _stop_worker(self, seconds: tuple[float, ...]) -> bool:
        return self._with(self._workers(), lambda one: self._stop(one.incarnation, seconds))

    def _stop_router(self, seconds: tuple[float, ...]) -> bool:
        def stop(router: RouterLife) -> None:
            self._stop(router.incarnation, seconds)
            self.clients.router_stopped(router)

        return self._with(self._spare_routers(), stop)

    def _stop_pool_node(self) -> bool:
        def stop(host: Host) -> None:
            assert host.node is not None
            self._stop(host.node.incarnation, SHORT_S + LONG_S)

        return self._with(self._hosts(), stop)

    def _stop_controller(self) -> bool:
        return self._of_controller(lambda one: self._stop(one.name, SHORT_S + LONG_S))

    # --- processes that die ---------------------------------------------------------------------

    def _kill_worker(self) -> bool:
        return self._with(self._workers(), lambda one: self.cluster.kill(one.incarnation))

    def _let_worker_leave(self) -> bool:
        """It drains, and ends when it is empty, or is cut."""

        def leave(worker: Worker) -> None:
            drain = RunOnLoop(worker.core.drain)
            self.cluster.let(worker.incarnation, lambda: worker.post(drain))
            self._end_once_empty(worker, self.cluster.now_s + DRAIN_TIMEOUT_S)

        return self._with([one for one in self._workers() if not one.core.draining], leave)

    def _end_once_empty(self, worker: Worker, until_s: float) -> None:
        """A dead one doesn't leave."""
        now_s, life = self.cluster.now_s, worker.incarnation
        is_empty = worker.core.empty
        if is_empty or now_s >= until_s:
            self.counts["workers that were empty when they left"] += is_empty
            self.cluster.kill(life)
        elif life in self.cluster.workers:
            self.cluster.at(now_s + 0.05, partial(self._end_once_empty, worker, until_s))

    def _kill_router(self) -> bool:
        return self._with(self._spare_routers(), lambda one: self.cluster.kill_router(one.name))

    def _kill_pool_node(self) -> bool:
        return self._with(self._hosts(), self.cluster.kill_pool_node)

    def _kill_controller(self) -> bool:
        return self._of_controller(lambda one: one.kill())

    # --- connections ----------------------------------------------------------------------------

    def _break_stream(self) -> bool:
        return self._with(
            self._streams(), lambda one: self.cluster.break_stream(one.worker, one.router)
        )

    def _half_open_stream(self) -> bool:
        return self._with(self._streams(), self.cluster.half_open_stream)

    def _cut_peers(self) -> bool:
        def cut(worker: Worker) -> None:
            for peer in sorted(worker.links):
                self.cluster.cut(worker.incarnation, peer)

        return self._with([one for one in self._workers() if one.links], cut)

    def _half_open_peers(self) -> bool:
        def cut(worker: Worker) -> None:
            self.cluster.half_open_peers(worker.incarnation, self._rng.choice(sorted(worker.links)))

        return self._with([one for one in self._workers() if one.links], cut)

    def _stall(self) -> bool:
        """From now on some of a worker's copies never end by themselves, for a while."""

        def stall(worker: Worker) -> None:
            worker.mover.hangs = lambda job: self._rng.random() < 0.5
            self.cluster.at(self.cluster.now_s + 3.0, partial(_flow, worker))

        return self._with(self._workers(), stall)

    def _cut_pool(self) -> bool:
        links = [link for side in self.cluster.pools.sides.values() for link in side.links.values()]
        return self._with([one for one in links if not one.broken], self.cluster.pools.cut)

    # --- contents, and clients ------------------------------------------------------------------

    def _damage_disk(self) -> bool:
        return self._with(
            [host for host in self._hosts() if host.slots], self.cluster.pools.damage_disk
        )

    def _stray_write(self) -> bool:
        def write(host: Host) -> None:
            assert host.node is not None
            host.node.places[self._rng.randrange(host.places)] = GARBAGE

        return self._with(self._hosts(), write)

    def _leave(self) -> bool:
        running = [name for name, one in self.clients.calls.items() if one.face is not None]
        return self._with(running, self.clients.abort)

    # --- what there is --------------------------------------------------------------------------

    def _with(self, found: list[_T], action: Callable[[_T], object]) -> bool:
        if found:
            action(self._rng.choice(found))
        return bool(found)

    def _workers(self) -> list[Worker]:
        return [*self.cluster.workers.values()]

    def _hosts(self) -> list[Host]:
        return [host for host in self.cluster.pools.hosts.values() if host.node is not None]

    def _streams(self) -> list[Stream]:
        return [one for router in self.cluster.routers.values() for one in router.streams.values()]

    def _spare_routers(self) -> list[RouterLife]:
        """Those without which clients find another one: they don't try for long."""
        running = [
            one
            for one in self.cluster.routers.values()
            if not self.cluster.is_stopped(one.incarnation)
        ]
        return running if len(running) > 1 else []

    def _of_controller(self, action: Callable[[Controller], None]) -> bool:
        if self._controller is None or not self._controller.is_whole():
            return False
        action(self._controller)
        return True


def _flow(worker: Worker) -> None:
    worker.mover.hangs = lambda job: False
