"""What the last reports of all routers tell of the workers, and whether they tell all."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from cluster.core.elastic.offered_sums import STALE_S
from cluster.watch.latest import Heard
from kvrelay.types import Role
from kvrelay.v1 import admin_pb2 as pb


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """`workers`: those that serve, in the order of their names. `unheard`: routers and workers that
    were not heard lately, or that serve nobody by what was; then nobody may be missed."""

    workers: tuple[pb.WatchedWorker, ...]
    unheard: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Worker:
    """As the router told that has heard it last. `age_s`: of its counters."""

    told: pb.WatchedWorker
    age_s: float

    @property
    def name(self) -> str:
        return self.told.info.name

    @property
    def is_heard(self) -> bool:
        return self.age_s <= STALE_S and self.told.state != pb.WORKER_STATE_SILENT


def told_by(heard: Sequence[Heard], now_s: float) -> Told:
    known = _workers(heard, now_s)
    there = [one for one in known if one.is_heard]
    cut_off = _cut_off([one.told for one in there], heard)
    silent = [one.address for one in heard if one.report is None or now_s - one.heard_s > STALE_S]
    silent += [one.name for one in known if not one.is_heard or one.name in cut_off]
    return Told(
        workers=tuple(one.told for one in there if one.name not in cut_off),
        unheard=tuple(silent),
    )


def roles_told(heard: Sequence[Heard], now_s: float) -> dict[str, list[Role]]:
    """# worker |-> its role, as each router that is heard tells it"""
    roles: defaultdict[str, list[Role]] = defaultdict(list)
    for one in heard:
        if one.report is not None and now_s - one.heard_s <= STALE_S:
            for worker in one.report.workers:
                roles[worker.info.name].append(Role(worker.info.role))
    return roles


def _workers(heard: Iterable[Heard], now_s: float) -> list[_Worker]:
    """Each once, in the order of their names; those that drain are as good as gone."""
    found: dict[str, _Worker] = {}
    for one in heard:
        for told in one.report.workers if one.report is not None else ():
            worker = _Worker(told, now_s - one.heard_s + told.heard_ago_s)
            other = found.setdefault(worker.name, worker)
            if worker.age_s < other.age_s:
                found[worker.name] = worker
    left = (one for one in found.values() if one.told.state != pb.WORKER_STATE_DRAINING)
    return sorted(left, key=lambda one: one.name)


def _cut_off(workers: Sequence[pb.WatchedWorker], heard: Iterable[Heard]) -> set[str]:
    """Those that can hand over to nobody: each pair of them is quarantined at some router."""
    bad = {
        (pair.prefill, pair.decode)
        for one in heard
        if one.report is not None
        for pair in one.report.quarantined
    }
    names: defaultdict[Role, list[str]] = defaultdict(list)
    for one in workers:
        names[Role(one.info.role)].append(one.info.name)
    prefills, decodes = names[Role.PREFILL], names[Role.DECODE]
    if not bad or not prefills or not decodes:
        return set()
    alone = {p for p in prefills if all((p, d) in bad for d in decodes)}
    return alone | {d for d in decodes if all((p, d) in bad for p in prefills)}
