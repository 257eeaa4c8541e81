"""Why a request is not taken now, and when it may come back. Pure values."""

from __future__ import annotations

from dataclasses import dataclass

from router.promises import Promised


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """`reason` is one of ttft_unreachable, tpot_unreachable, deadline_unreachable, kv_exhausted,
    slots_exhausted, tier_share_exhausted, draining, no_capacity. `retry_after_s`: when it would
    be taken, where that can be told, and `work` how much that would be; `hopeless`: never, as the
    cluster is."""

    reason: str
    message: str
    retry_after_s: float | None = None
    hopeless: bool = False
    work: Promised | None = None


NO_CAPACITY = Refusal(
    reason="no_capacity", message="no prefill and decode worker is ready to serve"
)
DRAINING = Refusal(reason="draining", message="every worker that could serve it is draining")


def refused_by_worker(reason: str) -> Refusal:
    messages = {
        "slots_exhausted": "all places of every decode worker are taken",
        "kv_exhausted": "no decode worker has KV blocks left for this prompt",
        "tpot_unreachable": "every decode worker has too much to decode",
        "tier_share_exhausted": "the places that are left are those of other tiers",
        "draining": "the worker is draining",
    }
    return Refusal(reason=reason, message=messages.get(reason, reason))
