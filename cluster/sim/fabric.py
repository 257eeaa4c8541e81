"""The network between simulated workers, and the copies at its ends.

Every worker has one way out and one way in, each of the fabric's bandwidth; transfers take turns on
each, first come first served. A transfer that finds the receiver busy does not hold up its sender,
whose switch keeps it.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from cluster.sim.config import Fabric as FabricConfig
from kvpool.link_cost import LinkCost
from kvrelay.types import Incarnation


@dataclass(slots=True)
class Fabric:
    config: FabricConfig
    moved_bytes: int = 0
    _out_free_s: defaultdict[Incarnation, float] = field(default_factory=lambda: defaultdict(float))
    _in_free_s: defaultdict[Incarnation, float] = field(default_factory=lambda: defaultdict(float))
    _copies_free_s: defaultdict[Incarnation, float] = field(
        default_factory=lambda: defaultdict(float)
    )

    def move(self, source: Incarnation, target: Incarnation, nbytes: int, now_s: float) -> float:
        """When the last byte is there."""
        seconds = nbytes / self.config.bandwidth
        begun_s = max(now_s, self._out_free_s[source])
        self._out_free_s[source] = begun_s + seconds
        received_s = max(begun_s, self._in_free_s[target])
        self._in_free_s[target] = received_s + seconds
        self.moved_bytes += nbytes
        return received_s + seconds

    def copy(self, worker: Incarnation, nbytes: int, now_s: float) -> float:
        """When it is gathered, or scattered."""
        begun_s = max(now_s, self._copies_free_s[worker])
        self._copies_free_s[worker] = begun_s + nbytes / self.config.copy_bandwidth
        return self._copies_free_s[worker]

    def cost(self) -> LinkCost:
        """Of any link, as a worker would measure it."""
        return LinkCost(
            transport="simulated",
            latency_s=self.config.latency,
            bytes_per_s=self.config.bandwidth,
            descriptor_s=0.0,
            direct_bytes_per_s=self.config.bandwidth,
            gather_bytes_per_s=self.config.copy_bandwidth,
            scatter_bytes_per_s=self.config.copy_bandwidth,
            run_s=0.0,
        )
