"""How long sequences decode, by tier, as of a moment ago. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import inf

import numpy as np

from router.forecast.decode_outlook import DecodeOutlook, Survivals
from router.latency.output_lengths import OutputLengths
from router.latency.survival import Integers

FRESH_S = 0.25


@dataclass(slots=True)
class Lifetimes:
    lengths: OutputLengths = field(default_factory=OutputLengths)
    _of_tier: Survivals = field(default_factory=dict)
    _since_s: float = -inf

    def by_tier(self, outlooks: Iterable[DecodeOutlook], now_s: float) -> Survivals:
        """With those that run, at any worker."""
        if now_s - self._since_s >= FRESH_S:
            self._since_s = now_s
            self._of_tier = self._look(outlooks)
        return self._of_tier

    def _look(self, outlooks: Iterable[DecodeOutlook]) -> Survivals:
        running = defaultdict[str, list[Integers]](list)
        for outlook in outlooks:
            for tier, tokens in outlook.running():
                running[tier].append(tokens)
        found = {
            tier: self.lengths.survival(tier, np.concatenate(tokens))
            for tier, tokens in running.items()
            if any(map(len, tokens))
        }
        return {tier: survival for tier, survival in found.items() if survival is not None}
