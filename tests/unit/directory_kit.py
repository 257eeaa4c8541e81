"""What holders tell a router's directory: strands of blocks, and a tier that has some."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from random import Random

from kvpool.core.blocks.news import ROOT, RunNews, Strand
from kvpool.core.layout.hashes import HASH_BYTES, BlockHash
from kvrelay.messages import BlockChanges, CutRun, StoredRun
from kvrelay.types import Incarnation, Tier
from router.core.state.directory import Directory

Blocks = dict[Incarnation, dict[Tier, set[bytes]]]
"""# holder |-> tier |-> the blocks that it has"""


def chain(blocks: Iterable[object]) -> list[BlockHash]:
    """Names for what is in each block and before it."""
    found, above = [], b""
    for block in blocks:
        above = blake2b(above + repr(block).encode(), digest_size=HASH_BYTES).digest()
        found.append(BlockHash(above))
    return found


class Named(list[BlockHash]):
    """A chain's names, which are there already; `asked` are the indices that were asked for."""

    def __init__(self, hashes: Iterable[bytes]) -> None:
        super().__init__(map(BlockHash, hashes))
        self.asked: set[int] = set()

    def at(self, index: int) -> BlockHash:
        self.asked.add(index)
        return self[index]


def run(number: int, hashes: Sequence[bytes], *, parent: int = ROOT, start: int = 0) -> StoredRun:
    return StoredRun(number=number, parent=parent, start=start, hashes=b"".join(hashes))


def told(*runs: StoredRun, tier: Tier = Tier.DEVICE) -> BlockChanges:
    return BlockChanges(tier=tier, stored=runs)


def cut(number: int, end: int) -> CutRun:
    return CutRun(number=number, end=end)


def ended(number: int, end: int, tier: Tier = Tier.DEVICE) -> BlockChanges:
    return BlockChanges(tier=tier, cut=(cut(number, end),))


def holding(hashes: Sequence[bytes], *, tier: Tier = Tier.DEVICE, number: int = 1) -> BlockChanges:
    """They begin a sequence."""
    return told(run(number, hashes), tier=tier)


def known(directory: Directory) -> Blocks:
    """Only tiers with blocks."""
    found: Blocks = {}
    for holder, tiers in directory._tiers.items():
        for tier, one in tiers.items():
            for each in directory._runs:
                if each.has(one.bit):
                    size = (each.end_of(one.bit) - each.start) * HASH_BYTES
                    hashes = unpacked(each.hashes[:size])
                    found.setdefault(holder, {}).setdefault(tier, set()).update(hashes)
    return found


def unpacked(hashes: bytes) -> list[bytes]:
    return [hashes[at : at + HASH_BYTES] for at in range(0, len(hashes), HASH_BYTES)]


@dataclass(slots=True)
class _Part:
    parent: int
    begin: int
    hashes: list[bytes]

    @property
    def end(self) -> int:
        return self.begin + len(self.hashes)


@dataclass(slots=True)
class StrandTree:
    """The strands of one tier. It searches everything."""

    draw: Random
    news: list[RunNews] = field(default_factory=list)
    parts: dict[int, _Part] = field(default_factory=dict)
    last: int = 0

    def strand(self, number: int) -> Strand | None:
        part = self.parts.get(number)
        return None if part is None else Strand(part.parent, part.begin, part.end)

    def hashes(self, number: int, start: int, end: int) -> bytes:
        part = self.parts[number]
        assert part.begin <= start < end <= part.end
        return b"".join(part.hashes[start - part.begin : end - part.begin])

    def blocks(self) -> set[bytes]:
        return {one for part in self.parts.values() for one in part.hashes}

    def insert(self, hashes: Sequence[bytes], *, grows: bool | None = None) -> None:
        """A strand that ends where they begin to be new may grow, if none begins there. None: as it
        is drawn."""
        at, parent = self._match(hashes)
        if at == len(hashes):
            return
        leaf = parent and self.parts[parent].end == at and not self._below(parent, at)
        if leaf and (self.draw.random() < 0.7 if grows is None else grows):
            number = parent
            self.parts[number].hashes += hashes[at:]
        else:
            number = self.last = self.last + 1
            self.parts[number] = _Part(parent, at, [*hashes[at:]])
        for news in self.news:
            news.stored(number)

    def _match(self, hashes: Sequence[bytes]) -> tuple[int, int]:
        """How many are there, and the strand of the last one."""
        of = {one: number for number, part in self.parts.items() for one in part.hashes}
        length = next((i for i, one in enumerate(hashes) if one not in of), len(hashes))
        return length, of[hashes[length - 1]] if length else ROOT

    def _below(self, number: int, depth: int) -> list[_Part]:
        parts = self.parts.values()
        return [part for part in parts if part.parent == number and part.begin >= depth]

    def evict(self) -> None:
        """Some blocks from the end of a strand."""
        number = self.draw.choice([*self.parts])
        part = self.parts[number]
        least = max([one.begin for one in self._below(number, 0)], default=part.begin)
        if least < part.end:
            self.cut(number, self.draw.randrange(least, part.end))

    def cut(self, number: int, end: int) -> None:
        part = self.parts[number]
        del part.hashes[end - part.begin :]
        if end == part.begin:
            del self.parts[number]
        for news in self.news:
            news.cut(number, end)
