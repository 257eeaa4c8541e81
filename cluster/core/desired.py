"""What processes a cluster shall have, and how far those that it has are from that. Pure.

A pool is a number of processes with the same settings: one pool for the routers, and each pool of
workers. A `revision` stands for the settings. Processes of an older revision are replaced: one more
is started, and once it serves an old one is drained. Where the newcomer waits for resources, the
old one is drained first. Routers keep their ports, so each is replaced in its place. Processes on
nodes that end are replaced likewise, but all at once.

So many workers of a pool have each role. A flip changes these numbers, and then they stay: a
newcomer gets a role that is missing, and an old worker leaves when enough others have its role.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, islice

from cluster.core.processes import Process
from cluster.core.supervision import DesiredPool, ProcessKind, Roles, State
from kvrelay.types import Role

Desired = Mapping[str, DesiredPool]
"""# pool |-> its processes"""


@dataclass(frozen=True, slots=True)
class PoolDiff:
    """`starts`: numbers and roles of new processes; `drains`: the processes that shall leave;
    `changes`: those that shall have another role."""

    starts: tuple[tuple[int, Role | None], ...]
    drains: tuple[Process, ...]
    changes: tuple[tuple[Process, Role | None], ...]


def process_name(pool: str, number: int) -> str:
    return f"{pool}-{number}"


def pool_of(name: str) -> str:
    """A process is named by its pool and a number; one without a number is a pool of its own."""
    return name.rpartition("-")[0] or name


def differs(
    wish: DesiredPool,
    roles: Roles,
    there: Sequence[Process],
    arrived: Collection[str],
    before: Mapping[int, Role | None],
) -> PoolDiff:
    """`roles`: of all processes that the pool shall have; `there`: those that it has; `arrived`:
    the names of those that serve, and of which all others have heard. `before`: a process's role
    under an earlier controller, by its number."""
    staying = [process for process in there if not process.leaves]
    stale = [process for process in staying if is_stale(process, wish)]
    fresh = [process for process in staying if process not in stale]
    leaving = len(there) - len(staying)
    numbers = _free_numbers(there, _lacking(wish, len(fresh), stale, leaving))
    surplus = _surplus(wish, roles, fresh)
    kept = [process for process in fresh if process not in surplus]
    changes = _changes(roles, kept)
    missing = roles - _roles(kept) - Counter(role for _, role in changes)
    replaced = _replaceable(wish, roles, kept, stale, leaving + len(surplus), arrived)
    return PoolDiff(
        starts=tuple(_with_roles(wish, missing, numbers, before)),
        drains=(*surplus, *replaced),
        changes=tuple(changes),
    )


def resized(roles: Roles, wish: DesiredPool) -> Roles:
    """For as many as the pool shall have now. One that shrinks loses the role that most have."""
    found, count = Counter(roles), roles.total()
    found.update(wish.role_of(number) for number in range(count, wish.count))
    for number in range(count - 1, wish.count - 1, -1):
        found = +found
        found[_least_missed(wish, found, number)] -= 1
    return +found


def _least_missed(wish: DesiredPool, roles: Roles, number: int) -> Role | None:
    """Of two roles that as many have, one that the pool's own workers begin with stays."""
    own, takes_either = wish.role_of(number), wish.role is None
    return max(roles, key=lambda role: (roles[role], (role is own) is takes_either))


def is_settled(wish: DesiredPool, there: Sequence[Process], arrived: Collection[str]) -> bool:
    """All its processes serve, with the settings that they shall have."""
    good = (
        one.name in arrived and not is_stale(one, wish) and one.has_role is one.role
        for one in there
    )
    return len(there) == wish.count and all(good)


def is_stale(process: Process, wish: DesiredPool) -> bool:
    """One that does not run yet gets the settings of today."""
    runs = process.state is not State.BACKING_OFF or process.adopted
    return runs and (process.revision != wish.revision or process.leave_by_s is not None)


def _roles(processes: Iterable[Process]) -> Roles:
    return Counter(process.role for process in processes)


def _surplus(wish: DesiredPool, roles: Roles, fresh: Sequence[Process]) -> list[Process]:
    """Who is of use stays, then who has a role that is wanted, then the lower number."""
    staying, leaving = [*fresh], []
    while len(staying) > wish.count:
        excess = _roles(staying) - roles
        order = [(not one.is_of_use, excess[one.role] > 0, one.number) for one in staying]
        leaving.append(staying.pop(order.index(max(order))))
    return leaving


def _changes(roles: Roles, kept: Sequence[Process]) -> list[tuple[Process, Role | None]]:
    """From roles that too many have to those that are missing; first those of no use."""
    excess, missing, found = _roles(kept) - roles, roles - _roles(kept), []
    for process in sorted(kept, key=lambda one: (one.is_of_use, -one.number)):
        if excess[process.role]:
            role = next(missing.elements())
            excess[process.role] -= 1
            missing[role] -= 1
            found.append((process, role))
    return found


def _with_roles(
    wish: DesiredPool, missing: Roles, numbers: Sequence[int], before: Mapping[int, Role | None]
) -> list[tuple[int, Role | None]]:
    """Each gets the role that it had or would begin with, if that is missing, else one that is."""
    left, found = Counter(missing), []
    for number in numbers:
        asked = (before.get(number), wish.role_of(number), *left)
        role = next(role for role in asked if left[role] > 0)
        left[role] -= 1
        found.append((number, role))
    return found


def _lacking(wish: DesiredPool, fresh: int, stale: Sequence[Process], leaving: int) -> int:
    """How many to start: one more than the pool shall have while old ones are replaced, and one for
    each on a node that ends. A router that leaves still has its ports."""
    ending = sum(process.leave_by_s is not None for process in stale)
    surge = max(ending, min(1, len(stale)))
    in_place = wish.kind is ProcessKind.ROUTER
    most = wish.count - leaving if in_place else wish.count + surge
    return max(0, min(wish.count - fresh, most - fresh - len(stale)))


def _replaceable(
    wish: DesiredPool,
    roles: Roles,
    kept: Sequence[Process],
    stale: Sequence[Process],
    leaving: int,
    arrived: Collection[str],
) -> list[Process]:
    """Old ones that can leave now. Those that don't serve yet, or are refused, are worth
    nothing."""
    serving = [one for one in stale if one.state is State.SERVING and one.is_of_use]
    idle = [process for process in stale if not process.is_of_use]
    there = [process for process in kept if process.name in arrived]
    spare = len(there) + len(serving) - wish.count
    if spare > 0:
        return [*idle, *_of_each_role(serving, _roles([*there, *serving]) - roles)[:spare]]
    in_place = wish.kind is ProcessKind.ROUTER and spare == 0
    waiting = _roles(process for process in kept if process.waits)
    if leaving or not (in_place or waiting):
        return idle
    by_use = sorted(serving, key=lambda one: (not waiting[one.role], one.number))
    return [*idle, *by_use[:1]]


def _of_each_role(serving: Sequence[Process], spare: Roles) -> list[Process]:
    """Those that can be spared, the lowest numbers first."""
    found, left = [], Counter(spare)
    for process in sorted(serving, key=lambda one: one.number):
        if left[process.role] > 0:
            left[process.role] -= 1
            found.append(process)
    return found


def _free_numbers(there: Sequence[Process], wanted: int) -> tuple[int, ...]:
    taken = {process.number for process in there}
    return tuple(islice((n for n in count() if n not in taken), wanted))
