"""Whether a process that Ray has not started yet waits for resources. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

ROUNDING = 1e-3


def waits_for_room(
    asked: Mapping[str, float],
    all_asked: Iterable[Mapping[str, float]],
    before: Mapping[str, float],
    free: Mapping[str, float],
) -> bool:
    """`asked` is its own, `all_asked` of every process of the cluster, itself included; `before`
    was free when the cluster began, and `free` is now. Where all that was asked for is taken, it
    has been given its own, and only starts."""
    lacking = [name for name, amount in asked.items() if free.get(name, 0.0) + ROUNDING < amount]
    wanted = [*all_asked]
    return any(
        before.get(name, 0.0) - free.get(name, 0.0) + ROUNDING
        < sum(one.get(name, 0.0) for one in wanted)
        for name in lacking
    )
