"""A prefix index that searches everything, to compare the real one with.

It evicts leaves only, so equal victims show that the real policies, which never look for leaves,
take leaves first.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvpool.core.blocks import eviction
from kvpool.core.blocks.eviction import ReuseDensity
from kvpool.core.layout.hashes import BlockHash, BlockHashes, cache_salt, extend_chain

_SALT = cache_salt(fingerprint="f", physical_format="p", tenant="t")
Path = tuple[int, ...]


def hashes_of(path: Path) -> list[BlockHash]:
    chain = bytearray()
    extend_chain(chain, path, len(path), block_size=1, salt=_SALT)
    return [*BlockHashes(bytes(chain))]


@dataclass(slots=True)
class _Node:
    holders: int = 0
    uses: int = 0
    idle_since: int = 0


@dataclass
class NaiveIndex:
    policy: str
    nodes: dict[Path, _Node] = field(default_factory=dict)
    clock: int = 0
    history: ReuseDensity = field(default_factory=lambda: ReuseDensity(8))
    gone: dict[Path, tuple[int, int]] = field(default_factory=dict)

    def hold(self, path: Path, *, used: bool = True) -> None:
        """Every block on the path, new ones included."""
        for end in range(1, len(path) + 1):
            self.hold_end(path[:end], used=used)

    def hold_end(self, path: Path, *, used: bool = True) -> None:
        """The path's last block alone."""
        node = self.nodes.get(path)
        if node is None:
            node = self.nodes[path] = self._new(path)
        elif not node.holders:
            self.history.saw_reuse(min(node.uses, 7), self.clock - node.idle_since)
        node.holders += 1
        node.uses += used
        if len(path) > 1:
            node.uses = min(node.uses, self.nodes[path[:-1]].uses)

    def _new(self, path: Path) -> _Node:
        """Its uses before the one that brings it."""
        if path not in self.gone:
            return _Node()
        level, idle_since = self.gone.pop(path)
        self.history.saw_reuse(level, self.clock - idle_since)
        if self.policy != "reuse":
            return _Node()
        return _Node(uses=level)

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
        victim = min(leaves, key=lambda path: self._worth(self.nodes[path]))
        node = self.nodes.pop(victim)
        self.gone[victim] = min(node.uses, 7), node.idle_since
        if len(self.gone) > 2 * self.idle + eviction._LEAST_REMEMBERED:
            level, idle_since = self.gone.pop(next(iter(self.gone)))
            self.history.saw_eviction(level, self.clock - idle_since)
        return victim

    def _worth(self, node: _Node) -> tuple[float, ...]:
        level = min(node.uses, 7)
        match self.policy:
            case "lru":
                return (node.idle_since,)
            case "reuse":
                density = self.history.density(level, self.clock - node.idle_since)
                return (density, level, node.idle_since)
        raise AssertionError(self.policy)

    @property
    def idle(self) -> int:
        return sum(not node.holders for node in self.nodes.values())
