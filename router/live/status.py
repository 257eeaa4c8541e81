"""What a router can tell of its cluster: the part of `Dispatcher` that changes nothing.

What the workers and pool nodes of a cluster hold, asked now: `/debug/kv` and Admin.GetKv.

What happened to a request, for Admin.TraceRequest.

What the log and `/metrics` say of the tiers' ladders.

What the log and `kvrelay status` say of quarantined pairs: workers by name.

A worker's activity over the last seconds, from the counters that it sends. Pure.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

import grpc

from kvpool.core.layout.hashes import tenant_label
from kvrelay.counters import NO_ACTIVITY, Activity, Counters, activity
from kvrelay.gc_pauses import PAUSES
from kvrelay.messages import WorkerHello
from kvrelay.types import Incarnation, Role
from kvrelay.v1 import admin_pb2 as pb
from kvrelay.v1.admin_pb2 import GetKvResponse, TraceRequestResponse, WatchReport
from kvrelay.v1.pool_node_pb2 import PoolReport
from kvrelay.v1.worker_pb2 import DebugKvResponse, SetStateRequest, SetStateResponse
from router.core.core import RouterCore
from router.core.events import LadderStepped, PairQuarantined, PairTrusted
from router.core.faults.poison import Blame, Ending
from router.core.load.flow import OfferedRate
from router.core.load.needs import Needs, WorkerModel, model_of
from router.core.load.starts import Starts
from router.core.state.generation import (
    ClusterSnapshot,
    DirectoryStatus,
    LinkStatus,
    ModelFacts,
    NeedStatus,
    QuarantinedPair,
    TierStatus,
    WorkerStatus,
)
from router.core.state.ladder import Ladder, Ladders, LadderStep
from router.core.state.story import MOST_TOLD, Story
from router.core.state.worker_view import WorkerView, check_joins
from router.core.workers import Workers, obstacle
from router.live.link import WorkerLink
from router.live.pool_nodes import PoolNodeLink, PoolNodes
from router.live.watching import (
    AdmissionCounts,
    Seen,
    links_of,
    quarantine_statuses,
    report_of,
    status_of,
)

log = logging.getLogger(__name__)


_Report = TypeVar("_Report")


async def kv_reports(
    workers: Iterable[WorkerLink],
    pool_nodes: Iterable[PoolNodeLink],
    tenant_of: Callable[[str], str],
) -> pb.GetKvResponse:
    """`tenant_of` a request's id, as reports show it; empty where it isn't known."""
    answers, pools = await asyncio.gather(
        asyncio.gather(*(_asked(link.debug_kv(), link.address) for link in workers)),
        asyncio.gather(*(_asked(link.report(), link.address) for link in pool_nodes)),
    )
    found = pb.GetKvResponse()
    for answer in (*answers, *pools):
        _add(found, answer)
    _name(found, tenant_of)
    return found


async def _asked(asked: Awaitable[_Report], address: str) -> _Report | pb.SilentProcess:
    """One that does not answer hides none of the others."""
    try:
        return await asked
    except grpc.aio.AioRpcError as error:
        return pb.SilentProcess(address=address, error=error.details() or error.code().name)


def _add(found: pb.GetKvResponse, answer: object) -> None:
    match answer:
        case pb.SilentProcess():
            found.silent.append(answer)
        case DebugKvResponse():
            found.workers.append(answer)
        case PoolReport():
            found.pool_nodes.append(answer)


def _name(found: pb.GetKvResponse, tenant_of: Callable[[str], str]) -> None:
    for held in (held for worker in found.workers for held in worker.held):
        held.tenant = tenant_of(held.request_id)
    names = {worker.incarnation: worker.worker for worker in found.workers}
    for pool_held in (held for node in found.pool_nodes for held in node.held):
        pool_held.worker = names.get(pool_held.worker, pool_held.worker)


def story_told(story: Story, now_s: float) -> pb.RequestStory:
    """Its times count from its submission."""
    from_s = story.submitted_s
    return pb.RequestStory(
        request_id=story.request_id,
        age_s=now_s - from_s,
        left_out=story.left_out,
        events=[
            pb.StoryEvent(
                at_s=event.at_s - from_s,
                moment=event.moment,
                workers=event.workers,
                reason=event.reason,
                times=event.times,
                last_s=event.last_s - from_s,
            )
            for event in story.events
        ],
    )


def ladder_statuses(ladders: Ladders, now_s: float) -> tuple[TierStatus, ...]:
    return tuple(
        TierStatus(name=one.tier.name, step=one.step, latencies_s=_latencies_s(one, now_s))
        for one in ladders
    )


def _latencies_s(ladder: Ladder, now_s: float) -> dict[tuple[str, str], float]:
    found = {
        (one.kind.lower(), str(share)): one.latest.quantile(share, now_s)
        for one in ladder.watched
        for share in (0.99, 0.999)
    }
    return {name: seconds for name, seconds in found.items() if seconds is not None}


def tell_ladder_steps(event: LadderStepped) -> None:
    step = LadderStep(event.step).name.lower()
    log.warning("tier %s: admission at step %d (%s): %s", event.tier, event.step, step, event.cause)


def tell_quarantine(event: PairQuarantined | PairTrusted, workers: Workers) -> None:
    prefill, decode = workers.name_of(event.pair.prefill), workers.name_of(event.pair.decode)
    if isinstance(event, PairTrusted):
        log.info("%s -> %s is trusted again", prefill, decode)
        return
    why = f"{event.reason}: {event.message}"
    log.warning("%s -> %s is quarantined for %g s: %s", prefill, decode, event.seconds, why)


def tell_stand_ins(before: Collection[Role], workers: Workers) -> None:
    """`before`: the roles that had no worker."""
    for role in sorted(workers.missing.difference(before)):
        others = "the others serve as both until one is back" if workers else "nor any other"
        log.warning("no %s worker is left: %s", role, others)
    for role in sorted(set(before) - workers.missing):
        log.info("a %s worker is back", role)


def tell_ending(hello: WorkerHello, ending: Ending, suspected: int) -> None:
    """`suspected`: so many requests run alone from now on."""
    if ending.why:
        text = "worker %s has ended: %s; sequences in its last step: %d, new suspects: %d"
        level = logging.INFO if ending.blame is Blame.NONE else logging.WARNING
        log.log(level, text, hello.name, ending.why, len(ending.step), suspected)


WINDOW_S = 10.0
SAMPLE_S = 1.0
"""Counters come with every batch of events: only one reading a second is kept."""


@dataclass(slots=True)
class RecentActivity:
    """The latest counters of one worker, and one earlier reading for each second of the window."""

    total_blocks: int
    _samples: deque[tuple[float, Counters]] = field(default_factory=deque)  # oldest first
    _latest: tuple[float, Counters] | None = None

    def heard(self, counters: Counters, now_s: float) -> None:
        self._latest = now_s, counters
        if not self._samples or now_s - self._samples[-1][0] >= SAMPLE_S:
            self._samples.append(self._latest)
            self._forget(now_s)

    def _forget(self, now_s: float) -> None:
        """One sample that is older than the window stays: the window begins there."""
        while len(self._samples) > 1 and now_s - self._samples[1][0] >= WINDOW_S:
            self._samples.popleft()

    @property
    def heard_s(self) -> float | None:
        """When the latest counters came; None: none have."""
        return self._latest[0] if self._latest is not None else None

    def activity(self) -> Activity:
        if self._latest is None:
            return NO_ACTIVITY
        (from_s, before), (to_s, after) = self._samples[0], self._latest
        return activity(before, after, to_s - from_s, self.total_blocks)


class ClusterViews:
    """`attached`: # worker |-> its link, while there is one; `recent`: # worker |-> its activity"""

    def __init__(self, core: RouterCore, pools: PoolNodes) -> None:
        self.core = core
        self.offered_rate = OfferedRate(window_s=RATE_S)
        self._were: dict[Role, Counter[str]] = {}
        self._model: WorkerModel | None = None
        self.pools = pools
        self.attached: dict[Incarnation, WorkerLink] = {}
        self.recent: dict[Incarnation, RecentActivity] = {}
        self.counts = AdmissionCounts()
        self.starts = Starts()

    def ready(self) -> bool:
        return self.not_ready() is None

    def not_ready(self) -> str | None:
        """A worker that drains or is quarantined serves nobody."""
        quarantined = self.core.state.quarantine.active(time.monotonic())
        return obstacle(self.core.state.workers, quarantined)

    def other_routers(self, since_s: float) -> int:
        """What one that hangs said before counts for nothing."""
        lately = (
            view.counters.routers
            for worker, view in self.core.state.workers.items()
            if (one := self.recent.get(worker)) is not None and (one.heard_s or 0.0) > since_s
        )
        return max(lately, default=0)

    def workers(self) -> tuple[WorkerStatus, ...]:
        workers = self.core.state.workers
        return tuple(self._status(view, links_of(view, workers)) for view in workers.values())

    def snapshot(self) -> ClusterSnapshot:
        state, told, now_s = self.core.state, self.core.state.promises, time.monotonic()
        told.expire(now_s)
        return ClusterSnapshot(
            ready=self.ready(),
            running_requests=self.running_requests(),
            quarantined_pairs=len(state.quarantine.active(now_s)),
            queued_prompts=state.dispatch.waiting,
            moved_requests={cause.value: n for cause, n in state.moves.moved.items()},
            local_prefills=state.local_prefills,
            suspected_requests=state.suspects.suspected,
            poison_requests=state.suspects.convicted,
            directory=DirectoryStatus(
                blocks=state.directory.blocks,
                used_bytes=state.directory.used_bytes,
                dropped_blocks=state.directory.dropped_blocks,
            ),
            promises={
                "kept": told.kept,
                "broken": told.broken,
                "given_up": told.given_up,
                "expired": told.expired,
                "forgotten": told.forgotten,
            },
            workers=tuple(map(self._status, state.workers.values())),
            linked=state.recent_pairs.lately(now_s),
            pool_nodes=self.pools.statuses(),
            tiers=ladder_statuses(state.ladders, now_s),
            pauses=PAUSES,
            offered={tier: replace(work) for tier, work in state.offered.tiers.items()},
            hopeless=dict(state.offered.hopeless),
            shares=state.offered.shares.told(),
            prefilled={pool: replace(work) for pool, work in state.prefilled.items()},
            needs=self._needs(now_s),
            starts=self.starts.told(),
        )

    def _needs(self, now_s: float) -> dict[Role, NeedStatus]:
        """Nothing before the first worker, whose times say what work takes."""
        state = self.core.state
        self.offered_rate.note(now_s, state.offered.total)
        if (first := state.workers.first) is not None:
            self._model = model_of(first.hello)
        if self._model is None:
            return {}
        needs = Needs.of(self.offered_rate.per_second, self._model)
        prefill, decode = map(self._in_pools, (Role.PREFILL, Role.DECODE))
        return {
            Role.PREFILL: _need(needs.prefill, needs.prefill_capacity, prefill),
            Role.DECODE: _need(needs.decode, needs.decode_capacity, decode),
        }

    def _in_pools(self, role: Role) -> Counter[str]:
        """# pool |-> workers of it that have this role; once none is left, as it was before: a pool
        that starts again needs as many."""
        views = self.core.state.workers.values()
        there = Counter(one.hello.pool for one in views if one.own_role in (role, Role.BOTH))
        self._were[role] = there or self._were.get(role, Counter([str(role)]))
        return self._were[role]

    def _status(self, view: WorkerView, links: tuple[LinkStatus, ...] = ()) -> WorkerStatus:
        return status_of(view, self._seen(view.hello.incarnation), links)

    def quarantined(self) -> tuple[QuarantinedPair, ...]:
        state = self.core.state
        return quarantine_statuses(state.quarantine, state.workers, time.monotonic())

    def model(self) -> ModelFacts | None:
        return self.core.state.workers.model()

    def running_requests(self) -> int:
        return len(self.core.state.requests)

    def trace(self, request_id: str) -> TraceRequestResponse:
        found, now_s = self.core.state.stories_of(request_id), time.monotonic()
        told = found[-MOST_TOLD:]
        stories = [story_told(story, now_s) for story in told]
        return TraceRequestResponse(stories=stories, left_out=len(found) - len(told))

    def watch_report(self) -> WatchReport:
        seen = {worker: self._seen(worker) for worker in self.core.state.workers}
        not_ready = self.not_ready() or ""
        return report_of(self.core.state, seen, self.counts, not_ready, time.monotonic())

    def _seen(self, worker: Incarnation) -> Seen:
        link, recent = self.attached.get(worker), self.recent.get(worker)
        return Seen(
            address=link.address if link is not None else "",
            heard_s=recent.heard_s if recent is not None else None,
            activity=recent.activity() if recent is not None else NO_ACTIVITY,
        )

    def hellos(self, but: WorkerView | None = None) -> Iterator[WorkerHello]:
        """Of the workers, each with the role that it has by now."""
        views = self.core.state.workers.values()
        return (replace(one.hello, role=one.own_role) for one in views if one is not but)

    async def set_worker(self, name: str, wanted: SetStateRequest) -> SetStateResponse:
        """Raises LookupError where no worker has this name or it doesn't answer, PeerError for a
        role that it can't have beside the others."""
        views = self.core.state.workers.values()
        found = [view for view in views if view.hello.name == name]
        if not found:
            known = ", ".join(view.hello.name for view in views)
            raise LookupError(f"no worker is named {name}: there are {known or 'none'}")
        (view, *_) = found
        if wanted.HasField("role"):
            check_joins(replace(view.hello, role=Role(wanted.role)), self.hellos(but=view))
        return await self.attached[view.incarnation].set_state(wanted)

    async def debug_kv(self) -> GetKvResponse:
        links = list(self.attached.values())
        return await kv_reports(links, self.pools.links(), self._tenant_of)

    def _tenant_of(self, request_id: str) -> str:
        request = self.core.state.requests.get(request_id)
        return tenant_label(request.submitted.tenant) if request is not None else ""


RATE_S = 60.0
"""`/metrics` tells what was offered in so long, or since the scrape before."""


def _need(busy: float, capacity: Callable[[int], float], there: Mapping[str, int]) -> NeedStatus:
    """What is desired is spread over the pools as their workers are now."""
    most = capacity(sum(there.values()))
    saturation = busy / most if most else 0.0
    desired = {pool: saturation * workers for pool, workers in there.items()}
    return NeedStatus(busy=busy, desired=desired, saturation=saturation)
