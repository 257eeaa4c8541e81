"""Keeps roles and numbers of a cluster's workers as the offered work asks: the shell of
ElasticController.

It asks all routers each second, on a thread of its own. Where one does not answer, less is known
than was offered: nothing changes then. It keeps nothing that matters: one that begins anew looks
for a window's time, and goes on.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from cluster.core.desired import pool_of
from cluster.core.elastic.controller import ElasticController, new_controller
from cluster.core.elastic.fleet import STARTS, Busy, Counts, Fleet, who_changes, who_leaves
from cluster.core.elastic.rules import ElasticRules
from cluster.core.elastic.starts import LatestStarts
from cluster.elastic.owners import Owner
from cluster.process.admin import NotKnown, NotPossible, report
from kvrelay.access.values import Access
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
ANSWER_S = 2.0
_OFFERED = MessageCodec(OfferedWork, pb.OfferedWork, "a router")


@dataclass(slots=True, kw_only=True)
class Keeper:
    """`routers`: internal gRPC addresses, asked for at each look."""

    routers: Callable[[], Sequence[str]]
    owner: Owner
    access: Access
    _controller: ElasticController | None = None
    _starts: LatestStarts | None = None
    _told: str = ""
    _stopping: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        """Until `stop`."""
        while not self._stopping.wait(EVERY_S):
            self.turn()

    def turn(self) -> list[str]:
        """What changes, in words. What fails is logged once, and tried again."""
        reason = ""
        try:
            return self.look(time.monotonic())
        except (ConfigError, NotKnown, NotPossible, PeerError) as error:
            reason = str(error)
            if reason != self._told:
                log.warning("workers stay as they are until it works: %s", reason)
            return []
        finally:
            self._told = reason

    def stop(self) -> None:
        self._stopping.set()

    def look(self, now_s: float) -> list[str]:
        """As `turn`. Raises ConfigError where a router doesn't answer."""
        found = [report(router, self.access, timeout_s=ANSWER_S) for router in self.routers()]
        there = _workers(found)
        rules = self.owner.rules([one.info.name for one in there])
        following = [one for one in there if rules.is_followed_by(pool_of(one.info.name))]
        if not following:
            return []
        controller = self._prepared(rules, following)
        fixed = [one for one in there if one not in following]
        controller.keep(rules, Counts(_count(fixed, Role.PREFILL), _count(fixed, Role.DECODE)))
        starting = self._starting(there, rules)
        fleet = _fleet(there, starting)
        offered = sum((_offered(one) for one in found), OfferedWork())
        decision = controller.look(offered, fleet, now_s)
        if decision.prefill is not None:
            return self._change(following, fleet, decision.prefill)
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
        """Not those of other pools, whose numbers stay."""
        known = {one.info.name for one in there}
        return [
            Busy(name=name, role=role, work=STARTS)
            for name, role in self.owner.expected().items()
            if name not in known and rules.is_followed_by(pool_of(name))
        ]

    def _change(self, workers: Sequence[pb.WatchedWorker], fleet: Fleet, prefill: int) -> list[str]:
        names, role = who_changes(map(_busy, workers), prefill - fleet.prefill)
        for name in names:
            self.owner.change(name, role)
        because = self._because()
        return [f"{name} becomes a {role} worker: {because}" for name in names]

    def _resize(self, workers: Sequence[Busy], have: Counts, wanted: Counts) -> list[str]:
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


def _fleet(there: Sequence[pb.WatchedWorker], starting: Sequence[Busy]) -> Fleet:
    roles = [one.role for one in starting]
    return Fleet(
        prefill=_count(there, Role.PREFILL),
        decode=_count(there, Role.DECODE),
        running=sum(one.info.running for one in there if one.info.role == Role.DECODE),
        starting=Counts(roles.count(Role.PREFILL), roles.count(Role.DECODE)),
    )


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


def _workers(found: Iterable[pb.WatchReport]) -> list[pb.WatchedWorker]:
    """Each once, in the order of their names; those that drain are as good as gone."""
    known = {one.info.incarnation: one for told in found for one in told.workers}
    return sorted(
        (one for one in known.values() if one.state != pb.WORKER_STATE_DRAINING),
        key=lambda one: one.info.name,
    )


def _offered(told: pb.WatchReport) -> OfferedWork:
    return sum((_OFFERED.decode(one.offered) for one in told.tiers), OfferedWork())
