"""The cached prefixes of one tier: a tree of blocks under their chained hashes. Pure.

    absent --insert--> held --release (last holder)--> idle --evict--> absent
                        ^-----------acquire-------------'

A chain is a sequence's blocks from its start. A holder of a block holds its whole chain, and
chains are released from their ends. So a parent is never idle before its children, never used less
often, and outlives them: eviction takes leaves first without searching for one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from kvpool.core.blocks.eviction import CachedBlock, EvictionPolicy, Place
from kvpool.core.layout.hashes import BlockHash


class PrefixIndex:
    """Every operation takes constant time per block. It counts blocks, not memory: the owner of the
    tier's memory asks for room by `try_evict` and gets the blocks' places back."""

    def __init__(self, policy: EvictionPolicy) -> None:
        self._policy = policy
        self._blocks: dict[BlockHash, CachedBlock] = {}

    def __len__(self) -> int:
        return len(self._blocks)

    def __iter__(self) -> Iterator[CachedBlock]:
        return iter(self._blocks.values())

    def __contains__(self, block_hash: BlockHash) -> bool:
        return block_hash in self._blocks

    @property
    def idle(self) -> int:
        """Blocks without a holder: what can be evicted."""
        return len(self._policy)

    def match(self, hashes: Sequence[BlockHash]) -> int:
        """Number of blocks in the longest cached prefix of the chain. Changes nothing."""
        for length, block_hash in enumerate(hashes):
            if block_hash not in self._blocks:
                return length
        return len(hashes)

    def find(self, hashes: Sequence[BlockHash]) -> list[CachedBlock]:
        """The blocks of that prefix. They may be evicted until they are acquired."""
        return [self._blocks[block_hash] for block_hash in hashes[: self.match(hashes)]]

    def acquire(self, hashes: Sequence[BlockHash]) -> list[CachedBlock]:
        """The longest cached prefix of the chain, held by the caller until `release`."""
        found: list[CachedBlock] = []
        for block_hash in hashes:
            block = self._blocks.get(block_hash)
            if block is None:
                break
            self._use(block)
            found.append(block)
        return found

    def insert(
        self, block_hash: BlockHash, *, parent: CachedBlock | None, place: Place
    ) -> CachedBlock:
        """The caller, who holds `parent`, has filled `place`. From now on it holds the block.

        If the hash is there already, its block is returned and held instead. The caller sees that
        by its `place`; its own `place` stays with the caller.
        """
        assert parent is None or parent.holders, "the chain must be held"
        block = self._blocks.get(block_hash)
        if block is not None:
            assert block.parent is parent, "one hash under two parents"
            self._use(block)
            # Who let go of the block alone uses it twice and its parent once.
            block.uses = min(block.uses, parent.uses) if parent else block.uses
            return block
        if parent is not None:
            parent.children += 1
        block = CachedBlock(block_hash, parent, place)
        self._blocks[block_hash] = block
        self._policy.cached(block)
        return block

    def _use(self, block: CachedBlock) -> None:
        self._hold(block)
        block.uses += 1

    def _hold(self, block: CachedBlock) -> None:
        if not block.holders:
            self._policy.reused(block)
        block.holders += 1

    def release(self, chain: Sequence[CachedBlock]) -> None:
        """Releases a held chain, or the end of one; the blocks stay cached."""
        idle: list[CachedBlock] = []
        for block in reversed(chain):
            assert block.holders, "released twice"
            block.holders -= 1
            if not block.holders:
                idle.append(block)
        self._policy.idle(idle)

    def try_evict(self, count: int) -> list[CachedBlock] | None:
        """Evicts `count` blocks and returns their places; None and nothing changed when fewer are
        idle."""
        if count > len(self._policy):
            return None
        return [self._drop(self._policy.victim()) for _ in range(count)]

    def _drop(self, block: CachedBlock) -> CachedBlock:
        assert not block.children and not block.holders, "only idle leaves are evicted"
        del self._blocks[block.hash]
        if block.parent is not None:
            block.parent.children -= 1
        return block

    @contextmanager
    def kept(self, block: CachedBlock) -> Iterator[None]:
        """The chain that ends in `block` is not evicted within this context. That does not count as
        a use.

        It takes time for each block of the chain.
        """
        chain = _chain_to(block)
        for above in chain:
            self._hold(above)
        yield
        self.release(chain)

    def validate(self) -> None:
        """Every block is held or idle. Every parent is cached, counted, and held by all holders of
        its children."""
        children = dict.fromkeys(self._blocks, 0)
        held_below = dict.fromkeys(self._blocks, 0)
        for block_hash, block in self._blocks.items():
            assert block.hash == block_hash and block.uses > 0 and block.holders >= 0
            assert (block in self._policy) == (not block.holders), block
            if (parent := block.parent) is not None:
                assert self._blocks.get(parent.hash) is parent, "a block without its parent"
                assert parent.uses >= block.uses
                children[parent.hash] += 1
                held_below[parent.hash] += block.holders
        for block_hash, block in self._blocks.items():
            assert block.children == children[block_hash]
            assert block.holders >= held_below[block_hash], "a chain held in part"
        assert len(self._policy) == sum(not block.holders for block in self)


def _chain_to(block: CachedBlock) -> list[CachedBlock]:
    """The blocks from the chain's start to this one."""
    chain: list[CachedBlock] = []
    above: CachedBlock | None = block
    while above is not None:
        chain.append(above)
        above = above.parent
    chain.reverse()
    return chain
