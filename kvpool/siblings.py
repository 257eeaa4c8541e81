"""Blocks that continue one chain in different ways, and which begin as some tokens do. Pure.

Siblings are kept sorted by what they hold. So those that share most with some tokens stand next to
the place where these would stand, whatever their number.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field

from kvpool.hashes import TOKEN_BYTES, BlockHash

_MOST_FOUND = 8


@dataclass(frozen=True, slots=True)
class Content:
    """`above` is the hash of the block before it or, at a sequence's start, the salt; `tokens` are
    bytes as of `token_bytes`. Two that are equal stand for the same KV."""

    above: bytes
    tokens: bytes


@dataclass(slots=True)
class Siblings:
    """Token ids are compared, never hashes of them."""

    _families: dict[bytes, list[tuple[bytes, BlockHash]]] = field(default_factory=dict)
    _contents: dict[BlockHash, Content] = field(default_factory=dict)

    def __contains__(self, block_hash: BlockHash) -> bool:
        return block_hash in self._contents

    def add(self, block_hash: BlockHash, content: Content) -> None:
        """Adding one that is here is fine."""
        if block_hash not in self._contents:
            self._contents[block_hash] = content
            insort(self._families.setdefault(content.above, []), (content.tokens, block_hash))

    def discard(self, block_hash: BlockHash) -> None:
        content = self._contents.pop(block_hash, None)
        if content is None:
            return
        family = self._families[content.above]
        del family[bisect_left(family, (content.tokens, block_hash))]
        if not family:
            del self._families[content.above]

    def nearest(self, content: Content) -> list[tuple[int, BlockHash]]:
        """(tokens in common from the start, block) of the few that share most, the most first."""
        family = self._families.get(content.above, [])
        at = bisect_left(family, (content.tokens,))
        near = family[max(0, at - _MOST_FOUND) : at + _MOST_FOUND]
        found = [(common_tokens(content.tokens, tokens), block) for tokens, block in near]
        return sorted(found, key=lambda pair: pair[0], reverse=True)[:_MOST_FOUND]

    def validate(self, here: set[BlockHash]) -> None:
        """Each is a block that is `here`, and stands once where it is searched for."""
        assert self._contents.keys() <= here, "a block is gone and still found in part"
        families = self._families.values()
        assert all(family == sorted(family) and family for family in families)
        standing = {
            block: Content(above, tokens)
            for above, family in self._families.items()
            for tokens, block in family
        }
        assert standing == self._contents
        assert len(standing) == sum(map(len, families))


def common_tokens(one: bytes, other: bytes) -> int:
    """How many tokens two contents share from their starts."""
    length = min(len(one), len(other))
    first, second = (int.from_bytes(tokens[:length], "little") for tokens in (one, other))
    differ = first ^ second
    same_bits = (differ & -differ).bit_length() - 1 if differ else 8 * length
    return same_bits // (8 * TOKEN_BYTES)
