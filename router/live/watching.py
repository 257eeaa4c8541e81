"""What Admin.Watch tells of a router: from its core and from what it has heard.

The report is a copy: nothing in it changes once it is built. Built in the router's event loop.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import inf

from kvrelay.codec import MessageCodec
from kvrelay.messages import NO_ACTIVITY, Activity
from kvrelay.types import Incarnation
from kvrelay.v1 import admin_pb2 as pb
from kvrelay.wire import encode_hello
from router.core.load.offered import OfferedWork
from router.core.router_state import RouterState
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
    pairs = state.quarantine.active(now_s)
    doubted = {worker for pair in pairs for worker in (pair.prefill, pair.decode)}
    return pb.WatchReport(
        not_ready=not_ready,
        open_requests=len(state.requests),
        waiting_requests=len(state.waiting),
        queued_prompts=state.dispatch.waiting,
        tiers=_tiers(state, counts),
        workers=[
            _worker(view, seen.get(worker, Seen()), worker in doubted, now_s)
            for worker, view in state.workers.items()
        ],
        links=_links(state.workers),
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


def _worker(view: WorkerView, seen: Seen, doubted: bool, now_s: float) -> pb.WatchedWorker:
    hello, told, rates = view.hello, view.counters, seen.activity
    return pb.WatchedWorker(
        name=hello.name,
        address=seen.address,
        incarnation=hello.incarnation,
        role=view.own_role,
        role_epoch=view.role_epoch,
        state=_state(view, doubted),
        heard_ago_s=None if seen.heard_s is None else max(0.0, now_s - seen.heard_s),
        running=max(told.running, view.outlook.sequences),
        waiting=told.waiting,
        waiting_tokens=told.prefill_waiting_tokens,
        free_blocks=told.free_blocks,
        cached_blocks=told.cached_blocks,
        total_blocks=hello.total_blocks,
        prompt_tokens_per_s=rates.prompt_tokens_per_s,
        generated_tokens_per_s=rates.generated_tokens_per_s,
        transfer_bytes_per_s=rates.transfer_bytes_per_s,
        prefill_token_s=view.speed.prompt_token_s or None,
        decode_step_s=_decode_step_s(view),
        hello=encode_hello(hello),
    )


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


def _links(workers: Workers) -> Iterator[pb.WatchedLink]:
    """Between workers that are here."""
    for view in workers.values():
        for link in view.counters.links:
            if link.peer in workers:
                yield pb.WatchedLink(
                    source=view.hello.name,
                    target=workers.name_of(link.peer),
                    transport=link.transport,
                    bytes_per_s=link.bytes_per_s,
                    latency_s=link.latency_s,
                )
