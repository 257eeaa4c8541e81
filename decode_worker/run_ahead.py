"""How often a step may be run in a row, and the blocks for that. Pure.

The result is that of as many single steps, wherever the run is cut; room for steps that did not
come is given back.

The step behind the one on the device, decided before that one's tokens are known. Pure.

All decoding sequences take one more token each. Who may end with the step on the device is in it,
for nothing if so, unless its length says that it will. Whatever else may happen between two steps,
such as prompts, preemptions or places that are asked back, waits for the device to be free: then
there is no such step.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Ordered
from dataclasses import dataclass, replace

from decode_worker.running_set import RunningSet
from decode_worker.sequence import Sequence
from engine.core.step import SequenceSlice, needs_history
from kvpool.core.layout.layout import Tables

Taken = Ordered[tuple[Sequence, int]]
"""sequence, its tokens in the step"""


@dataclass(slots=True, kw_only=True)
class RunAhead:
    """No run goes over `rope_border_tokens`, where a sequence is computed anew."""

    running_set: RunningSet
    rope_border_tokens: int | None = None
    _has_room_ahead: bool = False

    def steps(self, chosen: Taken, most_steps: int, now_s: float) -> int:
        """Of a step that takes `chosen`: up to the first end of a sequence."""
        self._has_room_ahead = most_steps > 1 and self._is_steady(chosen)
        if not self._has_room_ahead:
            return 1
        steps = min(most_steps, *(self._left(sequence) for sequence, _ in chosen))
        while steps > 1 and not self._try_room(chosen, steps, now_s):
            steps //= 2
        return steps

    def _is_steady(self, chosen: Taken) -> bool:
        """Nobody waits or stands back, and all take the next token of one choice."""
        here = len(self.running_set.running) + len(self.running_set.awaiting_prefill)
        return len(chosen) == here and all(_decodes(sequence) for sequence, _ in chosen)

    def _left(self, sequence: Sequence) -> int:
        border = self.rope_border_tokens
        if border is None or border < sequence.computed:
            return sequence.tokens_left
        return min(sequence.tokens_left, max(1, border - sequence.computed))

    def _try_room(self, chosen: Taken, steps: int, now_s: float) -> bool:
        """Where one gets none the others keep theirs until the step is over."""
        tables = self.running_set.tables
        return all(
            tables.try_grow(sequence.holder, sequence.computed + steps, now_s=now_s)
            for sequence, _ in chosen
        )

    def give_back(self, ran: Iterable[tuple[Sequence, int]]) -> None:
        """The step is over, after however many times."""
        for sequence, _ in ran if self._has_room_ahead else ():
            if not sequence.dropped:
                self.running_set.tables.shrink(sequence.holder, sequence.computed)


def _decodes(sequence: Sequence) -> bool:
    return sequence.needed == len(sequence.choices) == 1


@dataclass(frozen=True, slots=True)
class Follower:
    """`follows` is its slice in the step on the device; None: it is not there."""

    sequence: Sequence
    follows: int | None

    @property
    def start(self) -> int:
        return self.sequence.computed + (self.follows is not None)

    def slice(self, tables: Tables) -> SequenceSlice:
        sequence, is_known = self.sequence, self.follows is None
        (request,) = sequence.samples()
        index = request.index if is_known else request.index + 1
        return SequenceSlice(
            key=sequence.key,
            choice=sequence.choices[0],
            token_ids=sequence[self.start : self.start + 1] if is_known else (0,),
            start=self.start,
            tables=tables,
            samples=(replace(request, index=index),),
            prompt_tokens=sequence.whole_tokens,
            follows=self.follows,
        )


def followers(running_set: RunningSet, now_s: float) -> list[Follower]:
    """Empty where the device must be free first."""
    if not _is_steady(running_set):
        return []
    places = {one: i for i, (one, _) in enumerate(running_set.on_device)}
    found = [Follower(one, places.get(one)) for one in running_set.running]
    found = [one for one in found if one.follows is None or one.sequence.tokens_left > 1]
    has_room = all(
        running_set.tables.try_grow(one.sequence.holder, one.start + 1, now_s=now_s)
        for one in found
    )
    return found if has_room else []


def _is_steady(running_set: RunningSet) -> bool:
    """Nobody waits, or stands back for others, and all take the next token of one choice."""
    if not running_set.on_device or running_set.behind or running_set.awaiting_prefill:
        return False
    if running_set.shares.any_own or running_set.choices > running_set.shares.slots:
        return False
    here = (*running_set.running, *(sequence for sequence, _ in running_set.on_device))
    return all(_only_decodes(sequence) for sequence in here)


def _only_decodes(sequence: Sequence) -> bool:
    """And its draws need no earlier tokens. Who ended while on the device needs nothing."""
    sampling = sequence.spec.sampling
    is_one = sampling.n == 1 and sequence.needed <= 1
    return is_one and not needs_history(sampling)
