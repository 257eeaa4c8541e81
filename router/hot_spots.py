"""Which sequences leave a decode worker before it overflows, and where to (TetriInfer,
arXiv:2401.11181 §3.4: long sequences are moved). Suggests; pure.

A worker is a hot spot when what runs there will, at its fullest moment, have more blocks than there
are, or take longer for a step than the strictest of its objectives. It sheds until it is below its
low mark, to workers that stay below theirs: what lies between the marks moves nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from router.view import WorkerView

HIGH, LOW = 1.0, 0.9
"""Shares of a worker's blocks, and of its objective for a step."""
FEWEST_LEFT_TOKENS = 32
"""One that ends sooner isn't worth its handoff."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoding:
    """A sequence with a context of `tokens` now, which yields `left_tokens` more."""

    request_id: str
    tokens: int
    left_tokens: int
    may_move: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What decodes at a worker. `other_blocks` are held there for others than `sequences`."""

    worker: WorkerView
    sequences: Sequence[Decoding]
    other_blocks: int = 0

    def without(self, one: Decoding) -> Load:
        kept = [other for other in self.sequences if other is not one]
        return Load(worker=self.worker, sequences=kept, other_blocks=self.other_blocks)

    def beside(self, one: Decoding) -> Load:
        return Load(
            worker=self.worker,
            sequences=[*self.sequences, one],
            other_blocks=self.other_blocks,
        )

    def share(self) -> float:
        """Of the blocks, or of the strictest objective, whichever is nearer to its end."""
        hello, objective_s = self.worker.hello, self.worker.outlook.strictest_tpot_s
        tokens, sequences = fullest(self.sequences)
        blocks = self.other_blocks + tokens / hello.block_size + sequences
        if objective_s is None:
            return blocks / hello.total_blocks
        step_s = self.worker.decode_s(sequences, tokens)
        return max(blocks / hello.total_blocks, step_s / objective_s)


def fullest(sequences: Iterable[Decoding]) -> tuple[int, int]:
    """The most tokens that they will have at once, each growing by one a step until it ends, and
    how many sequences have them."""
    longest_first = sorted(sequences, key=lambda one: one.left_tokens, reverse=True)
    sums = accumulate(one.tokens for one in longest_first)
    moments = zip(sums, enumerate(longest_first, 1), strict=True)
    return max(((now + n * one.left_tokens, n) for now, (n, one) in moments), default=(0, 0))


def suggest(load: Load, targets: Sequence[Load], most: int) -> list[tuple[Decoding, WorkerView]]:
    """At most so many moves, longest sequences first; none while the worker will not overflow."""
    if load.share() <= HIGH:
        return []
    moves: list[tuple[Decoding, WorkerView]] = []
    room = list(targets)
    for one in sorted(load.sequences, key=lambda one: one.tokens, reverse=True):
        if len(moves) == most or load.share() <= LOW:
            break
        if not one.may_move or one.left_tokens < FEWEST_LEFT_TOKENS:
            continue
        target = _roomiest(one, room)
        if target is not None:
            moves.append((one, target.worker))
            room = [t.beside(one) if t is target else t for t in room]
            load = load.without(one)
    return moves


def _roomiest(one: Decoding, targets: Sequence[Load]) -> Load | None:
    shares = [(target.beside(one).share(), at) for at, target in enumerate(targets)]
    share, at = min(shares, default=(LOW, 0))
    return targets[at] if share < LOW else None
