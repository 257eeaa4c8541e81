"""The line that a worker logs of its activity, and when it stays silent. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from kvrelay.activity import Activity, activity, speed_text
from kvrelay.messages import Counters

PERIOD_S = 10.0
IDLE_LINE = "idle: the next line comes with the next request"


@dataclass(slots=True)
class ActivityLog:
    """One line for each reading; while the worker is idle only the first one."""

    total_blocks: int
    _last: tuple[float, Counters] | None = None
    _told_idle: bool = False

    def line(self, counters: Counters, now_s: float) -> str | None:
        """None: there is nothing to say. The first reading only begins the first period."""
        last, self._last = self._last, (now_s, counters)
        if last is None:
            return None
        found = activity(last[1], counters, now_s - last[0], self.total_blocks)
        silent, self._told_idle = found.idle and self._told_idle, found.idle
        if silent:
            return None
        return IDLE_LINE if found.idle else described(found)


def described(found: Activity) -> str:
    hits = "-" if found.hit_rate is None else f"{found.hit_rate:.0%}"
    return (
        f"tokens/s: {found.prompt_tokens_per_s:.1f} in, {found.generated_tokens_per_s:.1f} out; "
        f"requests: {found.running} running, {found.waiting} waiting; "
        f"KV: {found.kv_used:.0%} used, {hits} prefix hits, "
        f"{speed_text(found.transfer_bytes_per_s)} moved"
    )
