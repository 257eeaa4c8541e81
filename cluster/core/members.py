"""The routers and workers of a cluster, by pool. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import inf

from cluster.core.desired import (
    Desired,
    differs,
    is_settled,
    is_stale,
    pool_of,
    process_name,
    resized,
)
from cluster.core.processes import Process
from cluster.core.supervision import (
    DesiredPool,
    Home,
    Phase,
    ProcessKind,
    Roles,
    State,
    SupervisorCommand,
    Withdraw,
)
from kvrelay.types import Role


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """What a restarted controller must know of a process that may still run. Of a worker that was
    being told another role nobody knows the one that it has."""

    pool: str
    kind: ProcessKind
    revision: str
    role: Role | None = None
    has_role: Role | None = None
    home: Home | None = None
    known_at: str | None = None
    leaves: bool = False
    node_ends: bool = False

    @staticmethod
    def of(process: Process) -> Kept:
        return Kept(
            pool=process.pool,
            kind=process.kind,
            revision=process.revision,
            role=process.role,
            has_role=process.role if process.has_role is process.role else None,
            home=process.home,
            known_at=process.known_at,
            leaves=process.leaves,
            node_ends=process.leave_by_s is not None,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Former:
    """What an earlier controller left: the cluster's phase, the reason why it stops, the processes
    that may still serve, what was known of them, and the roles of each pool."""

    phase: Phase
    error: str | None = None
    left: frozenset[str] = frozenset()
    kept: Mapping[str, Kept] = field(default_factory=dict)
    roles: Mapping[str, Roles] = field(default_factory=dict)

    def pool_nodes(self) -> list[tuple[str, Kept]]:
        """Those that still run, and where."""
        known = ((name, self.kept[name]) for name in sorted(self.left & self.kept.keys()))
        return [(name, kept) for name, kept in known if kept.kind is ProcessKind.POOL_NODE]

    def ended(self) -> dict[str, ProcessKind]:
        """# address |-> kind, of those that have ended since: no router has heard of it"""
        gone = (kept for name, kept in self.kept.items() if name not in self.left)
        return {kept.known_at: kept.kind for kept in gone if kept.known_at is not None}


NEW = Former(phase=Phase.STARTING)


