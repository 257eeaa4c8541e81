"""On which hosts a cluster has pool nodes: those where its workers run, or last ran. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from cluster.supervised import Process
from cluster.supervision import Home, Kind, State


def pool_process(host: str) -> str:
    """The same at every start, so that a controller that was restarted finds it."""
    return f"pool-{host}"


class PoolHomes:
    """Those that were removed stay known: what is heard of their old lives is told apart."""

    def __init__(self) -> None:
        self._known: dict[str, Process] = {}

    def processes(self) -> tuple[Process, ...]:
        return tuple(p for p in self._known.values() if p.state is not State.GONE)

    def find(self, name: str) -> Process | None:
        return self._known.get(name)

    def settle(self, workers: Iterable[Process], now_s: float) -> list[Process]:
        """Wants one where workers are; the ones that are wanted no more."""
        homes = {worker.home for worker in workers if worker.home is not None}
        for home in sorted(homes, key=lambda home: home.node):
            self._want(home, homes, now_s)
        hosts = {home.host for home in homes}
        return [p for p in self.processes() if p.home and p.home.host not in hosts and _runs(p)]

    def _want(self, home: Home, homes: set[Home], now_s: float) -> None:
        name = pool_process(home.host)
        pool = self._known.setdefault(name, Process(name=name, kind=Kind.POOL_NODE))
        if pool.home not in homes:
            pool.home = home
        if pool.state is State.GONE:
            pool.state, pool.start_at_s = State.BACKING_OFF, now_s


def _runs(pool: Process) -> bool:
    return pool.state is not State.STOPPING
