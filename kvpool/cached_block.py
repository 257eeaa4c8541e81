"""One entry of a prefix cache. Pure; owned by the prefix index of one tier."""

from __future__ import annotations

from dataclasses import dataclass

from kvpool.hashes import BlockHash
from kvpool.layout import BlockId

Place = tuple[BlockId, ...]
"""# layer group |-> the block of the tier that holds the KV"""


@dataclass(slots=True, eq=False)
class CachedBlock:
    """A block's KV under its hash, and its node in the prefix tree.

    `children` counts the cached blocks that continue it, `holders` the requests that need
    it, `uses` the requests that found or brought it. `idle_since` is the policy's own,
    `tenant` a label for reports.
    """

    hash: BlockHash
    parent: CachedBlock | None
    place: Place
    children: int = 0
    holders: int = 1
    uses: int = 1
    idle_since: int = 0
    tenant: str = ""
