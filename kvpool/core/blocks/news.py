"""What a tier has to tell of its strands since the last message. Pure.

A strand is what was inserted in one go, with what it grew by since: one contiguous range of depths
[begin, end) of a sequence of blocks. Only its end moves, and it outlives the strands below it.

News are coalesced: of a strand that changed it is known how far it was told, and the lowest end
that it had since then. So blocks that came and went in between are not told, and those that went
and came again with other hashes are told again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import NamedTuple, Protocol

from kvrelay.messages import CutRun, StoredRun

ROOT = 0
"""Stands for a parent of the strands that begin a sequence. A strand's number is greater than its
parent's."""


class Strand(NamedTuple):
    """It has the depths [begin, end), and begins below the block at `begin` - 1 of `parent`."""

    parent: int
    begin: int
    end: int


class Strands(Protocol):
    """The strands of one tier as they are now."""

    def strand(self, number: int) -> Strand | None:
        """None: it is gone."""

    def hashes(self, number: int, start: int, end: int) -> bytes:
        """Of the strand's blocks at these depths, 32 bytes each."""


class RunNews:
    """For receivers that have heard the same. The owner of the tier reports each change at once, in
    its order. A call takes constant time; `take` takes constant time for each strand that it tells.

    `untold` are strands that are there already: they wait to be told, page by page.
    """

    def __init__(self, strands: Strands, untold: Iterable[int] = ()) -> None:
        self._strands = strands
        # strand |-> the depth up to which it was told
        self._told: dict[int, int] = {}
        # strand |-> its lowest end since then, where that is less
        self._cut: dict[int, int] = {}
        # Strands that may have more to tell, in the order of their first change. A strand changes
        # before others begin below its new blocks, so parents come before their children.
        self._grown: OrderedDict[int, None] = OrderedDict.fromkeys(sorted(untold))

    def __bool__(self) -> bool:
        """Whether there may be something to tell."""
        return bool(self._grown or self._cut)

    @property
    def waiting(self) -> int:
        """At least as many strands as have something to tell; at most twice as many."""
        return len(self._grown) + len(self._cut)

    def stored(self, number: int) -> None:
        """The strand is new, or has grown."""
        self._grown[number] = None

    def cut(self, number: int, end: int) -> None:
        """The strand ends at depth `end` now. It is gone if it begins there."""
        told = self._told.get(number)
        if told is not None and end < told:
            self._cut[number] = min(end, self._cut.get(number, end))
        if self._strands.strand(number) is None:
            self._grown.pop(number, None)

    def take(self, most_blocks: int) -> tuple[tuple[CutRun, ...], tuple[StoredRun, ...]]:
        """All cuts, then the next blocks, at most this many. The rest waits for the next call."""
        return self._take_cuts(), self._take_stored(most_blocks)

    def _take_cuts(self) -> tuple[CutRun, ...]:
        """Children before their parents."""
        cuts = sorted(self._cut.items(), reverse=True)
        self._cut.clear()
        for number, end in cuts:
            self._told[number] = end
            if self._strands.strand(number) is None:
                del self._told[number]
        return tuple([CutRun(number=number, end=end) for number, end in cuts])

    def _take_stored(self, most_blocks: int) -> tuple[StoredRun, ...]:
        stored: list[StoredRun] = []
        while self._grown and most_blocks:
            number = next(iter(self._grown))
            strand = self._strands.strand(number)
            if strand is None:
                del self._grown[number]
                continue
            start = self._told.get(number, strand.begin)
            end = min(strand.end, start + most_blocks)
            if start < end:
                stored.append(self._tell(number, strand, start, end))
                most_blocks -= end - start
            if end == strand.end:
                del self._grown[number]
        return tuple(stored)

    def _tell(self, number: int, strand: Strand, start: int, end: int) -> StoredRun:
        self._told[number] = end
        return StoredRun(
            number=number,
            parent=strand.parent if start == strand.begin else number,
            start=start,
            hashes=self._strands.hashes(number, start, end),
        )
