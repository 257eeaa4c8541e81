"""CPUs of its own for a worker that computes on them, agreed between all workers of a host.

A CPU is claimed by an abstract UNIX socket that is named after it. Every worker of the host's
network namespace sees the claim, whatever started it, and it ends with its process.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from cluster import host_cpus
from cluster.host_cpus import Core, ranges

log = logging.getLogger(__name__)

NAMES = "kvrelay-cpu-"
LOCK = "lock"
LOCK_PATIENCE_S = 5.0
POLL_S = 0.002


class Pinned:
    """`cpus`: those that only this worker uses; none: it runs wherever it may."""

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
    """All threads of this process, and those it will start, onto as many CPUs as it computes with,
    which no other worker uses; or none, with the reason logged."""
    may = host_cpus.allowed()
    limit = host_cpus.quota()
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
    """`threads` of the free CPUs: first those of cores that no one else uses, then neighbours; none
    where these are too few. Pure."""
    shared = {core for cpu, core in cores.items() if cpu not in free}
    order = sorted(free, key=lambda cpu: (cores[cpu] in shared, cores[cpu], cpu))
    return tuple(order[:threads]) if threads <= len(order) else ()


def _claim(threads: int, may: Collection[int]) -> dict[int, socket.socket]:
    """One at a time looks at all of them, so that two that start together don't split cores."""
    with _turn():
        tried = {cpu: _bound(str(cpu)) for cpu in may}
        free = {cpu: claim for cpu, claim in tried.items() if claim is not None}
        kept = chosen(threads, free, host_cpus.cores(may))
        for cpu in free.keys() - set(kept):
            free.pop(cpu).close()
    return free


@contextmanager
def _turn() -> Iterator[None]:
    """A holder that was stopped isn't waited for."""
    deadline_s = time.monotonic() + LOCK_PATIENCE_S
    while (lock := _bound(LOCK)) is None and time.monotonic() < deadline_s:
        time.sleep(POLL_S)
    try:
        yield
    finally:
        if lock is not None:
            lock.close()


def _bound(name: str) -> socket.socket | None:
    """None where another process has it."""
    claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        claim.bind(f"\0{NAMES}{name}")
    except OSError:
        claim.close()
        return None
    return claim


def _run_on(cpus: Collection[int]) -> None:
    """New threads inherit it from those that start them."""
    for task in Path("/proc/self/task").iterdir():
        with suppress(ProcessLookupError):
            os.sched_setaffinity(int(task.name), cpus)
