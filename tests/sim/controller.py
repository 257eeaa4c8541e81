"""The controller of a simulated cluster: the real supervisor, over processes that start late, die
and stand still. It is a process itself, and its processes outlive it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import TYPE_CHECKING

from cluster.core.desired import Desired, pool_of
from cluster.core.members import NEW, Former
from cluster.core.processes import pool_process
from cluster.core.supervision import (
    Announce,
    DesiredPool,
    Home,
    Lost,
    Phase,
    PingProcess,
    Placed,
    ProcessAnswered,
    ProcessJoined,
    ProcessKind,
    Remove,
    Serving,
    Start,
    SupervisionTick,
    SupervisorCommand,
    SupervisorEvent,
    Withdraw,
)
from cluster.core.supervisor import Limits, Supervisor
from kvrelay.types import Incarnation, Role
from tests.sim.pool_node import Host
from tests.sim.worker import Shape

if TYPE_CHECKING:
    from tests.sim.cluster import Cluster

LIMITS = Limits(startup_timeout_s=600.0, hang_timeout_s=20.0)
STARTS_S = 0.5


@dataclass(slots=True)
class Process:
    """`number` is its start's, as the controller counts."""

    incarnation: Incarnation
    number: int


class Controller:
    """`name` is of its process, another one after each of its own starts."""

    def __init__(
        self, cluster: Cluster, routers: list[str], shapes: Mapping[str, Shape], hosts: list[Host]
    ) -> None:
        self.cluster = cluster
        self.counts: Counter[str] = Counter()
        self._routers, self._shapes = routers, shapes
        self._hosts = {pool_process(host.name): host for host in hosts}
        self._running: dict[str, Process] = {}
        self._lives = count()
        self._begin(NEW)
        cluster.dies = self._died

    # --- its own lives --------------------------------------------------------------------------

    def _begin(self, former: Former) -> None:
        self.name = f"controller.{next(self._lives)}"
        self.cluster.born(self.name)
        self.core = Supervisor(
            self._desired(),
            LIMITS,
            self.cluster.now_s,
            pool_needs="{}" if self._hosts else None,
            former=former,
        )

    def _desired(self) -> Desired:
        routers = DesiredPool(kind=ProcessKind.ROUTER, count=len(self._routers))
        counts = Counter(pool_of(name) for name in self._shapes)
        return {"router": routers} | {
            pool: DesiredPool(kind=ProcessKind.WORKER, count=count, role=Role(pool))
            for pool, count in counts.items()
        }

    def kill(self) -> None:
        """It is back a little later, with the phase that it wrote down."""
        self.cluster.die(self.name)
        self.cluster.after(f"restart {self.name}", self._begin_again, 1.0)

    def _begin_again(self) -> None:
        self._begin(Former(phase=self.core.phase, left=frozenset(self._running)))

    def tick(self) -> None:
        name = self.name
        self.cluster.let(name, lambda: self._handle(name, SupervisionTick()))

    def is_whole(self) -> bool:
        """It runs, and so do all its processes."""
        wanted = {*self._routers, *self._shapes, *self._hosts}
        runs = self.name in self.cluster.alive and self.core.phase is Phase.READY
        return runs and self._running.keys() == wanted

    # --- its core -------------------------------------------------------------------------------

    def tell(self, event: SupervisorEvent, scale_s: float = 0.01) -> None:
        name = self.name
        self.cluster.by(name, name, lambda: self._handle(name, event), scale_s)

    def _handle(self, name: str, event: SupervisorEvent) -> None:
        assert name == self.name
        for command in self.core.handle(event, self.cluster.now_s):
            self._execute(command)
        self.core.validate()
        assert self.core.error is None, self.core.error

    def _execute(self, command: SupervisorCommand) -> None:
        match command:
            case Start():
                self._start(command)
            case Announce():
                self._at_router(command.router, partial(self._announce, command))
            case Withdraw(address=address, kind=ProcessKind.WORKER):
                gone = Incarnation(address)
                self._at_router(
                    command.router, lambda: self.cluster.routers[command.router].withdraw(gone)
                )
            case PingProcess():
                self._ping(command)
            case Remove(name=name):
                self._remove(name)

    # --- processes ------------------------------------------------------------------------------

    def _start(self, command: Start) -> None:
        """One that a controller before this one has started goes on."""
        if command.name in self._shapes:
            home = Home(self._shapes[command.name].host or "h", "node")
            self.tell(Placed(name=command.name, life=command.life, home=home))
        started = partial(self._started, self.name, command)
        self.cluster.after(f"{self.name} starts {command.name}", started, STARTS_S)

    def _started(self, controller: str, command: Start) -> None:
        """The process is there, whether or not its controller still is."""
        found = self._running.get(command.name)
        if found is None:
            found = self._running[command.name] = Process(self._create(command.name), 0)
        if controller == self.name:
            found.number = command.life
            self.tell(Serving(name=command.name, life=command.life, address=found.incarnation))

    def _create(self, name: str) -> Incarnation:
        self.counts["processes started by the controller"] += 1
        if name in self._shapes:
            return self.cluster.open_worker(name, self._shapes[name]).incarnation
        if name in self._hosts:
            return self.cluster.pools.open_node(self._hosts[name]).incarnation
        return self.cluster.start_router(name).incarnation

    def _died(self, name: str, incarnation: Incarnation) -> None:
        found = self._running.pop(name)
        assert found.incarnation == incarnation
        self.tell(Lost(name=name, life=found.number, reason="it died"), 0.2)

    def _remove(self, name: str) -> None:
        """What is left of a process that is lost: one that hangs is killed."""
        found = self._running.get(name)
        if found is None:
            return
        self.counts["hung processes killed by the controller"] += 1
        if name in self._shapes:
            self.cluster.kill(found.incarnation)
        elif name in self._hosts:
            self.cluster.kill_pool_node(self._hosts[name])
        else:
            self.cluster.kill_router(name)

    def _ping(self, ping: PingProcess) -> None:
        found = self._running.get(ping.name)
        if found is not None:
            answer = partial(self.tell, ProcessAnswered(name=ping.name, life=ping.life))
            self.cluster.by(found.incarnation, f"ping {found.incarnation}", answer)

    # --- routers --------------------------------------------------------------------------------

    def _at_router(self, name: str, action: Callable[[], None]) -> None:
        """In the order of the commands; nothing happens when it is dead."""
        router = self.cluster.routers.get(name)
        if router is not None:
            self.cluster.by(router.incarnation, f"{self.name} to {router.incarnation}", action)

    def _announce(self, command: Announce) -> None:
        router = self.cluster.routers[command.router]
        if command.kind is ProcessKind.WORKER:
            router.announce(Incarnation(command.address))
        else:
            self.cluster.pools.announce(self._hosts[command.name], router)
        joined = ProcessJoined(name=command.name, life=command.life, router=command.router)
        self.tell(joined)
