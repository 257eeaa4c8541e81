"""The shape of one token's KV, and its layout in blocks and slabs. Pure.

A layout has one or more groups of layers with the same span (full or a window), each with its own
block table. In a slab, and logically in a block, the order is canonical: for each layer of the
group, for each plane, `[token, head, dim]`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from typing import NewType

BlockId = NewType("BlockId", int)
"""Index of a block inside one group's pool. Never valid in another group or process."""

NO_BLOCK = BlockId(-1)
"""Stands in a table for a block outside its group's window, which is not held."""

Tables = tuple[tuple[BlockId, ...], ...]
"""# layer group |-> blocks, in token order: the `i`-th holds tokens `[i, i + 1) x block_size`"""

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class Plane:
    """One tensor kept per token and layer: K, V, or MLA's latent."""

    name: str
    heads: int
    dim: int

    @property
    def elements(self) -> int:
        return self.heads * self.dim


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerGroup:
    """Layers of equal span and shape. `window` None means that all earlier tokens are seen."""

    layers: tuple[int, ...]
    planes: tuple[Plane, ...]
    window: int | None = None

    @property
    def elements_per_token(self) -> int:
        return len(self.layers) * sum(plane.elements for plane in self.planes)

    def first_block(self, position: int, block_size: int) -> int:
        """The first block that a query at `position` sees; a window includes the query itself."""
        if self.window is None:
            return 0
        return max(0, position - self.window + 1) // block_size


@dataclass(frozen=True, kw_only=True)
class KvLayout:
    """The KV of a whole model on one worker. Derived values are computed once: every piece needs
    them and hashes them."""

    groups: tuple[LayerGroup, ...]
    dtype: str
    block_size: int

    def __post_init__(self) -> None:
        assert self.dtype in DTYPE_BYTES, self.dtype
        assert self.block_size > 0, self.block_size

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.groups, self.dtype, self.block_size))

    @property
    def element_bytes(self) -> int:
        return DTYPE_BYTES[self.dtype]

    @cached_property
    def has_windows(self) -> bool:
        return any(group.window is not None for group in self.groups)

    @cached_property
    def bytes_per_token(self) -> int:
        elements = sum(group.elements_per_token for group in self.groups)
        return elements * self.element_bytes

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block in every group."""
        return self.bytes_per_token * self.block_size

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold `tokens` tokens, in each group."""
        return -(-tokens // self.block_size)

    def physical_format(self) -> str:
        return f"{self.dtype}/block{self.block_size}"

    def logical_fingerprint(self, model: str) -> str:
        """Must be equal on both sides of a handoff. `model` names weights and revision."""
        shape = repr([(g.layers, g.planes, g.window) for g in self.groups])
        return blake2b(f"{model}\n{shape}".encode(), digest_size=16).hexdigest()
