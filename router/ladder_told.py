"""What the log and `/metrics` say of the tiers' ladders."""

from __future__ import annotations

import logging

from router.events import LadderStepped
from router.generation import TierStatus
from router.ladder import P99, P999, Ladder, Ladders, Step

log = logging.getLogger(__name__)


def statuses(ladders: Ladders, now_s: float) -> tuple[TierStatus, ...]:
    return tuple(
        TierStatus(name=one.tier.name, step=one.step, latencies_s=_latencies_s(one, now_s))
        for one in ladders
    )


def _latencies_s(ladder: Ladder, now_s: float) -> dict[tuple[str, str], float]:
    found = {
        (kind, str(share)): recent.quantile(share, now_s)
        for kind, recent in (("ttft", ladder.ttft), ("tpot", ladder.tpot))
        for share in (P99, P999)
    }
    return {name: seconds for name, seconds in found.items() if seconds is not None}


def tell(event: LadderStepped) -> None:
    step = Step(event.step).name.lower()
    log.warning("tier %s: admission at step %d (%s): %s", event.tier, event.step, step, event.cause)
