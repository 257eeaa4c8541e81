"""Decides whether to fetch a prefix from a pool or a peer, or to compute it again. Pure.

Both are timed as they happen. A source without a time is tried. A slow source is tried again from
time to time, at a bounded cost.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvrelay.types import Incarnation

_NEW_SHARE = 0.2
"""Weight of the newest measurement."""
_TRIAL_SHARE = 0.02
"""Trials may cost this share of the time spent on computing KV that could have been fetched."""


@dataclass(slots=True)
class Rate:
    """A running mean of seconds per unit; None before the first measurement. `credit_s` is the time
    that another trial may lose by now."""

    seconds: float | None = None
    credit_s: float = 0.0

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
    """`token` is the prefill time of a token. `host`, `disk` and `peer` are times to fetch a block
    from either tier of the pool or from another worker; `remote` from the pool node of another
    host."""

    block_size: int
    token: Rate = field(default_factory=Rate)
    host: Rate = field(default_factory=Rate)
    disk: Rate = field(default_factory=Rate)
    peer: Rate = field(default_factory=Rate)
    _remote: dict[Incarnation, Rate] = field(default_factory=dict)
    _reached: set[Incarnation] = field(default_factory=set)

    def remote(self, node: Incarnation) -> Rate:
        return self._remote.setdefault(node, Rate())

    def computed(self, tokens: int, seconds: float) -> None:
        self.token.observe(tokens, seconds)

    def restored(self, host_blocks: int, disk_blocks: int, seconds: float) -> None:
        """A fetch that reads the disk counts for the disk."""
        if disk_blocks:
            self.disk.observe(disk_blocks, max(0.0, seconds - self.host.of(host_blocks)))
        else:
            self.host.observe(host_blocks, seconds)

    def pulled(self, blocks: int, seconds: float) -> None:
        self.peer.observe(blocks, seconds)

    def fetched(self, node: Incarnation, blocks: int, seconds: float) -> None:
        """The first fetch is not counted: it may have waited for the link."""
        if node in self._reached:
            self.remote(node).observe(blocks, seconds)
        self._reached.add(node)

    def prefers(self, way: Rate, blocks: int, host_blocks: int, disk_blocks: int) -> bool:
        """True if this is faster than fetching from the host's pool what is worth it there and
        computing the rest."""
        fetched = self.worth(host_blocks, disk_blocks)
        if self.token.seconds is None:
            return blocks > fetched
        host = min(fetched, host_blocks)
        pool_s = self.host.of(host) + self.disk.of(fetched - host)
        computed_s = self.token.of((blocks - fetched) * self.block_size)
        return way.of(blocks) < pool_s + computed_s

    def tries_again(self, way: Rate, blocks: int) -> bool:
        """Its measured time is slower than computing, but it may be old or from a busy moment."""
        computed_s = self.token.of(blocks * self.block_size)
        loss_s = way.of(blocks) - computed_s
        if loss_s <= 0:
            return False
        way.credit_s += _TRIAL_SHARE * computed_s
        if way.credit_s < loss_s:
            return False
        way.credit_s = 0.0
        return True

    def fetches(self, host_blocks: int, disk_blocks: int) -> int:
        """Blocks to fetch: those that are `worth` it, or more to try a slow source again."""
        worth = self.worth(host_blocks, disk_blocks)
        if worth < host_blocks and self.tries_again(self.host, host_blocks):
            return host_blocks
        if host_blocks <= worth < host_blocks + disk_blocks:
            return worth + disk_blocks * self.tries_again(self.disk, disk_blocks)
        return worth

    def worth(self, host_blocks: int, disk_blocks: int) -> int:
        """The number of the chain's next blocks to fetch, those in memory before those on disk."""
        if self.token.seconds is None:
            return host_blocks + disk_blocks
        if self.host.of(host_blocks) > self.token.of(host_blocks * self.block_size):
            return 0
        if self.disk.of(disk_blocks) > self.token.of(disk_blocks * self.block_size):
            return host_blocks
        return host_blocks + disk_blocks
