"""A simulated host: its memory, its disk, and the workers that share them. Pure.

A pool node's process may die. Its memory is lost with it, and the disk stays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from cluster.config.simulation import HostSection
from kvpool.core.node.restored import RestoredBlock
from kvpool.core.node.tier_blocks import PoolPlace
from kvrelay.types import Incarnation


@dataclass(slots=True)
class HostMemory:
    """The host tier. The bytes of each write have a checksum like no other. Transfers take turns
    at `bandwidth`."""

    bandwidth: int
    _free_s: float = 0.0
    _writes: int = 0
    _checksums: dict[PoolPlace, int] = field(default_factory=dict)

    def move(self, nbytes: int, now_s: float) -> float:
        """Returns the time at which the last byte is moved."""
        self._free_s = max(now_s, self._free_s) + nbytes / self.bandwidth
        return self._free_s

    def write(self, places: Sequence[PoolPlace]) -> tuple[int, ...]:
        """Returns the checksum of each place."""
        checksums = range(self._writes + 1, self._writes + 1 + len(places))
        self._writes += len(places)
        self._checksums.update(zip(places, checksums, strict=True))
        return tuple(checksums)

    def load(self, place: PoolPlace, checksum: int) -> None:
        """These bytes come from the disk."""
        self._checksums[place] = checksum

    def has(self, place: PoolPlace, checksum: int) -> bool:
        return self._checksums.get(place) == checksum

    def clear(self) -> None:
        self._checksums.clear()


@dataclass(frozen=True, slots=True)
class DiskSlot:
    block: RestoredBlock
    checksum: int


@dataclass(slots=True)
class HostDisk:
    """What lies on the disk."""

    slots: dict[PoolPlace, DiskSlot] = field(default_factory=dict)
    writes: int = 0


@dataclass(slots=True)
class SimHost:
    """`name` is that of its pool node, `node` the one that runs now."""

    name: str
    workers: frozenset[str]
    speeds: HostSection
    memory: HostMemory = field(init=False)
    disk: HostDisk = field(default_factory=HostDisk)
    node: Incarnation | None = None

    def __post_init__(self) -> None:
        self.memory = HostMemory(self.speeds.memory_bandwidth)
