"""Why a request is not taken now, and when it may come back. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvrelay.errors import RefusalReason
from router.core.promises.work import Promised, ToldPromise


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """`reason` is a RefusalReason, or what a worker has named. `retry_after_s`: when the request
    would be taken, if that is known, and `work` how much work that would be. `hopeless`: never, as
    the cluster is. `promise`: what its client is told, and may bring back. `shares`: # ttft,
    tpot |-> what was predicted over what was asked for."""

    reason: str
    message: str
    retry_after_s: float | None = None
    hopeless: bool = False
    work: Promised | None = None
    promise: ToldPromise | None = None
    shares: Mapping[str, float] = field(default_factory=dict, hash=False)


NO_CAPACITY = Refusal(
    reason=RefusalReason.NO_CAPACITY, message="no prefill and decode worker is ready to serve"
)
BEHIND_DISPLACED = Refusal(
    reason=RefusalReason.SLOTS_EXHAUSTED,
    message="the places that are left are for requests that have lost their worker",
)
DRAINING = Refusal(
    reason=RefusalReason.DRAINING, message="every worker that could serve it is draining"
)


def refused_by_worker(reason: str) -> Refusal:
    messages: Mapping[str, str] = {
        RefusalReason.SLOTS_EXHAUSTED: "all places of every decode worker are taken",
        RefusalReason.KV_EXHAUSTED: "no decode worker has KV blocks left for this prompt",
        RefusalReason.TPOT_UNREACHABLE: "every decode worker has too much to decode",
        RefusalReason.TIER_SHARE_EXHAUSTED: "the places that are left are those of other tiers",
        RefusalReason.DRAINING: "the worker is draining",
    }
    return Refusal(reason=reason, message=messages.get(reason, reason))
