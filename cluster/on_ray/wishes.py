"""What people ask of a running cluster: another file, another number of workers, a drain."""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, assert_never

from cluster.core.changes import changes, successor, with_count
from cluster.core.elastic.rules import Bounds
from cluster.core.plan import ClusterPlan
from cluster.core.processes import Process
from cluster.core.supervision import (
    DesiredChanged,
    DrainAsked,
    Lost,
    Phase,
    ProcessKind,
    ProcessStopped,
    RoleAsked,
    RoleRefused,
    RoleTaken,
    State,
    SupervisorEvent,
)
from cluster.core.supervisor import Supervisor
from cluster.on_ray.asked import ApplyFile, Asked, Denied, Drain, Flip, Granted, Pending, Scale
from kvrelay.access.values import Secrets
from kvrelay.errors import ConfigError
from kvrelay.types import Role

if TYPE_CHECKING:
    from cluster.on_ray.fleet import Fleet


log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Apply:
    """The cluster shall be as this plan. `only_tell`: say what would change."""

    plan: ClusterPlan
    only_tell: bool = False


Wish = Apply | Asked


@dataclass(frozen=True, slots=True, eq=False)
class Said:
    """An event of a wish, which is `written` once the cluster's record has what follows from it."""

    event: SupervisorEvent
    written: asyncio.Future[None]


ENDS_FLIP = RoleTaken | RoleRefused | Lost | ProcessStopped
"""A worker that was lost starts again with the role that was wished."""
FLIP_S = 40.0
"""Longer than a router waits for a worker's answer, shorter than it waits for the controller's."""
NO_ANSWER = "{} has not answered for {:g} s, and is asked again until it is a {} worker"


