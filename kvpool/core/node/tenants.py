"""How many blocks of each tenant a tier holds, and since when. Pure.

A tenant is known by its label (kvpool.core.layout.hashes). Blocks that an earlier process left on
disk have none.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from kvpool.core.layout.hashes import TenantBlocks, most_of


@dataclass(slots=True)
class _Strands:
    """The strands of one label. `grown` is the one that grew last, at `grown_s`."""

    blocks: int = 0
    begun_s: dict[int, float] = field(default_factory=dict)  # in the order of time
    grown: int = 0
    grown_s: float = 0.0

    def newest_s(self) -> float:
        begun_s = self.begun_s[next(reversed(self.begun_s))]
        return max(begun_s, self.grown_s) if self.grown in self.begun_s else begun_s


@dataclass(slots=True)
class TenantAges:
    """The age of a strand's first blocks is known, and of those that came last to a label."""

    _of: dict[str, _Strands] = field(default_factory=dict)

    def came(self, label: str, strand: int, blocks: int, now_s: float) -> None:
        strands = self._of.setdefault(label, _Strands())
        strands.blocks += blocks
        if strand in strands.begun_s:
            strands.grown, strands.grown_s = strand, now_s
        else:
            strands.begun_s[strand] = now_s

    def went(self, label: str, strand: int, blocks: int, *, is_gone: bool) -> None:
        """Blocks went from the strand's end. With `is_gone`, none will be left of it."""
        strands = self._of[label]
        strands.blocks -= blocks
        if is_gone:
            strands.begun_s.pop(strand, None)
        if not strands.blocks:
            del self._of[label]

    def cached(self, now_s: float) -> list[TenantBlocks]:
        """By label, those with the most blocks."""
        return most_of(self._report(now_s))

    def _report(self, now_s: float) -> Iterator[TenantBlocks]:
        for label, strands in self._of.items():
            yield TenantBlocks(
                tenant=label,
                blocks=strands.blocks,
                oldest_s=now_s - next(iter(strands.begun_s.values())),
                newest_s=now_s - strands.newest_s(),
            )

    def validate(self, held: dict[str, dict[int, int]]) -> None:
        """`held`: label |-> strand |-> blocks."""
        assert {label: set(strands.begun_s) for label, strands in self._of.items()} == {
            label: set(strands) for label, strands in held.items()
        }
        for label, strands in self._of.items():
            assert strands.blocks == sum(held[label].values()), label
