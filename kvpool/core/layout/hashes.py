"""Names of cached blocks: cryptographic hashes of all content up to their end. Pure.

A block's hash covers all tokens from the sequence's start to the block's end, and everything else
that decides its KV or who may see it. So two sequences that have a block in common have all blocks
before it in common. Equal hashes mean interchangeable blocks, on every worker and
in every tier. A hash reveals nothing about the tokens under another salt.

A tenant's name (over HTTP: `cache_salt`) gives access to its cache, so reports show a digest of it.
"""

from __future__ import annotations

from abc import abstractmethod
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import blake2b
from typing import NewType, Protocol, overload

BlockHash = NewType("BlockHash", bytes)
"""32 bytes. Collisions must be infeasible: one would serve a tenant another tenant's KV."""

CacheSalt = NewType("CacheSalt", bytes)
"""32 bytes for everything but the tokens. Made by `cache_salt` only."""

TOKEN_BYTES = 4
HASH_BYTES = 32
_TOKEN_TYPE = next(code for code in "IL" if array(code).itemsize == TOKEN_BYTES)


class Names(Protocol):
    """The hashes of a chain's blocks, by depth. They may be made when they are asked for."""

    def __len__(self) -> int: ...
    def at(self, depth: int, /) -> BlockHash: ...


class FullNames(Names, Protocol):
    """The names of the full blocks of a sequence that is here."""

    def packed_from(self, depth: int, /) -> bytes:
        """The hashes from that depth on, 32 bytes each."""

    def until(self, depth: int, /) -> FullNames:
        """The same chain, at most up to this depth."""

    def hashes(self) -> BlockHashes:
        """All of them, made now."""