class Wishes:
    """Changes the plan; what follows from that, the supervisor says."""

    def __init__(
        self, fleet: Fleet, core: Supervisor, tell: Callable[[SupervisorEvent], None]
    ) -> None:
        self._fleet, self._core, self._tell = fleet, core, tell
        self._last: Said | None = None
        self._unheard: list[Said] = []
        self._unwritten: list[Said] = []  # that were heard
        self._flips: defaultdict[str, asyncio.Future[SupervisorEvent]] = defaultdict(
            asyncio.get_running_loop().create_future
        )

    async def hear(self, wish: Wish) -> Granted | Denied:
        """Granted once it is written down, so that it outlives this controller. A flip of a worker
        that serves is granted once it is done."""
        if self._core.phase in (Phase.STOPPING, Phase.STOPPED):
            return Denied("the cluster is stopping")
        try:
            if isinstance(wish, ApplyFile):
                wish = await asyncio.to_thread(planned, wish, self._fleet)
            before, told = self._last, tuple(self._lines(wish))
            said = self._last
            if isinstance(wish, Flip):
                await self._flipped(wish)
            if said is not None and said is not before:
                await asyncio.shield(said.written)
            return Granted(told)
        except ConfigError as error:
            return Denied(str(error))

    def heard(self, event: SupervisorEvent) -> None:
        """The supervisor has."""
        if self._unheard and self._unheard[0].event is event:
            self._unwritten.append(self._unheard.pop(0))
        if isinstance(event, ENDS_FLIP) and event.name in self._flips:
            self._flips.pop(event.name).set_result(event)

    def written(self) -> None:
        """The record has all that was heard."""
        for said in self._unwritten:
            said.written.set_result(None)
        self._unwritten.clear()

    @property
    def are_settled(self) -> bool:
        """Every process is there as desired, and serves."""
        return self._core.is_settled() and not self.are_unheard

    @property
    def are_unheard(self) -> bool:
        """The supervisor has yet to hear of a wish, so it still counts without it."""
        return bool(self._unheard)

    def _lines(self, wish: Apply | Scale | Drain | Flip | Pending) -> list[str]:
        """Raises ConfigError for what can't be."""
        running = self._fleet.plan
        match wish:
            case Apply(plan=plan, only_tell=only_tell):
                back = self._flipped_back(plan)
                return self._take(successor(running, plan), only_tell=only_tell, anew=True) + back
            case Scale(pool=pool, count=count):
                self._check_is_ours(pool)
                return self._take(with_count(running, pool, count))
            case Drain():
                return self._drain(wish)
            case Flip(name=name, role=role):
                return self._flip(name, role)
            case Pending():
                return self._pending()
            case _:
                assert_never(wish)

    def troubles(self) -> list[str]:
        """Of processes that can't start, or that no router will use: to wait until they serve would
        be in vain."""
        members = self._core.members
        stay = (one for one in members if one.pool in members.desired and not one.leaves)
        return [] if self.are_unheard else [text for one in stay for text in one.troubles]

    def _pending(self) -> list[str]:
        """Raises ConfigError."""
        if troubles := self.troubles():
            raise ConfigError("; ".join(troubles))
        return [] if self.are_settled else self._moving()

    def _moving(self) -> list[str]:
        known = [*self._core.routers.values(), *self._core.workers.values()]
        told = [f"{one.name} {self._core.doing(one) or one.state}" for one in known if _moves(one)]
        return told or ["the cluster changes"]

    def _check_is_ours(self, pool: str) -> None:
        """One owner per number. Raises ConfigError."""
        if (bounds := self._bounds(pool)) is not None:
            raise ConfigError(
                f"{pool}: its number follows the offered work, from {bounds.least} to "
                f"{bounds.most}: change workers.replicas in the file, and apply it"
            )

    def _bounds(self, pool: str) -> Bounds | None:
        """None: people say its number."""
        elastic = self._fleet.plan.elastic
        sized = elastic.sized.values() if elastic is not None else ()
        return next((one.bounds for one in sized if one.name == pool), None)

    # As the offered work asks; by now another file may have been applied, or a worker have gone.

    def add(self, pool: str, count: int) -> None:
        running, bounds = self._fleet.plan.worker_pool(pool), self._bounds(pool)
        if running is not None and bounds is not None:
            wanted = bounds.clamp(running.count + count)
            self._take(with_count(self._fleet.plan, pool, wanted))

    def let_go(self, name: str) -> None:
        try:
            self._drain(Drain(name=name, replace=False), by_owner=True)
        except ConfigError as error:
            log.info("%s stays: %s", name, error)

    def _take(
        self, wanted: ClusterPlan, *, only_tell: bool = False, anew: bool = False
    ) -> list[str]:
        told = changes(self._fleet.plan, wanted)
        if not only_tell:
            self._fleet.plan = wanted
            nodes = None if wanted.pool is None else wanted.pool.revision
            self._say(DesiredChanged(wanted.desired(), anew=anew, pool_revision=nodes))
        return told

    def _flipped_back(self, plan: ClusterPlan) -> list[str]:
        """Workers that were flipped by hand, in pools that say their role."""
        own = {pool.name: pool.role for pool in plan.worker_pools if pool.role is not None}
        return [
            f"{one.name}: {one.role} -> {own[one.pool]}"
            for one in self._core.workers.values()
            if not one.leaves and own.get(one.pool, one.role) is not one.role
        ]

    def _flip(self, name: str, role: Role) -> list[str]:
        process = self._named(name, self._core.workers)
        if self._core.phase is not Phase.READY:
            raise ConfigError("roles change once the cluster serves: it still starts")
        told = [] if process.role is role else [f"{name}: {process.role} -> {role}"]
        self._say(RoleAsked(name, role))
        return told

    async def _flipped(self, wish: Flip) -> None:
        """Raises ConfigError where it can't have the role, or has not answered in time."""
        process = self._core.workers[wish.name]
        if process.state is State.SERVING and process.has_role is not wish.role:
            flipped = asyncio.shield(self._flips[wish.name])
            try:
                answer = await asyncio.wait_for(flipped, FLIP_S)
            except TimeoutError:
                raise ConfigError(NO_ANSWER.format(wish.name, FLIP_S, wish.role)) from None
            if isinstance(answer, RoleRefused):
                raise ConfigError(answer.reason)

    def _named(self, name: str, among: Mapping[str, Process]) -> Process:
        """Raises ConfigError."""
        told = {said.event.name for said in self._unheard if isinstance(said.event, DrainAsked)}
        there = {one.name: one for one in among.values() if not (one.leaves or one.name in told)}
        if name not in there:
            raise ConfigError(f"no process is named {name}: there are {', '.join(there)}")
        return there[name]

    def _drain(self, wish: Drain, *, by_owner: bool = False) -> list[str]:
        core = self._core
        process = self._named(wish.name, {**core.routers, **core.workers})
        if wish.replace:
            self._say(DrainAsked(name=wish.name))
            return [f"{wish.name}: leaves, and another one replaces it"]
        if not by_owner:
            self._check_is_ours(process.pool)
        fewer = self._fewer(process.pool, process.kind)
        self._say(DrainAsked(name=wish.name, replace=False))
        return self._take(fewer)  # it may have left for another reason before that is heard

    def _say(self, event: SupervisorEvent) -> None:
        self._last = Said(event, asyncio.get_running_loop().create_future())
        self._unheard.append(self._last)
        self._tell(event)

    def _fewer(self, pool: str, kind: ProcessKind) -> ClusterPlan:
        """Raises ConfigError."""
        if kind is ProcessKind.ROUTER:
            raise ConfigError("set router.replicas in the file, and apply it")
        known = self._fleet.plan.worker_pool(pool)
        if known is None:
            raise ConfigError(f"the pool {pool} is going already")
        bounds = self._bounds(pool)
        if bounds is not None and known.count <= bounds.least:
            raise ConfigError(f"{pool} shall have at least {bounds.least} workers")
        return with_count(self._fleet.plan, pool, known.count - 1)


def _moves(process: Process) -> bool:
    return process.state not in (State.SERVING, State.GONE)


def planned(wish: ApplyFile, fleet: Fleet) -> Apply:
    """The file on this Ray. Raises ConfigError for one that isn't valid, or of another cluster."""
    from cluster.config.load import read_json
    from cluster.core.plan import plan_cluster
    from cluster.core.resolve import resolve
    from cluster.on_ray.connect import site_of

    running, ours = fleet.plan.name, fleet.plan.routers[0].settings
    config = read_json(wish.config)
    if config.name != running:
        raise ConfigError(f"name: got {config.name}, and this router is of the cluster {running}")
    resolved = resolve(config, site_of(own=fleet.own))
    secrets = Secrets(token=ours.access.token, key=ours.cluster_key)
    return Apply(plan_cluster(resolved, secrets, given=config), wish.only_tell)
