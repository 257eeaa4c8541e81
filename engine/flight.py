"""A launched step: on a GPU or in a pipeline it may still run, and another one may be launched
behind it.

Runs in the worker; one thread launches it, the same or another one collects it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from engine.core.step import SequenceSlice, StepBatch, StepOutcome
from engine.device.streams import send
from engine.sampling.sampler import Drawn, Scored


@dataclass(frozen=True, slots=True)
class Flight:
    batch: StepBatch
    logits: torch.Tensor  # fp32 [slices that sample, vocab]
    drawn: Drawn
    wait: Callable[[], None]
    finish: Callable[[Flight], StepOutcome]
    scored: Scored | None = None

    def drawn_id(self, index: int) -> int:
        """What this slice has drawn, once the device has reached that point. All slices draw
        one."""
        self.wait()
        return self.drawn.id_of(index)

    def collect(self) -> StepOutcome:
        """Waits for the device. Call it once, in the order of the launches."""
        self.wait()
        return self.finish(self)


@dataclass(frozen=True, slots=True)
class ToldStep:
    """Other stages compute it already. This one does so when it is collected."""

    batch: StepBatch
    finish: Callable[[ToldStep], StepOutcome]

    def collect(self) -> StepOutcome:
        """Computes this stage's part. Call it once, in the order of the launches."""
        return self.finish(self)


Launched = Flight | ToldStep


def next_tokens(slices: tuple[SequenceSlice, ...], before: Flight | None) -> torch.Tensor | None:
    """`[slices]` on the device: the token that each slice follows in `before`, or its known token;
    None if no slice follows. All slices then have one token, and all of `before`'s sample one."""
    if all(piece.follows is None for piece in slices):
        return None
    assert before is not None, "slices follow a step that was not launched"
    drawn = before.drawn.tokens
    places = [piece.follows for piece in slices]
    if places == list(range(len(drawn))):
        return drawn
    known = [0 if piece.follows is not None else piece.token_ids[0] for piece in slices]
    sources, ids, follows = send(
        [[p or 0 for p in places], known, [p is not None for p in places]],
        torch.long,
        drawn.device,
    )
    return torch.where(follows.bool(), drawn[sources], ids)