class Members:
    """`routers` and `workers`: # name |-> process. One that was removed may come again under the
    same name; its lives go on. `roles`: of all processes that each pool shall have. `ended`: where
    a router that an earlier controller left may still seek one."""

    def __init__(self, desired: Desired, former: Former) -> None:
        self.desired = desired
        self.roles = _roles_of(desired, former.roles)
        self._before = {name: one.role for name, one in former.kept.items()}
        self.routers: dict[str, Process] = {}
        self.workers: dict[str, Process] = {}
        self._lives: Counter[str] = Counter()
        self.ended = former.ended()
        self._adopt_all(former)

    def __iter__(self) -> Iterator[Process]:
        yield from self.routers.values()
        yield from self.workers.values()

    def find(self, name: str) -> Process | None:
        return self.routers.get(name) or self.workers.get(name)

    def of(self, pool: str) -> list[Process]:
        return [process for process in self if process.pool == pool]

    def lame_duck_s(self, process: Process) -> float:
        wish = self.desired.get(process.pool)
        return 0.0 if wish is None else wish.lame_duck_s

    def can_serve(self, router: str) -> bool:
        """It knows a worker for each half of a request."""
        roles = {worker.role for worker in self.workers.values() if router in worker.joined}
        return Role.BOTH in roles or {Role.PREFILL, Role.DECODE} <= roles

    def serving_routers(self) -> list[Process]:
        return [router for router in self.routers.values() if router.state is State.SERVING]

    def withdrawal(self, process: Process) -> list[SupervisorCommand]:
        """Of a worker or pool node that has ended where routers know it."""
        address, process.known_at = process.known_at, None
        if process.kind is ProcessKind.ROUTER or address is None:
            return []
        if any(one.adopted and one.state is not State.SERVING for one in self.routers.values()):
            self.ended[address] = process.kind
        return [Withdraw(one.name, address, process.kind) for one in self.serving_routers()]

    def farewells(self, newcomer: Process, known: Iterable[Process]) -> list[SupervisorCommand]:
        """A router that an earlier controller left hears who has ended since."""
        if newcomer.kind is not ProcessKind.ROUTER or not newcomer.adopted:
            return []
        ended = self.ended.keys() - {one.address for one in known}
        return [Withdraw(newcomer.name, at, self.ended[at]) for at in sorted(ended)]

    def _adopt_all(self, former: Former) -> None:
        """The routers and workers that are left, as far as it is known what they are."""
        kept = {name: former.kept.get(name) or self._as_desired(name) for name in former.left}
        pools = dict.fromkeys([*self.desired, *(one.pool for one in kept.values() if one)])
        for pool in pools:
            of_pool = [(name, one) for name, one in kept.items() if one and one.pool == pool]
            for name, one in sorted(of_pool, key=lambda found: found[0]):
                if one.kind is not ProcessKind.POOL_NODE:
                    self._adopt(name, one)

    def _as_desired(self, name: str) -> Kept | None:
        wish = self.desired.get(pool_of(name))
        if wish is None:
            return None
        role = wish.role_of(_number(name))
        return Kept(
            pool=pool_of(name), kind=wish.kind, revision=wish.revision, role=role, has_role=role
        )

    def _adopt(self, name: str, kept: Kept) -> None:
        process = self._new(name, kept.pool, kept.kind, _number(name), kept.role)
        process.revision, process.has_role, process.home = kept.revision, kept.has_role, kept.home
        process.adopted, process.leave_by_s = True, inf if kept.node_ends else None
        process.known_at = kept.known_at
        process.state = State.DRAINING if kept.leaves else State.BACKING_OFF

    def kept(self) -> dict[str, Kept]:
        return {one.name: Kept.of(one) for one in self if one.life or one.adopted}

    def starts(self, process: Process) -> None:
        """With the settings of today, unless it runs already."""
        process.life += 1
        self._lives[process.name] = process.life
        wish = self.desired.get(process.pool)
        if wish is not None and not process.adopted:
            process.revision, process.needs = wish.revision, wish.needs
            process.leave_by_s = None
        if not process.adopted:
            process.has_role = process.role

    def remove(self, process: Process) -> None:
        """It has left. Its name is free again."""
        table = self.routers if process.kind is ProcessKind.ROUTER else self.workers
        del table[process.name]

    def validate(self) -> None:
        for pool, wish in self.desired.items():
            fresh = [one for one in self.of(pool) if not one.leaves and not is_stale(one, wish)]
            assert len(fresh) <= wish.count == self.roles[pool].total(), (pool, fresh)
            assert Counter(one.role for one in fresh) <= self.roles[pool], (pool, fresh)
            assert all(one.name == process_name(pool, one.number) for one in fresh), fresh

    # --- the desired state ----------------------------------------------------------------------

    def reconcile(self) -> tuple[list[Process], list[Process]]:
        """Adds what is lacking, which then starts. Returns the processes that shall leave now, and
        those that have another role to take."""
        leaving: list[Process] = []
        changed: list[Process] = []
        arrived = self._arrived()
        for pool, wish in self._wishes().items():
            roles = self.roles.get(pool, Counter())
            diff = differs(wish, roles, self.of(pool), arrived, self._roles_before(pool))
            for number, role in diff.starts:
                self._new(process_name(pool, number), pool, wish.kind, number, role)
            for process, role in diff.changes:
                process.role = role
                changed.append(process)
            leaving += diff.drains
        return leaving, changed

    def _roles_before(self, pool: str) -> dict[int, Role | None]:
        known = self._before.items()
        return {_number(name): role for name, role in known if pool_of(name) == pool}

    def want(self, desired: Desired, *, anew: bool) -> None:
        """`anew`: a file says so. Then pools that say their roles have these again, and what could
        not start is tried at once."""
        before = {
            pool: roles
            for pool, roles in self.roles.items()
            if pool in desired and not (anew and desired[pool].role)
        }
        self.desired, self.roles = desired, _roles_of(desired, before)
        for process in self:
            wish = desired.get(process.pool)
            if wish is not None and (anew or wish.revision != process.revision):
                process.tries_anew()

    def is_settled(self) -> bool:
        """Everything serves as desired, and nothing else is there."""
        return self._has_all() and not self._unwanted()

    def lower(self, process: Process) -> None:
        """Its pool shall have one process fewer: this one."""
        wish = self.desired[process.pool]
        fewer = replace(wish, count=max(0, wish.count - 1))
        self.desired = {**self.desired, process.pool: fewer}
        roles = self.roles[process.pool] - Counter([process.role])
        self.roles[process.pool] = resized(roles, fewer)

    def take_role(self, process: Process, role: Role | None) -> None:
        """From now on it shall have this one, and so shall whoever comes in its place."""
        roles = self.roles.get(process.pool)
        if roles is not None and roles[process.role]:
            self.roles[process.pool] = roles - Counter([process.role]) + Counter([role])
        process.role = role

    def keep_role(self, process: Process) -> None:
        """It can't have another one. If nobody knows which it has, it has that of its pool."""
        wish = self.desired.get(process.pool)
        if process.has_role is None and wish is not None:
            process.has_role = wish.role_of(process.number)
        self.take_role(process, process.has_role)

    def _wishes(self) -> dict[str, DesiredPool]:
        """Also those pools that shall be no more, once the others serve or lack their place."""
        unwanted = self._unwanted()
        if unwanted and not (self._has_all() or any(process.waits for process in self)):
            return dict(self.desired)
        return {**self.desired, **unwanted}

    def _unwanted(self) -> dict[str, DesiredPool]:
        gone = {one.pool: one.kind for one in self if one.pool not in self.desired}
        return {pool: DesiredPool(kind=kind, count=0) for pool, kind in gone.items()}

    def _has_all(self) -> bool:
        arrived = self._arrived()
        return all(is_settled(wish, self.of(pool), arrived) for pool, wish in self.desired.items())

    def _arrived(self) -> set[str]:
        """The workers that serve and that each router knows, and the routers that know them all."""
        routers = {router.name for router in self.serving_routers()}
        workers = [one for one in self.workers.values() if one.state is State.SERVING]
        known = {worker.name for worker in workers if worker.joined >= routers}
        return known | {name for name in routers if all(name in one.joined for one in workers)}

    def _new(
        self, name: str, pool: str, kind: ProcessKind, number: int, role: Role | None
    ) -> Process:
        process = Process(name=name, kind=kind, pool=pool, number=number, role=role)
        self._before.pop(name, None)
        process.state, process.life = State.BACKING_OFF, self._lives[name]
        if (wish := self.desired.get(pool)) is not None:
            process.needs = wish.needs
        table = self.routers if kind is ProcessKind.ROUTER else self.workers
        table[name] = process
        return process


def _number(name: str) -> int:
    return int(name.rpartition("-")[2])


def _roles_of(desired: Desired, before: Mapping[str, Roles]) -> dict[str, Roles]:
    """As they were, for as many as there shall be now; else as workers begin."""
    return {
        pool: resized(before[pool], wish) if pool in before else wish.roles()
        for pool, wish in desired.items()
    }
