"""What an earlier process left in a tier. Pure; runs in the pool node."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvpool.core.layout.hashes import BlockHash, BlockHashes
from kvpool.core.node.tier_blocks import NewChain, PoolPlace, TierBlocks


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoredBlock:
    """A higher `written` is younger."""

    hash: BlockHash
    parent: BlockHash | None
    place: PoolPlace
    written: int


def restore(tier: TierBlocks, blocks: Iterable[RestoredBlock]) -> int:
    """The empty tier takes the blocks over whose whole chain is there. Returns their number.

    The order of eviction is by the last time that a block, or one below it, was written.
    """
    found = _rooted({block.hash: block for block in sorted(blocks, key=_written)})
    kept = {block.hash: block for block in found}
    tier.claim({block.place for block in found})
    for last in _youngest_last(found):
        if last.hash in tier:
            tier.renew(last.hash)
            continue
        chain = [last]
        while (above := chain[-1].parent) is not None and above not in tier:
            chain.append(kept[above])
        tier.adopt(_chain_of(chain[::-1]), 0.0)
    return len(found)


def _written(block: RestoredBlock) -> int:
    return block.written


def _rooted(blocks: dict[BlockHash, RestoredBlock]) -> list[RestoredBlock]:
    """Those whose whole chain is there, parents first."""
    below: dict[BlockHash | None, list[RestoredBlock]] = {}
    for block in blocks.values():
        below.setdefault(block.parent, []).append(block)
    found = list(below.get(None, ()))
    for block in found:
        found += below.get(block.hash, ())
    return found


def _youngest_last(parents_first: Sequence[RestoredBlock]) -> list[RestoredBlock]:
    """The blocks that were written after all below them, in the order of time."""
    below: dict[BlockHash | None, int] = {}  # block |-> when one below it was written last
    found: list[RestoredBlock] = []
    for block in reversed(parents_first):
        written = max(block.written, below.get(block.hash, -1))
        below[block.parent] = max(written, below.get(block.parent, -1))
        if written == block.written:
            found.append(block)
    return sorted(found, key=_written)


def _chain_of(blocks: Sequence[RestoredBlock]) -> NewChain:
    return NewChain(
        parent=blocks[0].parent,
        hashes=BlockHashes.of(block.hash for block in blocks),
        places=array("i", [block.place for block in blocks]),
    )
