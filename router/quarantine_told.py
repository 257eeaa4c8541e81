"""What the log and `kvrelay status` say of quarantined pairs: workers by name."""

from __future__ import annotations

import logging

from router.events import PairQuarantined, PairTrusted
from router.generation import QuarantinedPair
from router.quarantine import Quarantine
from router.workers import Workers

log = logging.getLogger(__name__)


def statuses(quarantine: Quarantine, workers: Workers, now_s: float) -> tuple[QuarantinedPair, ...]:
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


def tell(event: PairQuarantined | PairTrusted, workers: Workers) -> None:
    prefill, decode = workers.name_of(event.pair.prefill), workers.name_of(event.pair.decode)
    if isinstance(event, PairTrusted):
        log.info("%s -> %s is trusted again", prefill, decode)
        return
    why = f"{event.reason}: {event.message}"
    log.warning("%s -> %s is quarantined for %g s: %s", prefill, decode, event.seconds, why)
