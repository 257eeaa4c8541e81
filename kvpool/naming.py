"""Names for what holdings have filled, so that others find it. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvpool.block_names import HashChain
from kvpool.device_cache import DeviceCache
from kvpool.hashes import BlockHash
from kvpool.holding import Holding


@dataclass(frozen=True, slots=True)
class Naming:
    """Each block's place in its holding's chain is its place in the sequence."""

    cache: DeviceCache

    def fill(
        self,
        entry: Holding,
        hashes: Sequence[BlockHash],
        names: HashChain | None,
        *,
        edges_full: bool,
    ) -> None:
        """`hashes` of all blocks that are full; `names` tell their content."""
        assert not entry.leased
        for block_hash in hashes[len(entry.chain) :]:
            self._name(entry, block_hash, edges_full=edges_full)
        if names is not None:
            for index in range(entry.described, len(hashes)):
                self.cache.siblings.add(hashes[index], names.content(index))
            entry.described = len(hashes)

    def fill_partly(self, entry: Holding, names: HashChain, token_ids: Sequence[int]) -> None:
        """The block behind the chain holds these tokens, and never more."""
        index = len(entry.chain)
        block_hash = names.partial(index, token_ids)
        self._name(entry, block_hash, edges_full=False, is_partial=True)
        self.cache.siblings.add(block_hash, names.partial_content(index, token_ids))

    def _name(
        self, entry: Holding, name: BlockHash, *, edges_full: bool, is_partial: bool = False
    ) -> None:
        place = entry.place(len(entry.chain), edges_full=edges_full)
        parent = entry.chain[-1] if entry.chain else None
        block, twins = self.cache.insert(name, parent, place, is_partial=is_partial)
        entry.chain.append(block)
        entry.twins += twins
