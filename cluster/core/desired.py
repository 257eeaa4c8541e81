"""What processes a cluster shall have, and how far those that it has are from that. Pure.

A pool is a number of processes with the same settings: one pool for the routers, and each pool of
workers. A `revision` stands for the settings. Processes of an older revision are replaced: one more
is started, and once it serves an old one is drained. Where the newcomer waits for resources, the
old one is drained first. Routers keep their ports, so each is replaced in its place. Processes on
nodes that end are replaced likewise, but all at once.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, islice

from cluster.core.processes import Process
from cluster.core.supervision import DesiredPool, ProcessKind, State

Desired = Mapping[str, DesiredPool]
"""# pool |-> its processes"""


@dataclass(frozen=True, slots=True)
class PoolDiff:
    """`starts`: the numbers of new processes; `drains`: the processes that shall leave."""

    starts: tuple[int, ...]
    drains: tuple[Process, ...]


def process_name(pool: str, number: int) -> str:
    return f"{pool}-{number}"


def pool_of(name: str) -> str:
    """The pool of the process with this name."""
    return name.rpartition("-")[0]


def differs(wish: DesiredPool, there: Sequence[Process], arrived: Collection[str]) -> PoolDiff:
    """`there`: all processes of the pool; `arrived`: the names of those that serve, and of which
    all others have heard."""
    staying = [process for process in there if not process.leaves]
    stale = [process for process in staying if is_stale(process, wish)]
    fresh = [process for process in staying if process not in stale]
    leaving = len(there) - len(staying)
    starts = _lacking(wish, len(fresh), stale, leaving)
    surplus = sorted(fresh, key=_worth, reverse=True)[wish.count :]
    replaced = _replaceable(wish, fresh, stale, leaving, arrived)
    return PoolDiff(_free_numbers(there, starts), (*surplus, *replaced))


def is_settled(wish: DesiredPool, there: Sequence[Process], arrived: Collection[str]) -> bool:
    """All its processes serve, with the settings that they shall have."""
    good = (one.name in arrived and not is_stale(one, wish) for one in there)
    return len(there) == wish.count and all(good)


def is_stale(process: Process, wish: DesiredPool) -> bool:
    """One that does not run yet gets the settings of today."""
    runs = process.state is not State.BACKING_OFF or process.adopted
    return runs and (process.revision != wish.revision or process.leave_by_s is not None)


def _worth(process: Process) -> tuple[bool, int]:
    """Who serves stays, and the lower number."""
    return process.may_serve, -process.number


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
    fresh: Sequence[Process],
    stale: Sequence[Process],
    leaving: int,
    arrived: Collection[str],
) -> list[Process]:
    """Old ones that can leave now. Those that don't serve yet are worth nothing."""
    serving = [process for process in stale if process.state is State.SERVING]
    idle = [process for process in stale if not process.may_serve]
    there = sum(process.name in arrived for process in fresh)
    spare = there + len(serving) - wish.count
    if spare <= 0 and not leaving:
        in_place = wish.kind is ProcessKind.ROUTER and spare == 0
        spare = int(in_place or any(process.waits for process in fresh))
    by_number = sorted(serving, key=lambda process: process.number)
    return [*idle, *by_number[: max(0, spare)]]


def _free_numbers(there: Sequence[Process], wanted: int) -> tuple[int, ...]:
    taken = {process.number for process in there}
    return tuple(islice((n for n in count() if n not in taken), wanted))
