"""What Admin.Watch tells of a router: from its core and from what it has heard.

The report is a copy: nothing in it changes once it is built. Built in the router's event loop.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import inf

from kvrelay.codec import MessageCodec
from kvrelay.counters import NO_ACTIVITY, Activity, LinkState
from kvrelay.results import WorkerInfo
from kvrelay.types import Incarnation
from kvrelay.v1 import admin_pb2 as pb
from kvrelay.v1 import inference_pb2
from kvrelay.wire import encode_hello
from router.core.load.offered import OfferedWork
from router.core.router_state import RouterState
from router.core.state.generation import LinkStatus, QuarantinedPair, WorkerStatus
from router.core.state.quarantine import Quarantine
from router.core.state.worker_view import WorkerView
from router.core.workers import Workers


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What the shell knows of a worker. `heard_s`: when its latest counters came."""

    address: str = ""
    heard_s: float | None = None
    activity: Activity = NO_ACTIVITY


@dataclass(slots=True)
class AdmissionCounts:
    """# tier |-> requests since the router started"""

    admitted: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)


def report_of(
    state: RouterState,
    seen: Mapping[Incarnation, Seen],
    counts: AdmissionCounts,
    not_ready: str,
    now_s: float,
) -> pb.WatchReport:
    """`not_ready` says why no request can be served; empty: some can."""
    quarantined = state.quarantine.active(now_s)
    doubted = {worker for pair in quarantined for worker in (pair.prefill, pair.decode)}
    pairs = quarantine_statuses(state.quarantine, state.workers, now_s)
    return pb.WatchReport(
        not_ready=not_ready,
        open_requests=len(state.requests),
        waiting_requests=len(state.waiting),
        queued_prompts=state.dispatch.waiting,
        tiers=_tiers(state, counts),
        workers=[
            _worker(view, state.workers, seen.get(worker, Seen()), worker in doubted, now_s)
            for worker, view in state.workers.items()
        ],
        quarantined=map(quarantined_pair, pairs),
    )


_OFFERED = MessageCodec(OfferedWork, pb.OfferedWork, "a router")
NOTHING_OFFERED = OfferedWork()


def _tiers(state: RouterState, counts: AdmissionCounts) -> list[pb.WatchedTier]:
    """Those of the cluster file first."""
    here = Counter(request.tier.name for request in state.requests.values())
    known = [tier.name for tier in state.tiers.tiers]
    known += [*counts.admitted, *counts.refused]
    return [
        pb.WatchedTier(
            name=name,
            open_requests=here[name],
            admitted=counts.admitted[name],
            refused=counts.refused[name],
            offered=_OFFERED.encode(state.offered.tiers.get(name, NOTHING_OFFERED)),
        )
        for name in dict.fromkeys(known)
    ]


def _worker(
    view: WorkerView, workers: Workers, seen: Seen, doubted: bool, now_s: float
) -> pb.WatchedWorker:
    info = worker_info(status_of(view, seen, links_of(view, workers)))
    info.running = max(info.running, view.outlook.sequences)
    return pb.WatchedWorker(
        info=info,
        role_epoch=view.role_epoch,
        state=_state(view, doubted),
        heard_ago_s=None if seen.heard_s is None else max(0.0, now_s - seen.heard_s),
        waiting_tokens=view.counters.prefill_waiting_tokens,
        prefill_token_s=view.speed.prompt_token_s or None,
        decode_step_s=_decode_step_s(view),
        hello=encode_hello(view.hello),
    )


def status_of(view: WorkerView, seen: Seen, links: tuple[LinkStatus, ...] = ()) -> WorkerStatus:
    hello = view.hello
    return WorkerStatus(
        name=hello.name,
        pool=hello.pool,
        address=seen.address,
        incarnation=hello.incarnation,
        role=view.own_role,
        device=hello.device,
        cpus=hello.cpus,
        transport=hello.transport,
        total_blocks=hello.total_blocks,
        block_size=hello.block_size,
        counters=view.counters,
        step_times=hello.step_times,
        links=links,
        activity=seen.activity,
        kv_token_bytes=hello.kv_token_bytes,
        start=hello.start,
        takes=hello.takes,
        memory=hello.memory,
    )


def quarantine_statuses(
    quarantine: Quarantine, workers: Workers, now_s: float
) -> tuple[QuarantinedPair, ...]:
    return tuple(
        QuarantinedPair(
            prefill=workers.name_of(pair.prefill),
            decode=workers.name_of(pair.decode),
            reason=record.reason,
            failures=record.failures,
            remaining_s=record.until_s - now_s,
        )
        for pair, record in quarantine.active(now_s).items()
    )


_WORKER_INFO = MessageCodec(WorkerInfo, inference_pb2.WorkerInfo, "a router")
quarantined_pair = MessageCodec(QuarantinedPair, inference_pb2.QuarantinedPair, "a router").encode


def worker_info(worker: WorkerStatus) -> inference_pb2.WorkerInfo:
    """Each field from where the router has it: of the worker, its counters or its activity."""
    parts = (worker, worker.counters, worker.activity)
    found = {
        name: next(getattr(part, name) for part in parts if hasattr(part, name))
        for name in WorkerInfo.__dataclass_fields__
    }
    counters = replace(worker.counters, links=())
    return _WORKER_INFO.encode(WorkerInfo(**found | {"counters": counters}))


def _state(view: WorkerView, doubted: bool) -> pb.WorkerState:
    """What keeps most from it comes first."""
    if view.draining:
        return pb.WORKER_STATE_DRAINING
    if view.suspect:
        return pb.WORKER_STATE_SILENT
    return pb.WORKER_STATE_QUARANTINED if doubted else pb.WORKER_STATE_READY


def _decode_step_s(view: WorkerView) -> float | None:
    told = view.counters
    if not told.decode_sequences:
        return None
    step_s = view.decode_s(told.decode_sequences, told.decode_kv_tokens)
    return step_s if step_s < inf else None


def links_of(view: WorkerView, workers: Workers) -> tuple[LinkStatus, ...]:
    """To workers that are here."""
    links = (link for link in view.counters.links if link.peer in workers)
    return tuple(_link(link, workers) for link in links)


def _link(link: LinkState, workers: Workers) -> LinkStatus:
    return LinkStatus(
        peer=workers.name_of(link.peer),
        transport=link.transport,
        bytes_per_s=link.bytes_per_s,
        latency_s=link.latency_s,
    )
