"""Whether a worker's step times and links are good or bad, in words. Pure.

docs/latency-model.md and docs/links.md say where the limits come from.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

FAST_FACTOR, SLOW_FACTOR, BAD_FACTOR = 0.8, 1.25, 2.0
"""Of the step times measured at the start. On shared CPUs these vary by 12 to 15 % by themselves,
and the fit itself is off by some percent."""
SLOW_SHARE, BAD_SHARE = 0.5, 1.0
"""Seconds to move a token's KV by seconds to compute it. From 1 on the link is the bottleneck; from
a half on there is no room for gathering, scattering or a second transfer."""
LAGGING_SHARE = 0.5
"""Of the median speed of the links of the same transport."""
ENOUGH_LINKS = 3
"""With fewer links a median says little."""


def step_times_verdict(factor: float) -> str:
    """`factor`: actual by measured seconds of the worker's steps."""
    if factor < FAST_FACTOR:
        return "faster than measured at the start"
    if factor <= SLOW_FACTOR:
        return "good"
    if factor <= BAD_FACTOR:
        return "slow: something else uses the device"
    return "bad: less than half of the speed measured at the start"


def link_verdict(
    bytes_per_s: float, kv_token_bytes: int, prefill_token_s: float, same_kind: Sequence[float]
) -> str:
    """`prefill_token_s`: what a prompt token takes to compute at the worker that opened the link.
    `same_kind`: the measured speeds of all links of the same transport, this one included."""
    share = kv_token_bytes / bytes_per_s / prefill_token_s if prefill_token_s > 0 else 0.0
    if share >= BAD_SHARE:
        return f"bad: moving KV takes {share:.1f} x as long as computing it"
    if len(same_kind) >= ENOUGH_LINKS and bytes_per_s < LAGGING_SHARE * median(same_kind):
        return "slow: less than half of the speed of the other links of its kind"
    if share >= SLOW_SHARE:
        return f"slow: moving KV takes {share:.1f} x as long as computing it"
    return "good"
