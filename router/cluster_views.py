"""What a router can tell of its cluster: the part of `Dispatcher` that changes nothing."""

from __future__ import annotations

import time
from dataclasses import replace

from kvpool.tenants import tenant_label
from kvrelay.activity import NO_ACTIVITY
from kvrelay.gc_pauses import PAUSES
from kvrelay.messages import LinkState
from kvrelay.types import Incarnation
from kvrelay.v1.admin_pb2 import GetKvResponse
from router import ladder_told, quarantine_told
from router.core import RouterCore
from router.generation import (
    ClusterSnapshot,
    LinkStatus,
    ModelFacts,
    QuarantinedPair,
    WorkerStatus,
)
from router.kv_reports import kv_reports
from router.link import WorkerLink
from router.pool_nodes import PoolNodes
from router.readiness import obstacle
from router.recent_activity import RecentActivity
from router.view import WorkerView


class ClusterViews:
    """`attached`: # worker |-> its link, while there is one; `recent`: # worker |-> its activity"""

    def __init__(self, core: RouterCore, pools: PoolNodes) -> None:
        self.core = core
        self.pools = pools
        self.attached: dict[Incarnation, WorkerLink] = {}
        self.recent: dict[Incarnation, RecentActivity] = {}

    def ready(self) -> bool:
        return self.not_ready() is None

    def not_ready(self) -> str | None:
        """A worker that drains or is quarantined serves nobody."""
        quarantined = self.core.quarantine.active(time.monotonic())
        return obstacle(self.core.workers, quarantined)

    def workers(self) -> tuple[WorkerStatus, ...]:
        return tuple(map(self._with_links, self.core.workers.values()))

    def snapshot(self) -> ClusterSnapshot:
        core, told, now_s = self.core, self.core.promises, time.monotonic()
        return ClusterSnapshot(
            ready=self.ready(),
            running_requests=self.running_requests(),
            quarantined_pairs=len(core.quarantine.active(now_s)),
            queued_prompts=core.dispatch.waiting,
            moved_requests=core.moving.moved,
            local_prefills=core.local_prefills,
            promises={"kept": told.kept, "broken": told.broken, "expired": told.expired},
            workers=tuple(map(self._status, core.workers.values())),
            linked=core.recent_pairs.lately(now_s),
            pool_nodes=self.pools.statuses(),
            tiers=ladder_told.statuses(core.ladders, now_s),
            pauses=PAUSES,
        )

    def _status(self, view: WorkerView) -> WorkerStatus:
        """Without its links."""
        hello = view.hello
        link = self.attached.get(hello.incarnation)
        recent = self.recent.get(hello.incarnation)
        return WorkerStatus(
            name=hello.name,
            address=link.address if link is not None else "",
            incarnation=hello.incarnation,
            role=hello.role,
            device=hello.device,
            cpus=hello.cpus,
            transport=hello.transport,
            total_blocks=hello.total_blocks,
            block_size=hello.block_size,
            counters=view.counters,
            step_times=hello.step_times,
            activity=recent.activity() if recent is not None else NO_ACTIVITY,
            kv_token_bytes=hello.kv_token_bytes,
        )

    def _with_links(self, view: WorkerView) -> WorkerStatus:
        links = tuple(self._link_status(state) for state in view.counters.links)
        return replace(self._status(view), links=links)

    def _link_status(self, state: LinkState) -> LinkStatus:
        return LinkStatus(
            peer=self.core.workers.name_of(state.peer),
            transport=state.transport,
            bytes_per_s=state.bytes_per_s,
            latency_s=state.latency_s,
        )

    def quarantined(self) -> tuple[QuarantinedPair, ...]:
        core = self.core
        return quarantine_told.statuses(core.quarantine, core.workers, time.monotonic())

    def model(self) -> ModelFacts | None:
        return self.core.workers.model()

    def running_requests(self) -> int:
        return len(self.core.requests)

    async def debug_kv(self) -> GetKvResponse:
        links = list(self.attached.values())
        return await kv_reports(links, self.pools.links(), self._tenant_of)

    def _tenant_of(self, request_id: str) -> str:
        request = self.core.requests.get(request_id)
        return tenant_label(request.submitted.tenant) if request is not None else ""
