"""What people ask of a running cluster: another file, another number of workers, a drain."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, assert_never

from cluster.core.changes import changes, successor, with_count
from cluster.core.plan import ClusterPlan
from cluster.core.supervision import (
    DesiredChanged,
    DrainAsked,
    Phase,
    ProcessKind,
    SupervisorEvent,
)
from cluster.core.supervisor import Supervisor
from kvrelay.errors import ConfigError

if TYPE_CHECKING:
    from cluster.on_ray.fleet import Fleet


@dataclass(frozen=True, slots=True)
class Apply:
    """The cluster shall be as this plan. `only_tell`: say what would change."""

    plan: ClusterPlan
    only_tell: bool = False


@dataclass(frozen=True, slots=True)
class Scale:
    """The pool shall have so many workers."""

    pool: str
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Drain:
    """This process shall leave. `replace`: another one takes its place, else its pool has one fewer
    from then on."""

    name: str
    replace: bool = True


Wish = Apply | Scale | Drain


@dataclass(frozen=True, slots=True)
class Granted:
    """What changes, a line for each pool."""

    lines: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Denied:
    reason: str


class Wishes:
    """Changes the plan; what follows from that, the supervisor says. `pending`: events that it has
    not heard yet."""

    def __init__(
        self, fleet: Fleet, core: Supervisor, tell: Callable[[SupervisorEvent], None]
    ) -> None:
        self._fleet, self._core, self._tell = fleet, core, tell
        self.pending = 0

    def hear(self, wish: Wish) -> Granted | Denied:
        if self._core.phase in (Phase.STOPPING, Phase.STOPPED):
            return Denied("the cluster is stopping")
        try:
            return Granted(tuple(self._lines(wish)))
        except ConfigError as error:
            return Denied(str(error))

    def heard(self, event: SupervisorEvent) -> None:
        """The supervisor has."""
        self.pending -= isinstance(event, DesiredChanged | DrainAsked)

    def _lines(self, wish: Wish) -> list[str]:
        """Raises ConfigError for what can't be."""
        running = self._fleet.plan
        match wish:
            case Apply(plan=plan, only_tell=only_tell):
                return self._take(successor(running, plan), only_tell=only_tell)
            case Scale(pool=pool, count=count):
                return self._take(with_count(running, pool, count))
            case Drain():
                return self._drain(wish)
            case _:
                assert_never(wish)

    def _take(self, wanted: ClusterPlan, *, only_tell: bool = False) -> list[str]:
        told = changes(self._fleet.plan, wanted)
        if not only_tell:
            self._fleet.plan = wanted
            self._say(DesiredChanged(wanted.desired()))
        return told

    def _drain(self, wish: Drain) -> list[str]:
        process = self._core.members.find(wish.name)
        if process is None or process.leaves:
            known = ", ".join(one.name for one in self._core.members if not one.leaves)
            raise ConfigError(f"no process is named {wish.name}: there are {known}")
        told = [f"{wish.name}: leaves, and another one replaces it"]
        if not wish.replace:
            told = self._lower(process.pool, process.kind)
        self._say(DrainAsked(name=wish.name, replace=wish.replace))
        return told

    def _say(self, event: SupervisorEvent) -> None:
        self.pending += 1
        self._tell(event)

    def _lower(self, pool: str, kind: ProcessKind) -> list[str]:
        """The supervisor lowers its own number when it hears of the drain."""
        if kind is ProcessKind.ROUTER:
            raise ConfigError("set router.replicas in the file, and apply it")
        known = self._fleet.plan.worker_pool(pool)
        if known is None:
            raise ConfigError(f"the pool {pool} is going already")
        before = self._fleet.plan
        self._fleet.plan = with_count(before, pool, known.count - 1)
        return changes(before, self._fleet.plan)
