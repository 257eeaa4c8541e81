"""Keeps the roles of a cluster's workers as the offered work asks: the shell of ElasticController.

It asks all routers each second, on a thread of its own. Where one does not answer, less is known
than was offered: nothing changes then. It keeps nothing that matters: one that begins anew looks
for a window's time, and goes on.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from cluster.core.elastic.controller import ElasticController
from cluster.core.elastic.fleet import Busy, Fleet, who_changes
from cluster.core.elastic.roles import RoleController
from cluster.core.elastic.rules import RoleRules
from cluster.process.admin import NotKnown, NotPossible, ask
from kvrelay.access.values import Access
from kvrelay.codec import MessageCodec
from kvrelay.errors import ConfigError, PeerError
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
class RoleKeeper:
    """`routers`: internal gRPC addresses, asked for at each look. `change` gives a worker another
    role, if it `may_change`."""

    routers: Callable[[], Sequence[str]]
    rules: RoleRules
    access: Access
    change: Callable[[str, Role], None]
    may_change: Callable[[str], bool]
    _controller: ElasticController | None = None
    _told: str = ""
    _stopping: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        """Until `stop`."""
        while not self._stopping.wait(EVERY_S):
            self.turn()

    def turn(self) -> list[tuple[str, Role]]:
        """The workers that got another role. What fails is logged once, and tried again."""
        reason = ""
        try:
            return self.look(time.monotonic())
        except (ConfigError, NotKnown, NotPossible, PeerError) as error:
            reason = str(error)
            if reason != self._told:
                log.warning("roles stay as they are until it works: %s", reason)
            return []
        finally:
            self._told = reason

    def stop(self) -> None:
        self._stopping.set()

    def look(self, now_s: float) -> list[tuple[str, Role]]:
        """As `turn`. Raises ConfigError where a router doesn't answer."""
        found = [self._asked(router) for router in self.routers()]
        workers = _workers(found)
        flexible = [one for one in workers if self.may_change(one.hello.name)]
        if not flexible:
            return []
        model = _model(flexible)
        if self._controller is None:
            self._controller = ElasticController(
                model=model, window_s=self.rules.window_s, roles=RoleController()
            )
        self._controller.model = model  # workers may have been replaced
        fixed = [one for one in workers if one not in flexible]
        assert self._controller.roles is not None
        self._controller.roles.rules = self.rules.with_fixed(
            prefill=len(_of(fixed, Role.PREFILL)), decode=len(_of(fixed, Role.DECODE))
        )
        fleet = Fleet(
            prefill=len(_of(workers, Role.PREFILL)),
            decode=len(_of(workers, Role.DECODE)),
            running=sum(one.running for one in _of(workers, Role.DECODE)),
        )
        offered = sum((_offered(one) for one in found), OfferedWork())
        wanted = self._controller.look(offered, fleet, now_s).prefill
        if wanted is None:
            return []
        log.info("%s", said(self._controller, fleet, wanted))
        return self._change(flexible, wanted - fleet.prefill)

    def _asked(self, router: str) -> pb.GetDemandResponse:
        request = pb.GetDemandRequest()
        return ask(router, lambda stub: stub.GetDemand, request, self.access, timeout_s=ANSWER_S)

    def _change(
        self, workers: Sequence[pb.WorkerDemand], more_prefill: int
    ) -> list[tuple[str, Role]]:
        names, role = who_changes(map(_busy, workers), more_prefill)
        for name in names:
            self.change(name, role)
        return [(name, role) for name in names]


def _busy(worker: pb.WorkerDemand) -> Busy:
    role = Role(worker.role)
    work = worker.running if role is Role.DECODE else worker.waiting_tokens
    return Busy(name=worker.hello.name, role=role, work=work)


def said(controller: ElasticController, fleet: Fleet, prefill: int) -> str:
    needs = controller.needs
    assert needs is not None, "it has decided"
    return (
        f"offered work keeps {needs.prefill:.1f} prefill and {needs.decode:.1f} decode workers "
        f"busy: {prefill} + {fleet.workers - prefill} instead of {fleet.prefill} + {fleet.decode}"
    )


def _model(workers: Sequence[pb.WorkerDemand]) -> WorkerModel:
    """Workers are taken to be alike. Raises PeerError for another version of kvrelay."""
    chunk_tokens = max(one.hello.prefill_chunk_tokens for one in workers)
    return replace(model_of(decode_hello(workers[0].hello)), chunk_tokens=chunk_tokens)


def _workers(found: Iterable[pb.GetDemandResponse]) -> list[pb.WorkerDemand]:
    """Each once, in the order of their names; those that drain are as good as gone."""
    known = {one.hello.incarnation: one for response in found for one in response.workers}
    return sorted(
        (one for one in known.values() if not one.draining), key=lambda one: one.hello.name
    )


def _of(workers: Sequence[pb.WorkerDemand], role: Role) -> list[pb.WorkerDemand]:
    return [one for one in workers if one.role == role]


def _offered(response: pb.GetDemandResponse) -> OfferedWork:
    return sum((_OFFERED.decode(one.offered) for one in response.tiers), OfferedWork())
