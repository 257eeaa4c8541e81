"""Is a prefix that a pool holds brought here, or computed again? Pure.

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
    """`token` is a token's prefill, `host` and `disk` a block's way here from either tier."""

    block_size: int
    token: Rate = field(default_factory=Rate)
    host: Rate = field(default_factory=Rate)
    disk: Rate = field(default_factory=Rate)

    def computed(self, tokens: int, seconds: float) -> None:
        self.token.observe(tokens, seconds)

    def restored(self, host_blocks: int, disk_blocks: int, seconds: float) -> None:
        """A fetch that reads the disk is timed as the disk's."""
        if disk_blocks:
            self.disk.observe(disk_blocks, max(0.0, seconds - self.host.of(host_blocks)))
        else:
            self.host.observe(host_blocks, seconds)

    def worth(self, host_blocks: int, disk_blocks: int) -> int:
        """How many of the chain's next blocks, those in memory before those on disk, to fetch."""
        if self.token.seconds is None:
            return host_blocks + disk_blocks
        if self.host.of(host_blocks) > self.token.of(host_blocks * self.block_size):
            return 0
        if self.disk.of(disk_blocks) > self.token.of(disk_blocks * self.block_size):
            return host_blocks
        return host_blocks + disk_blocks
