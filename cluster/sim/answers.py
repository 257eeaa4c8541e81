"""What the simulated model says: nothing of meaning, for as long as the trace says. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from cluster.sim.arrivals import Arrival
from engine.step import Sampled, SequenceSlice
from kvrelay.types import Sampling

END = 2
"""The token that ends a sequence which asked for more than it yields."""


class Answers:
    """`request_id` is the arrival's number. `max_tokens` None: each asks for just what it gets."""

    def __init__(self, arrivals: Sequence[Arrival], max_tokens: int | None = None) -> None:
        self._max_tokens = max_tokens
        self._output = [one.request.output_tokens for one in arrivals]
        self._end = Sampled(token_id=END)

    def sampling(self, number: int) -> Sampling:
        output = self._output[number]
        if self._max_tokens is None:
            return Sampling(max_tokens=output, seed=number)
        most = max(self._max_tokens, output)
        return Sampling(max_tokens=most, seed=number, stop_token_ids=(END,))

    def steps_left(self, one: SequenceSlice) -> int:
        """Until the sequence ends."""
        if not one.samples:
            return 1
        return self._output[int(one.key.request_id)] - one.samples[0].index

    def drawn(self, one: SequenceSlice, steps: int) -> tuple[Sampled, ...]:
        """Of so many steps, one for each."""
        if not one.samples:
            return ()
        number = int(one.key.request_id)
        token = Sampled(token_id=END + 1 + number)
        if len(one.samples) > 1:  # the first token of each choice
            return (token,) * len(one.samples)
        if one.samples[0].index + steps < self._output[number]:
            return (token,) * steps
        return (*(token,) * (steps - 1), self._end)