class BlockHashes(Sequence[BlockHash]):
    """The hashes of consecutive blocks, packed in `packed`: 32 bytes each."""

    __slots__ = ("packed",)

    def __init__(self, packed: bytes = b"") -> None:
        assert len(packed) % HASH_BYTES == 0, len(packed)
        self.packed = packed

    @classmethod
    def of(cls, hashes: Iterable[BlockHash]) -> BlockHashes:
        return cls(b"".join(hashes))

    def __len__(self) -> int:
        return len(self.packed) // HASH_BYTES

    def at(self, depth: int) -> BlockHash:
        return BlockHash(self.packed[depth * HASH_BYTES : (depth + 1) * HASH_BYTES])

    @overload
    def __getitem__(self, index: int) -> BlockHash: ...
    @overload
    def __getitem__(self, index: slice) -> BlockHashes: ...
    def __getitem__(self, index: int | slice) -> BlockHash | BlockHashes:
        if isinstance(index, int):
            return self.at(range(len(self))[index])
        first, end, step = index.indices(len(self))
        assert step == 1, "hashes are sliced in one piece"
        return BlockHashes(self.packed[first * HASH_BYTES : max(first, end) * HASH_BYTES])

    def __iter__(self) -> Iterator[BlockHash]:
        return map(self.at, range(len(self)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BlockHashes) and self.packed == other.packed

    def __hash__(self) -> int:
        return hash(self.packed)

    def packed_from(self, depth: int) -> bytes:
        return self.packed[depth * HASH_BYTES :]

    def until(self, depth: int) -> BlockHashes:
        return self[:depth]

    def hashes(self) -> BlockHashes:
        return self

    def __repr__(self) -> str:
        return f"BlockHashes({len(self)} blocks)"


NO_NAMES = BlockHashes()


class SupportsTokens(Protocol):
    """Token ids of a sequence, from its start; any sequence of ints is one."""

    def __getitem__(self, positions: slice, /) -> Sequence[int]: ...


class NamedTokens(Sequence[int]):
    """Token ids of a whole prompt that know their blocks' names. A trace's prompts are such: the
    trace says which blocks are equal, not what they contain."""

    @abstractmethod
    def names(self, blocks: range, block_size: int, salt: CacheSalt) -> BlockHashes:
        """The names of these full blocks. Under one salt, equal names mean equal tokens up to the
        block's end."""

    @abstractmethod
    def name(self, block: int, block_size: int, salt: CacheSalt) -> BlockHash:
        """The name of one of them."""


@lru_cache(maxsize=1024)
def cache_salt(*, fingerprint: str, physical_format: str, tenant: str) -> CacheSalt:
    """Blocks of different models, formats or tenants never match. Tenants that share their cache
    have the same name."""
    digest = blake2b(digest_size=HASH_BYTES, person=b"kvrelay-salt")
    for part in (fingerprint, physical_format, tenant):
        data = part.encode()
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return CacheSalt(digest.digest())


def token_bytes(token_ids: Sequence[int]) -> bytes:
    """Four bytes for each token. Raises OverflowError for ids outside 0..2^32-1."""
    return array(_TOKEN_TYPE, token_ids).tobytes()


@lru_cache(maxsize=1024)
def keyed_state(salt: CacheSalt) -> blake2b:
    """The hash of no tokens. Copy it, which takes half the time of hashing the key again."""
    return blake2b(digest_size=HASH_BYTES, key=salt, person=b"kvrelay-block")


def packed_hashes(state: blake2b, tokens: bytes, block_size: int) -> bytes:
    """The hashes of consecutive blocks, from their `token_bytes`. `state` has hashed all tokens
    before them, and these afterwards."""
    update, digest, step = state.update, state.digest, block_size * TOKEN_BYTES
    found: list[bytes] = []
    for at in range(0, len(tokens), step):
        update(tokens[at : at + step])
        found.append(digest())
    return b"".join(found)


def block_hashes(token_ids: Sequence[int], *, block_size: int, salt: CacheSalt) -> BlockHashes:
    """The names of the full blocks of a whole sequence."""
    tokens = token_bytes(token_ids[: len(token_ids) // block_size * block_size])
    return BlockHashes(packed_hashes(keyed_state(salt).copy(), tokens, block_size))


_ROOTS_MOST = 16_384
"""Sequences whose first block is remembered."""
_SHOWN_MOST = 100
"""Tenants shown for one tier of one process."""
OTHERS = "others"


TENANT_MARK = "#"


def tenant_name(tenant: str) -> str:
    """Without the mark and what is behind it: which part of the tenant's cache is meant."""
    return tenant.partition(TENANT_MARK)[0]


def tenant_label(tenant: str) -> str:
    """Eight hex digits of its name; empty for those without a tenant."""
    if not tenant:
        return ""
    name = tenant_name(tenant).encode()
    return blake2b(name, digest_size=4, person=b"kvrelay-tenant").hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantBlocks:
    """Cached blocks under one label, with the ages of the newest and the oldest."""

    tenant: str
    blocks: int
    oldest_s: float
    newest_s: float


def most_of(found: Iterable[TenantBlocks]) -> list[TenantBlocks]:
    """The labels with the most blocks; all others together as `others`."""
    ordered = sorted(found, key=lambda one: (-one.blocks, one.tenant))
    shown, rest = ordered[:_SHOWN_MOST], ordered[_SHOWN_MOST:]
    if not rest:
        return shown
    others = TenantBlocks(
        tenant=OTHERS,
        blocks=sum(one.blocks for one in rest),
        oldest_s=max(one.oldest_s for one in rest),
        newest_s=min(one.newest_s for one in rest),
    )
    return [*shown, others]


@dataclass(slots=True)
class TenantRoots:
    """# first block of a tenant's sequence |-> the tenant's label, for the latest sequences"""

    _labels: OrderedDict[BlockHash, str] = field(default_factory=OrderedDict)

    def note(self, root: BlockHash, label: str) -> None:
        self._labels[root] = label
        self._labels.move_to_end(root)
        while len(self._labels) > _ROOTS_MOST:
            self._labels.popitem(last=False)

    def label(self, root: BlockHash) -> str:
        return self._labels.get(root, "")
