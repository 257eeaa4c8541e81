"""How many clients come back for what they were promised. Pure.

Those that had come back already and were refused again are counted apart: who tries only once more
isn't there a third time.
"""

from __future__ import annotations

from dataclasses import dataclass, field

_NEW_SHARE = 0.05
_BELIEVED = 3
"""As if so many had come back, at first."""
EXCESS = 1.2
"""A line without gaps breaks promises: clients come in bunches, and newcomers fill what is free."""


@dataclass(slots=True)
class Share:
    """The mean of the first ones, then of the latest."""

    value: float = 1.0
    _learnt: int = 0

    @property
    def planned(self) -> float:
        """As many as are counted in the line."""
        return EXCESS * self.value

    def learn(self, claimed: bool) -> None:
        self._learnt += 1
        new_share = max(_NEW_SHARE, 1 / (self._learnt + _BELIEVED))
        self.value += new_share * (claimed - self.value)


@dataclass(slots=True)
class Claims:
    first: Share = field(default_factory=Share)
    again: Share = field(default_factory=Share)

    def of(self, again: bool) -> Share:
        return self.again if again else self.first
