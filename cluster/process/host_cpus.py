"""The CPUs of a worker that computes on them: its own, agreed between all workers of a host.
Only the host's routers go first.

Which CPUs this process may use follows from its affinity and its control group. A CPU is claimed by
an abstract UNIX socket named after it. Every worker in the host's network namespace sees the claim,
whatever started it. The claim ends with its process.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath

from kvpool.transport.gpu_files import has_gpu_files

log = logging.getLogger(__name__)


GROUPS = Path("/sys/fs/cgroup")
TOPOLOGY = Path("/sys/devices/system/cpu")

NICE, MOST_NICE = 5, 19
"""A thread that is 5 above a busy one gets a quarter of their CPU. With 10 it would be a tenth, and
any other busy program of the host would hold up all answers."""

Core = tuple[int, int]
"""Package number, and core number in the package."""
LimitOf = Callable[[Path], float]


def give_way(device: str) -> None:
    """Every thread of this process, and those they start, gets a quarter of a CPU that a router
    wants too: what a worker computes is of no use before a router has sent it. A worker of a GPU,
    which waits for its threads, gives way to nobody."""
    if device == "cpu" or (device == "auto" and not has_gpu_files()):
        for thread in map(int, os.listdir("/proc/self/task")):
            with suppress(ProcessLookupError):  # it has just ended
                nice = os.getpriority(os.PRIO_PROCESS, thread) + NICE
                os.setpriority(os.PRIO_PROCESS, thread, min(nice, MOST_NICE))


def allowed() -> frozenset[int]:
    """The CPUs that taskset, Ray or a cpuset leave to the main thread of this process."""
    return frozenset(os.sched_getaffinity(os.getpid()))


def quota(own_groups: Path = Path("/proc/self/cgroup"), groups: Path = GROUPS) -> float | None:
    """CPU time per second that its control group, or one around it, may use; None: no limit."""
    limits = []
    for line in own_groups.read_text().splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0":
            limits += [*_limits(groups, path, _limit_of_v2)]
        elif "cpu" in controllers.split(","):
            limits += [*_limits(groups / "cpu", path, _limit_of_v1)]
    return min(limits, default=None)


def _limits(root: Path, path: str, limit: LimitOf) -> Iterator[float]:
    """The limits of the group and of all groups around it. A container sees its own group as the
    root."""
    inner = PurePosixPath(path.lstrip("/"))
    for group in {root, *(root / part for part in (inner, *inner.parents))}:
        with suppress(OSError, ValueError, ZeroDivisionError):
            if (found := limit(group)) > 0:
                yield found


def _limit_of_v2(group: Path) -> float:
    time, period = (group / "cpu.max").read_text().split()
    return int(time) / int(period)  # "max" is no number: no limit


def _limit_of_v1(group: Path) -> float:
    time, period = (int((group / f"cpu.cfs_{name}_us").read_text()) for name in ("quota", "period"))
    return time / period


def cores(cpus: Iterable[int], topology: Path = TOPOLOGY) -> Mapping[int, Core]:
    """# CPU |-> its core; without a description each CPU is a core"""
    return {cpu: _core(topology / f"cpu{cpu}" / "topology", cpu) for cpu in cpus}


def _core(folder: Path, cpu: int) -> Core:
    with suppress(OSError, ValueError):
        package, number = (
            int((folder / name).read_text()) for name in ("physical_package_id", "core_id")
        )
        return package, number
    return 0, cpu


def ranges(cpus: Iterable[int]) -> str:
    """In the kernel's notation: 0-3,8."""
    spans: list[list[int]] = []
    for cpu in sorted(cpus):
        if spans and cpu == spans[-1][-1] + 1:
            spans[-1].append(cpu)
        else:
            spans.append([cpu])
    return ",".join(f"{s[0]}-{s[-1]}" if len(s) > 1 else f"{s[0]}" for s in spans)


NAMES = "kvrelay-cpu-"
LOCK = "lock"
LOCK_PATIENCE_S = 5.0
POLL_S = 0.002


class Pinned:
    """`cpus`: the CPUs that only this worker uses; empty: it may run on any."""

    def __init__(self, claims: Mapping[int, socket.socket]) -> None:
        self._claims = claims

    @property
    def cpus(self) -> tuple[int, ...]:
        return tuple(sorted(self._claims))

    def release(self) -> None:
        for claim in self._claims.values():
            claim.close()
        self._claims = {}


def pin(threads: int) -> Pinned:
    """Moves all threads of this process, and future ones, to CPUs that no other worker uses, one
    for each compute thread. If there are too few, it moves none and logs the reason."""
    may = allowed()
    limit = quota()
    if limit is not None and limit < len(may):
        log.info("not pinned: it may use the time of %g CPUs, on any of %d", limit, len(may))
        return Pinned({})
    claims = _claim(threads, may)
    if not claims:
        log.warning("not pinned: other workers leave fewer than %d of %s", threads, ranges(may))
    else:
        _run_on(claims)
        log.info("pinned to CPUs %s", ranges(claims))
    return Pinned(claims)


def chosen(threads: int, free: Collection[int], cores: Mapping[int, Core]) -> tuple[int, ...]:
    """`threads` of the free CPUs: first those of cores that are entirely free, then neighbours.
    Empty if there are too few. Pure."""
    shared = {core for cpu, core in cores.items() if cpu not in free}
    order = sorted(free, key=lambda cpu: (cores[cpu] in shared, cores[cpu], cpu))
    return tuple(order[:threads]) if threads <= len(order) else ()


def _claim(threads: int, may: Collection[int]) -> dict[int, socket.socket]:
    """One process at a time looks at all CPUs, so that two that start together don't share
    cores."""
    with _turn():
        tried = {cpu: _bound(str(cpu)) for cpu in may}
        free = {cpu: claim for cpu, claim in tried.items() if claim is not None}
        kept = chosen(threads, free, cores(may))
        for cpu in free.keys() - set(kept):
            free.pop(cpu).close()
    return free


@contextmanager
def _turn() -> Iterator[None]:
    """Doesn't wait for a holder that was stopped."""
    deadline_s = time.monotonic() + LOCK_PATIENCE_S
    while (lock := _bound(LOCK)) is None and time.monotonic() < deadline_s:
        time.sleep(POLL_S)
    try:
        yield
    finally:
        if lock is not None:
            lock.close()


def _bound(name: str) -> socket.socket | None:
    """None if another process has claimed it."""
    claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        claim.bind(f"\0{NAMES}{name}")
    except OSError:
        claim.close()
        return None
    return claim


def _run_on(cpus: Collection[int]) -> None:
    """New threads inherit the affinity of the thread that starts them."""
    for task in Path("/proc/self/task").iterdir():
        with suppress(ProcessLookupError):
            os.sched_setaffinity(int(task.name), cpus)
