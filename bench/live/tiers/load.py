"""What premium and free send in each phase. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from bench.live.offered import Mix, Offered, poisson

PREMIUM, FREE = "premium", "free"
ALONE, TIERS, AS_PREMIUM, AS_FREE = "alone", "tiers", "all-premium", "all-free"
PHASES = (ALONE, TIERS, AS_PREMIUM, AS_FREE)
ALIKE = {AS_PREMIUM: PREMIUM, AS_FREE: FREE}
"""All are of one tier, which has the objectives of this one."""
PREMIUM_FACTOR, FREE_FACTOR = 0.12, 4.0
"""Of the capacity for free's requests."""
WARM_S = 6.0
SHORT = Mix(prompt_tokens=(128, 512), output_tokens=(8, 48))
"""What premium always sends: so often that it stays within its shares of prefill and places."""
MIXES = {
    "prompts": Mix(prompt_tokens=(512, 1536), output_tokens=(8, 48)),
    "outputs": Mix(prompt_tokens=(64, 256), output_tokens=(200, 400)),
}
"""Free's, whose bottleneck is prefill, or places to decode in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    free: Mix
    capacity_per_s: float
    seconds: float
    seed: int
    corpus: Sequence[int]

    def arrivals(self, phase: str) -> list[Offered]:
        """Premium's are the same in all phases."""
        found = self._of(PREMIUM, SHORT, PREMIUM_FACTOR, self.seed)
        if phase != ALONE:
            found += self._of(FREE, self.free, FREE_FACTOR, 1000 + self.seed)
        return sorted(found, key=lambda one: one.at_s)

    def warm_up(self) -> list[Offered]:
        return replace(self, seconds=WARM_S)._of(FREE, self.free, 1.0, 2000 + self.seed)

    def _of(self, tier: str, mix: Mix, factor: float, seed: int) -> list[Offered]:
        rate = factor * self.capacity_per_s
        found = poisson(mix, self.corpus, rate_per_s=rate, seconds=self.seconds, seed=seed)
        return [replace(one, tier=tier) for one in found]
