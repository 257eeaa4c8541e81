"""What a refused client is told: when to come back, as a promise where one can be given. Pure; part
of a router's core."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import isfinite

from router.promises import Promises
from router.refusal import Refusal
from router.release_clock import ReleaseClock
from router.request import Request
from router.workers import Workers


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusing:
    promises: Promises
    workers: Workers
    releases: ReleaseClock = field(default_factory=ReleaseClock)

    def told(self, request: Request, refusal: Refusal, now_s: float) -> Refusal:
        if request.promise is not None:
            self.promises.settle(kept=False)
        known = refusal.retry_after_s is not None and isfinite(refusal.retry_after_s)
        if not known and not refusal.hopeless:
            refusal = replace(refusal, retry_after_s=self.releases.retry_after_s())
        return self._promise(request, refusal, now_s)

    def _promise(self, request: Request, refusal: Refusal, now_s: float) -> Refusal:
        soonest_s = refusal.retry_after_s
        if refusal.work is None or soonest_s is None or not isfinite(refusal.work.prefill_s):
            return refusal
        retry_after_s = self.promises.make(
            request.digest,
            refusal.work,
            soonest_s,
            now_s,
            request.tier.priority,
            again=request.promise is not None,
            all_by_own=self.workers.all_by_own(),
        )
        return replace(refusal, retry_after_s=retry_after_s)
