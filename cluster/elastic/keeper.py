"""Keeps roles and numbers of a cluster's workers as the offered work asks: the shell of
ElasticController.

It looks each second, on a thread of its own, at the last report of each router. Where one is old,
more may be offered than is known: nobody leaves or changes its role then, though workers may come.
It keeps nothing that matters: one that begins anew looks for a window's time, and goes on.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from cluster.core.desired import pool_of
from cluster.core.elastic.controller import ElasticController, new_controller
from cluster.core.elastic.fleet import STARTS, Busy, Counts, fleet_of, who_changes, who_leaves
from cluster.core.elastic.offered_sums import STALE_S, OfferedSums
from cluster.core.elastic.rules import ElasticRules
from cluster.core.elastic.starts import LatestStarts, Settling
from cluster.elastic.heard import Told, roles_told, told_by
from cluster.elastic.owners import Owner
from cluster.process.admin import NotKnown, NotPossible
from cluster.watch.latest import Heard
from kvrelay.codec import MessageCodec
from kvrelay.errors import ConfigError, PeerError
from kvrelay.messages import WorkerHello
from kvrelay.types import Role
from kvrelay.v1 import admin_pb2 as pb
from kvrelay.wire import decode_hello
from router.core.load.needs import WorkerModel, model_of
from router.core.load.offered import OfferedWork

log = logging.getLogger(__name__)
EVERY_S = 1.0
_OFFERED = MessageCodec(OfferedWork, pb.OfferedWork, "a router")


class Reports(Protocol):
    """LatestReports, but for tests."""

    def of(self, routers: Sequence[str]) -> Sequence[Heard]: ...

    def close(self) -> None: ...


@dataclass(slots=True, kw_only=True)
class Keeper:
    """`routers`: internal gRPC addresses, asked for at each look."""

    routers: Callable[[], Sequence[str]]
    owner: Owner
    reports: Reports
    _controller: ElasticController | None = None
    _starts: LatestStarts | None = None
    _sums: OfferedSums = field(default_factory=OfferedSums)
    _settling: Settling = field(default_factory=Settling)
    _told: str = ""
    _stopping: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        """Until `stop`."""
        while not self._stopping.wait(EVERY_S):
            self.turn()
        self.reports.close()

    def turn(self) -> list[str]:
        """What changes, in words. What fails is logged once, and tried again."""
        reason, now_s = "", time.monotonic()
        try:
            heard = self.reports.of(self.routers())
            reason = _silence(heard, now_s)
            return self.look(heard, now_s)
        except (ConfigError, NotKnown, NotPossible, PeerError) as error:
            reason = f"workers stay as they are until it works: {error}"
            return []
        finally:
            if reason and reason != self._told:
                log.warning("%s", reason)
            self._told = reason

    def stop(self) -> None:
        self._stopping.set()

    def look(self, heard: Sequence[Heard], now_s: float) -> list[str]:
        """As `turn`. Raises what a change of a worker raises."""
        self._settling.hear(roles_told(heard, now_s), now_s)
        for one in heard:
            if one.report is not None:
                self._sums.hear(one.address, _offered(one.report), one.heard_s)
        told = _without_leaving(told_by(heard, now_s), self.owner.expected())
        rules = self.owner.rules([one.info.name for one in told.workers])
        following = [one for one in told.workers if rules.is_followed_by(pool_of(one.info.name))]
        if not following:
            return []
        controller = self._prepared(rules, following)
        fixed = [one for one in told.workers if one not in following]
        controller.keep(rules, Counts(_count(fixed, Role.PREFILL), _count(fixed, Role.DECODE)))
        starting = self._starting(told.workers, rules)
        there, is_known = map(_busy, told.workers), not told.unheard
        fleet = fleet_of(there, starting, settle_s=self._settling.p90_s, is_known=is_known)
        decision = controller.look(self._sums.total, fleet, now_s)
        if decision.prefill is not None:
            return self._change(following, decision.prefill - fleet.prefill, now_s)
        if decision.counts is not None:
            return self._resize([*starting, *map(_busy, following)], fleet.all, decision.counts)
        return []

    def _prepared(
        self, rules: ElasticRules, following: Sequence[pb.WatchedWorker]
    ) -> ElasticController:
        """Workers may have been replaced since the last look."""
        model = _model(following)
        if self._controller is None:
            self._controller = new_controller(rules, model)
            self._starts = LatestStarts(guess_s=rules.start_s)
        assert self._starts is not None
        for one in following:
            self._starts.hear(_hello(one))
        self._controller.model = model
        if self._controller.totals is not None:
            self._controller.totals.lead_s = self._starts.p90_s
        return self._controller

    def _starting(self, there: Sequence[pb.WatchedWorker], rules: ElasticRules) -> list[Busy]:
        """Also those that were not heard lately, which their owner starts again. Not those of other
        pools, whose numbers stay."""
        known = {one.info.name for one in there}
        return [
            Busy(name=name, role=role, work=STARTS)
            for name, role in self.owner.expected().items()
            if name not in known and rules.is_followed_by(pool_of(name))
        ]

    def _change(
        self, workers: Sequence[pb.WatchedWorker], more_prefill: int, now_s: float
    ) -> list[str]:
        names, role = who_changes(map(_busy, workers), more_prefill)
        for name in names:
            self.owner.change(name, role)
            self._settling.asked(name, role, now_s)
        because = self._because()
        return [f"{name} becomes a {role} worker: {because}" for name in names]

    def _resize(self, workers: Sequence[Busy], have: Counts, wanted: Counts) -> list[str]:
        """More of a role, or fewer, never both at once."""
        more = Counts(*(max(0, then - now) for then, now in zip(wanted, have, strict=True)))
        leaving = who_leaves(workers, have, wanted)
        self.owner.resize(more, leaving)
        because = self._because()
        told = [f"{name} leaves: {because}" for name in leaving]
        return [f"{more.workers} workers more: {because}", *told] if more.workers else told

    def _because(self) -> str:
        assert self._controller is not None
        needs = self._controller.needs
        assert needs is not None, "it has decided"
        return (
            f"offered work keeps {needs.prefill:.1f} prefill and {needs.decode:.1f} decode workers "
            "busy"
        )


def _silence(heard: Sequence[Heard], now_s: float) -> str:
    """Which routers are not heard; empty: all are."""
    silent = [one for one in heard if now_s - one.heard_s > STALE_S]
    if not silent:
        return ""
    why = "; ".join(f"{one.address}: {one.trouble or 'nothing is heard'}" for one in silent)
    return f"no worker leaves or changes its role until all routers are heard: {why}"


def _without_leaving(told: Told, expected: Mapping[str, Role]) -> Told:
    """A router hears later than their owner that workers of its pools leave."""
    pools = {pool_of(name) for name in expected}
    there = [
        one
        for one in told.workers
        if one.info.name in expected or pool_of(one.info.name) not in pools
    ]
    return replace(told, workers=tuple(there))


def _count(workers: Sequence[pb.WatchedWorker], role: Role) -> int:
    return sum(one.info.role == role for one in workers)


def _busy(worker: pb.WatchedWorker) -> Busy:
    role = Role(worker.info.role)
    work = worker.info.running if role is Role.DECODE else worker.waiting_tokens
    return Busy(name=worker.info.name, role=role, work=work)


def _model(workers: Sequence[pb.WatchedWorker]) -> WorkerModel:
    """Workers are taken to be alike. Raises PeerError for another version of kvrelay."""
    return model_of(_hello(workers[0]))


def _hello(worker: pb.WatchedWorker) -> WorkerHello:
    return decode_hello(worker.hello)


def _offered(told: pb.WatchReport) -> OfferedWork:
    return sum((_OFFERED.decode(one.offered) for one in told.tiers), OfferedWork())
