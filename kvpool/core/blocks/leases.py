"""Holds with a time limit, owned by the owner of the held thing. Pure.

Word that whoever uses the held thing makes progress renews a lease; only the owner lets it expire.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

K = TypeVar("K")


@dataclass(slots=True)
class LeaseTable(Generic[K]):
    """# held thing |-> end of the hold, on the owner's clock"""

    ttl_s: float
    _ends_s: dict[K, float] = field(init=False, default_factory=dict)

    def __len__(self) -> int:
        return len(self._ends_s)

    def __contains__(self, held: K) -> bool:
        return held in self._ends_s

    def __iter__(self) -> Iterator[K]:
        """Leases may be ended during the iteration."""
        return iter(tuple(self._ends_s))

    def grant(self, held: K, now_s: float) -> None:
        assert held not in self._ends_s, f"{held} is leased already"
        self._ends_s[held] = now_s + self.ttl_s

    def renew(self, held: K, now_s: float) -> bool:
        """False when the lease has ended before."""
        if held not in self._ends_s:
            return False
        self._ends_s[held] = now_s + self.ttl_s
        return True

    def end(self, held: K) -> None:
        self._ends_s.pop(held, None)

    def expire(self, now_s: float) -> tuple[K, ...]:
        """Ends and returns every lease whose time is over."""
        over = tuple(held for held, end_s in self._ends_s.items() if end_s <= now_s)
        for held in over:
            del self._ends_s[held]
        return over
