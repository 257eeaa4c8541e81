"""The processes of a cluster, how they are restarted, and which hosts need a pool node. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from cluster.core.supervision import Home, ProcessKind, State
from engine.core.activity import Stage, StartActivity
from kvrelay.types import Role

FIRST_BACKOFF_S = 1.0
LAST_BACKOFF_S = 60.0
STABLE_S = 60.0
"""A process that served for this long starts its back-off anew."""
LEAVING = (State.DRAINING, State.STOPPING, State.GONE)
STARTS = StartActivity(stage=Stage.STARTS)


@dataclass(slots=True, kw_only=True)
class Process:
    """`home` is where it runs or last ran; for a pool node, where it shall run. `joined`: the
    routers that know it. `number` counts within its pool. `revision`: the settings that it started
    with. `role`: what a worker shall be; `has_role`: what it was last known to be,
    if it is known. `address`: where it serves; `known_at`: where routers may still seek it."""

    name: str
    kind: ProcessKind
    pool: str = ""
    number: int = 0
    revision: str = ""
    needs: str = "{}"
    role: Role | None = None
    has_role: Role | None = None
    state: State = State.GONE
    life: int = 0
    failures: int = 0
    served_s: float | None = None
    joined: set[str] = field(default_factory=set)
    refused: dict[str, str] = field(default_factory=dict)  # router |-> why it does not use it
    address: str | None = None
    known_at: str | None = None
    start_at_s: float = 0.0
    home: Home | None = None
    activity: StartActivity = STARTS  # while its state is STARTING
    left_out: str = ""  # why, while its state is LEFT_OUT
    hopeless: str = ""  # why its starts fail, where another one is not likely to help
    leave_by_s: float | None = None  # it must have begun to leave then: its node ends
    adopted: bool = False  # a former controller started it, and it may still serve
    starting_s: float = 0.0  # for how long, without its wait for a place
    silent_s: float | None = None  # since a ping that is not answered yet
    heard_s: float = 0.0  # when it last answered

    @property
    def refusals(self) -> list[str]:
        return [f"{router} refused {self.name}: {why}" for router, why in self.refused.items()]

    @property
    def troubles(self) -> list[str]:
        """Why it won't serve, though it is tried on and on."""
        failed = [f"{self.name} can't start: {self.hopeless}"] if self.hopeless else []
        return [*failed, *self.refusals]

    def is_due(self, now_s: float) -> bool:
        return self.state is State.BACKING_OFF and self.start_at_s <= now_s

    @property
    def leaves(self) -> bool:
        return self.state in LEAVING

    @property
    def may_serve(self) -> bool:
        return self.state is State.SERVING or self.adopted

    @property
    def is_of_use(self) -> bool:
        return self.may_serve and not self.refused

    def must_leave(self, now_s: float) -> bool:
        return self.leave_by_s is not None and now_s >= self.leave_by_s

    @property
    def waits(self) -> bool:
        """For resources, to start."""
        return self.state is State.STARTING and self.activity.stage is Stage.WAITS

    @property
    def is_busy_starting(self) -> bool:
        return self.state is State.STARTING and self.activity.stage is not Stage.WAITS

    def hears(self, now_s: float) -> None:
        self.silent_s, self.heard_s = None, now_s

    def back_off(self, now_s: float) -> float:
        """It failed again. Returns the seconds until its next start."""
        self.failures = 1 if self._was_stable(now_s) else self.failures + 1
        wait_s = min(FIRST_BACKOFF_S * 2 ** (self.failures - 1), LAST_BACKOFF_S)
        self.state, self.start_at_s = State.BACKING_OFF, now_s + wait_s
        self.address, self.joined, self.refused, self.adopted = None, set(), {}, False
        return wait_s

    def tries_anew(self) -> None:
        """What failed before says nothing any more."""
        self.hopeless = ""
        if self.state is State.BACKING_OFF and not self.adopted:
            self.failures, self.start_at_s, self.served_s = 0, 0.0, None

    def _was_stable(self, now_s: float) -> bool:
        if self.state is not State.SERVING or self.served_s is None:
            return False
        return now_s - self.served_s >= STABLE_S


def doing(process: Process, routers: Collection[str]) -> str:
    """Its current activity in words; empty once it serves and every router knows it."""
    match process.state:
        case State.STARTING if process.activity.stage is Stage.WAITS:
            return f"{process.activity}, needs {process.needs}"
        case State.STARTING:
            return str(process.activity)
        case State.LEFT_OUT:
            return process.left_out
        case State.BACKING_OFF if process.hopeless:
            return process.hopeless
        case State.SERVING:
            knows_all = process.kind is ProcessKind.ROUTER or process.joined == routers
            return "" if knows_all else "; ".join(process.refusals) or "joins"
        case state:
            return state.value


def pool_process(host: str) -> str:
    """The same name at every start, so that a restarted controller finds it."""
    return f"pool-{host}"


class PoolHomes:
    """Removed pool nodes stay known, so that events of their old lives are recognised."""

    def __init__(self, revision: str) -> None:
        """`revision`: of the settings that they shall have."""
        self.revision = revision
        self._known: dict[str, Process] = {}

    def processes(self) -> tuple[Process, ...]:
        return tuple(p for p in self._known.values() if p.state is not State.GONE)

    def find(self, name: str) -> Process | None:
        return self._known.get(name)

    def adopt(
        self,
        name: str,
        home: Home | None = None,
        revision: str = "",
        known_at: str | None = None,
    ) -> None:
        """One that an earlier controller left."""
        process = Process(name=name, kind=ProcessKind.POOL_NODE, state=State.BACKING_OFF)
        process.home, process.revision, process.adopted = home, revision, True
        process.known_at = known_at
        self._known[name] = process

    def starts(self, pool: Process) -> None:
        """With the settings of today, unless it runs already."""
        if not pool.adopted:
            pool.revision = self.revision

    def is_settled(self) -> bool:
        return all(pool.revision == self.revision for pool in self.processes())

    def replaceable(self) -> list[Process]:
        """One of other settings, while all others are where they shall be."""
        there = self.processes()
        if any(pool.state not in (State.SERVING, State.LEFT_OUT) for pool in there):
            return []
        return [pool for pool in there if pool.revision != self.revision][:1]

    def settle(
        self, workers: Iterable[Process], states: Collection[State], now_s: float
    ) -> list[Process]:
        """Adds pool nodes where workers are in one of these states. Returns those that are no
        longer wanted, since no worker is there."""
        placed = {(worker.home, worker.state) for worker in workers if worker.home is not None}
        homes = {home for home, _ in placed}
        wanted = {home for home, state in placed if state in states}
        for home in sorted(wanted, key=lambda home: home.node):
            self._want(home, homes, now_s)
        hosts = {home.host for home in homes}
        return [p for p in self.processes() if p.home and p.home.host not in hosts and _runs(p)]

    def _want(self, home: Home, homes: set[Home], now_s: float) -> None:
        name = pool_process(home.host)
        pool = self._known.setdefault(name, Process(name=name, kind=ProcessKind.POOL_NODE))
        if pool.home not in homes:
            pool.home = home
        if pool.state is State.GONE:
            pool.state, pool.start_at_s = State.BACKING_OFF, now_s
            pool.adopted, pool.revision = False, self.revision


def _runs(pool: Process) -> bool:
    return not pool.leaves
