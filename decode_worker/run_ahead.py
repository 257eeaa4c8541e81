"""How often a step may be run in a row, and the blocks for that. Pure.

The result is that of as many single steps, wherever the run is cut; room for steps that did not
come is given back.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Ordered
from dataclasses import dataclass

from decode_worker.roster import Roster
from decode_worker.sequence import Sequence

Taken = Ordered[tuple[Sequence, int]]
"""sequence, its tokens in the step"""


@dataclass(slots=True, kw_only=True)
class RunAhead:
    """No run goes over `rope_border_tokens`, where a sequence is computed anew."""

    roster: Roster
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
        here = len(self.roster.running) + len(self.roster.awaiting_prefill)
        return len(chosen) == here and all(_decodes(sequence) for sequence, _ in chosen)

    def _left(self, sequence: Sequence) -> int:
        border = self.rope_border_tokens
        if border is None or border < sequence.computed:
            return sequence.tokens_left
        return min(sequence.tokens_left, max(1, border - sequence.computed))

    def _try_room(self, chosen: Taken, steps: int, now_s: float) -> bool:
        """Where one gets none the others keep theirs until the step is over."""
        tables = self.roster.tables
        return all(
            tables.try_grow(sequence.holder, sequence.computed + steps, now_s=now_s)
            for sequence, _ in chosen
        )

    def give_back(self, ran: Iterable[tuple[Sequence, int]]) -> None:
        """The step is over, after however many times."""
        for sequence, _ in ran if self._has_room_ahead else ():
            if not sequence.dropped:
                self.roster.tables.shrink(sequence.holder, sequence.computed)


def _decodes(sequence: Sequence) -> bool:
    return sequence.needed == len(sequence.choices) == 1
