"""A tree of single blocks that searches everything, to compare the tree of runs with.

It evicts leaves only. So equal victims show that the real tree, which never looks for leaves, takes
leaves first.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvpool.core.layout.hashes import BlockHash, BlockHashes, block_hashes, cache_salt

_SALT = cache_salt(fingerprint="f", physical_format="p", tenant="t")
Path = tuple[int, ...]


def names_of(path: Path) -> BlockHashes:
    return block_hashes(path, block_size=1, salt=_SALT)


def hashes_of(path: Path) -> list[BlockHash]:
    return [*names_of(path)]


@dataclass(slots=True)
class _Node:
    holders: int = 0
    uses: int = 0
    idle_since: int = 0


@dataclass
class NaiveTree:
    """It evicts the leaf that has been idle longest."""

    nodes: dict[Path, _Node] = field(default_factory=dict)
    clock: int = 0

    def hold(self, path: Path, *, used: bool = True) -> None:
        """Every block on the path, new ones included."""
        for end in range(1, len(path) + 1):
            self.hold_end(path[:end], used=used)

    def hold_end(self, path: Path, *, used: bool = True) -> None:
        """The path's last block alone."""
        node = self.nodes.get(path)
        if node is None:
            node = self.nodes[path] = _Node()
        node.holders += 1
        node.uses += used
        if len(path) > 1:
            node.uses = min(node.uses, self.nodes[path[:-1]].uses)

    def release(self, path: Path) -> None:
        for end in range(len(path), 0, -1):
            self.release_end(path[:end])

    def release_end(self, path: Path) -> None:
        node = self.nodes[path]
        node.holders -= 1
        if not node.holders:
            self.clock += 1
            node.idle_since = self.clock

    def match(self, path: Path) -> int:
        return sum(path[:end] in self.nodes for end in range(1, len(path) + 1))

    def evict(self) -> Path:
        parents = {path[:-1] for path in self.nodes}
        leaves = [p for p, node in self.nodes.items() if not node.holders and p not in parents]
        victim = min(leaves, key=lambda path: self.nodes[path].idle_since)
        del self.nodes[victim]
        return victim

    def evict_leaf(self, block_hash: BlockHash) -> None:
        """Another one than the oldest may go, if it is an idle leaf."""
        (path,) = (path for path in self.nodes if hashes_of(path)[-1] == block_hash)
        assert not self.nodes[path].holders
        assert all(other[:-1] != path for other in self.nodes), "not a leaf"
        del self.nodes[path]

    @property
    def idle(self) -> int:
        return sum(not node.holders for node in self.nodes.values())
