"""The work that was promised, and a promise on its way with a client. Pure values."""

from __future__ import annotations

from collections.abc import Iterable

from kvrelay.types import value


@value
class Promised:
    """The work of several promises: seconds of prefill, sequences and their contexts."""

    prefill_s: float = 0.0
    sequences: float = 0.0
    kv_tokens: float = 0.0

    def times(self, factor: float) -> Promised:
        return Promised(
            prefill_s=self.prefill_s * factor,
            sequences=self.sequences * factor,
            kv_tokens=self.kv_tokens * factor,
        )

    def __add__(self, other: Promised) -> Promised:
        return Promised(
            prefill_s=self.prefill_s + other.prefill_s,
            sequences=self.sequences + other.sequences,
            kv_tokens=self.kv_tokens + other.kv_tokens,
        )


NOTHING_PROMISED = Promised()


def sum_of(works: Iterable[Promised]) -> Promised:
    return sum(works, NOTHING_PROMISED)


@value
class ToldPromise:
    """What a refused client is told, and brings back to any router. `due_in_s` counts from now,
    since the monotonic clocks of two hosts differ. `again`: it had come back for another one."""

    promise_id: int
    due_in_s: float
    work: Promised
    again: bool = False
