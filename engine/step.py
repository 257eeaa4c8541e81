"""One engine step, as values: what a scheduler asks for and what comes back. Pure.

The batch is ragged: one call serves prefill chunks and decode tokens of many sequences.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from engine.latency import StepWork, mixed_work
from kvpool.canary import DigestBlocks
from kvpool.copies import CopyPairs
from kvpool.handoff_events import FetchPiece, ReplaceSlab, ScatterSlab, SendPeer, WriteSlab
from kvpool.layout import Tables
from kvrelay.messages import WorkerEvent
from kvrelay.types import PromptLogprob, RequestKey, Sampling, TokenLogprobs
from kvrelay.values import value


@value
class SampleRequest:
    """Sample the token after the last one of this slice.

    `index` counts the choice's tokens so far: the draw depends on `(seed, choice, index)` alone.
    `prompt_ids` and `emitted_ids` feed the penalties.
    """

    sampling: Sampling
    choice: int
    index: int
    prompt_ids: Sequence[int]
    emitted_ids: tuple[int, ...]


@value
class Scoring:
    """Log probabilities are wanted of known tokens: `next_ids[i]` follows the slice's i-th token.
    `top` alternatives are told beside each."""

    next_ids: Sequence[int]
    top: int = 0


@value
class SequenceSlice:
    """Consecutive tokens of one sequence to run, with the blocks that hold its KV.

    `tables` cover positions `[0, start + len(token_ids))`. With several `samples` (the choices of
    one prompt) each is drawn from the same logits. `prompt_tokens` is the whole prompt's length
    when this is only a chunk of it: some models (LongRoPE) treat long sequences differently from
    their first token on.

    With `follows` its one token is not known yet: what that slice of the step before draws.
    """

    key: RequestKey
    choice: int
    token_ids: Sequence[int]
    start: int
    tables: Tables
    samples: tuple[SampleRequest, ...] = ()
    prompt_tokens: int = 0
    follows: int | None = None
    scoring: Scoring | None = None


@value
class StepBatch:
    slices: tuple[SequenceSlice, ...]

    @property
    def tokens(self) -> int:
        return sum(len(s.token_ids) for s in self.slices)

    @property
    def work(self) -> StepWork:
        """A slice of one token decodes."""
        contexts = [s.start for s in self.slices if len(s.token_ids) == 1]
        chunks = [(len(s.token_ids), s.start) for s in self.slices if len(s.token_ids) > 1]
        return mixed_work(chunks, decoding=len(contexts), kv_tokens=sum(contexts))


@value
class Sampled:
    token_id: int
    logprobs: TokenLogprobs | None = None


@value
class StepOutcome:
    """# slice of the batch |-> one Sampled for each of its samples; and the log probabilities of
    known tokens if wanted

    After several steps: one Sampled for each step.
    """

    sampled: tuple[tuple[Sampled, ...], ...]
    prompt_logprobs: Mapping[int, tuple[PromptLogprob, ...]] = field(default_factory=dict)


# --- between a scheduler and its worker ---------------------------------------------------------


@value
class StepWanted:
    """The device is free: is there a step to run? Up to `most_steps` may be run in a row."""

    most_steps: int = 1


@value
class StepBehindWanted:
    """A step of the scheduler's is on the device: can the next one be launched behind it, before
    its tokens are known?"""


@value
class StepDone:
    """Of the step that was launched first. `steps` of those that RunStep allowed have run;
    `seconds` is what they took together."""

    outcome: StepOutcome
    seconds: float
    steps: int = 1


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed; leases may have ended."""


@value
class RunStep:
    """Make the copies, then run the batch; its outcome comes back as StepDone.

    LayersWritten comes for each layer of `layer_marks` once its KV is written. With `steps` above 1
    every slice is one token of one choice, and its tables have room for so many: the batch may be
    run so often, each time with the tokens just drawn, up to the step that ends a sequence.
    """

    batch: StepBatch
    steps: int = 1
    copies: tuple[CopyPairs, ...] = ()
    layer_marks: frozenset[int] = frozenset()


@value
class Emit:
    """Tell the router that the request came from."""

    events: tuple[WorkerEvent, ...]


Move = WriteSlab | ScatterSlab | FetchPiece | ReplaceSlab | DigestBlocks
Command = RunStep | Emit | SendPeer | Move
