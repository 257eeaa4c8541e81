"""Is a prefix that a pool or a peer holds brought here, or computed again? Pure.

Both are timed as they happen. What has not been timed yet is tried.
"""

from __future__ import annotations

from dataclasses import dataclass, field

_NEW_SHARE = 0.2
"""Weight of the newest measurement."""


@dataclass(slots=True)
class Rate:
    """A running mean of seconds per unit; None before the first measurement."""

    seconds: float | None = None

    def observe(self, units: int, seconds: float) -> None:
        if units <= 0:
            return
        fresh = seconds / units
        old = fresh if self.seconds is None else self.seconds
        self.seconds = old + _NEW_SHARE * (fresh - old)

    def of(self, units: int) -> float:
        return units * (self.seconds or 0.0)


@dataclass(slots=True)
class RestoreCost:
    """`token` is a token's prefill; `host`, `disk` and `peer` a block's way here from either tier
    of the pool, or from another worker."""

    block_size: int
    token: Rate = field(default_factory=Rate)
    host: Rate = field(default_factory=Rate)
    disk: Rate = field(default_factory=Rate)
    peer: Rate = field(default_factory=Rate)

    def computed(self, tokens: int, seconds: float) -> None:
        self.token.observe(tokens, seconds)

    def restored(self, host_blocks: int, disk_blocks: int, seconds: float) -> None:
        """A fetch that reads the disk is timed as the disk's."""
        if disk_blocks:
            self.disk.observe(disk_blocks, max(0.0, seconds - self.host.of(host_blocks)))
        else:
            self.host.observe(host_blocks, seconds)

    def pulled(self, blocks: int, seconds: float) -> None:
        self.peer.observe(blocks, seconds)

    def prefers_peer(self, peer_blocks: int, host_blocks: int, disk_blocks: int) -> bool:
        """Rather than fetching from the pool what that is worth, and computing all else."""
        fetched = self.worth(host_blocks, disk_blocks)
        if self.token.seconds is None:
            return peer_blocks > fetched
        host = min(fetched, host_blocks)
        pool_s = self.host.of(host) + self.disk.of(fetched - host)
        computed_s = self.token.of((peer_blocks - fetched) * self.block_size)
        return self.peer.of(peer_blocks) < pool_s + computed_s

    def worth(self, host_blocks: int, disk_blocks: int) -> int:
        """How many of the chain's next blocks, those in memory before those on disk, to fetch."""
        if self.token.seconds is None:
            return host_blocks + disk_blocks
        if self.host.of(host_blocks) > self.token.of(host_blocks * self.block_size):
            return 0
        if self.disk.of(disk_blocks) > self.token.of(disk_blocks * self.block_size):
            return host_blocks
        return host_blocks + disk_blocks
