"""How many requests of a batch run at once: fewer after a refusal, more while all are taken. Pure.

Additive increase, multiplicative decrease, as TCP does it (Chiu and Jain 1989).
"""

from __future__ import annotations

from dataclasses import dataclass

SHRINK = 0.75
"""A refusal says how full the server is now; it need not be halved for that."""


@dataclass(slots=True, kw_only=True)
class Window:
    """`most` may run at once at any time, `width` of them now.

    A request that was refused stays counted until it is answered: it comes back by itself, at the
    time it was promised. So those who wait keep new ones from being sent.
    """

    most: int
    width: float = 0.0
    open: int = 0
    _sent: int = 0
    _shrunk_at: int = 0

    def __post_init__(self) -> None:
        assert self.most >= 1, self.most
        self.width = float(self.most)

    @property
    def may_begin(self) -> bool:
        return self.open < max(1, int(self.width))

    def began(self) -> int:
        """Returns the request's number."""
        self.open += 1
        self._sent += 1
        return self._sent

    def refused(self, number: int) -> None:
        """Requests sent before the last shrinking say nothing new."""
        if number > self._shrunk_at:
            self.width = max(1.0, self.width * SHRINK)
            self._shrunk_at = self._sent

    def answered(self) -> None:
        self.open -= 1
        self.width = min(float(self.most), self.width + 1.0 / max(1.0, self.width))
        self.validate()

    def validate(self) -> None:
        assert self.open >= 0, self.open
        assert 1.0 <= self.width <= self.most, self.width
