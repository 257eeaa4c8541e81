"""What a worker did lately, from two readings of its counters. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from kvrelay.messages import Counters


@dataclass(frozen=True, slots=True, kw_only=True)
class Activity:
    """Rates are means over the time between two readings; the rest is as of the later one.

    `prompt_tokens_per_s` counts prompt tokens computed, `generated_tokens_per_s` tokens decoded.
    `kv_used` is the share of KV blocks that requests hold, 0 to 1. `hit_rate` is the share of
    prompt tokens found in this worker's cache; None when no prompt was looked up.
    """

    prompt_tokens_per_s: float = 0.0
    generated_tokens_per_s: float = 0.0
    running: int = 0
    waiting: int = 0
    kv_used: float = 0.0
    hit_rate: float | None = None
    transfer_bytes_per_s: float = 0.0

    @property
    def idle(self) -> bool:
        """Nothing runs or waits, and nothing was computed or moved."""
        rates = self.prompt_tokens_per_s, self.generated_tokens_per_s, self.transfer_bytes_per_s
        return not (self.running or self.waiting or any(rates))


NO_ACTIVITY = Activity()


def activity(before: Counters, after: Counters, seconds: float, total_blocks: int) -> Activity:
    """`seconds` lie between the two readings; rates are 0 when there are none."""
    queried = after.prefix_queried_tokens - before.prefix_queried_tokens
    hits = after.prefix_hit_tokens - before.prefix_hit_tokens
    return Activity(
        prompt_tokens_per_s=_rate(after.prompt_tokens - before.prompt_tokens, seconds),
        generated_tokens_per_s=_rate(after.generated_tokens - before.generated_tokens, seconds),
        running=after.running,
        waiting=after.waiting,
        kv_used=kv_used(after, total_blocks),
        hit_rate=hits / queried if queried > 0 else None,
        transfer_bytes_per_s=_rate(after.transfer_bytes - before.transfer_bytes, seconds),
    )


def kv_used(counters: Counters, total_blocks: int) -> float:
    """Cached blocks that no request holds are not in use."""
    available = counters.free_blocks + counters.cached_blocks
    return 1 - available / total_blocks if total_blocks else 0.0


def speed_text(bytes_per_s: float) -> str:
    if bytes_per_s >= 1e9:
        return f"{bytes_per_s / 1e9:.1f} GB/s"
    return f"{bytes_per_s / 1e6:.1f} MB/s"


def _rate(count: int, seconds: float) -> float:
    return max(0, count) / seconds if seconds > 0 else 0.0
