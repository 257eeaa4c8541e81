"""One engine step, as values: the scheduler's request and the result. Pure.

The batch is ragged: one call serves prefill chunks and decode tokens of many sequences. A step's
logits have one row for each slice that samples, then one for each scored token, both in the batch's
order.

A token's log probability comes from the logits of the token before it. So a prompt with log
probabilities is computed whole, even if its KV is cached.

Also the rule that ends a choice, which is the same on both kinds of workers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, SupportsInt

from engine.core.step_times import StepWork, mixed_work
from kvpool.core.blocks.holding import CopyPairs
from kvpool.core.layout.layout import Tables
from kvpool.core.transfer.commands import FetchPiece, ReplaceSlab, ScatterSlab, SendPeer, WriteSlab
from kvpool.core.transfer.messages import DigestBlocks
from kvrelay.messages import PromptLogprobs, WorkerEvent
from kvrelay.types import (
    FinishReason,
    PromptLogprob,
    RequestKey,
    RequestSpec,
    Sampling,
    TokenLogprobs,
    value,
)


@value
class SampleRequest:
    """Sample the token after the last one of this slice.

    It is the same in every step of a choice, but for the history where that matters: `prompt_ids`
    and `emitted_ids` feed the penalties; `emitted_ids` tell the place in a grammar.
    """

    sampling: Sampling
    choice: int
    prompt_ids: Sequence[int]
    emitted_ids: tuple[int, ...]


@value
class Scoring:
    """The log probabilities of known tokens are wanted: `next_ids[i]` follows the slice's i-th
    token, and gets `top` alternatives."""

    next_ids: Sequence[int]
    top: int = 0


@value
class SequenceSlice:
    """Consecutive tokens of one sequence to run, with the blocks that hold its KV.

    `tables` cover positions `[0, start + len(token_ids))`. With several `samples` (the choices of
    one prompt) each is drawn from the same logits. `index` counts the tokens of each choice so far:
    a draw depends on `(seed, choice, index)` alone. `prompt_tokens` is the whole prompt's length
    when this is only a chunk of it: some models (LongRoPE) treat long sequences differently from
    their first token on.

    With `follows` its one token is not known yet: it is the one that this slice of the step before
    draws.
    """

    key: RequestKey
    choice: int
    token_ids: Sequence[int]
    start: int
    tables: Tables
    samples: tuple[SampleRequest, ...] = ()
    index: int = 0
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
    """`ends`: the choice's grammar is matched, so the token ends it like a stop token."""

    token_id: int
    logprobs: TokenLogprobs | None = None
    ends: bool = False


@value
class StepOutcome:
    """# slice of the batch |-> one Sampled for each of its samples; and the log probabilities of
    known tokens if wanted

    After several steps: one Sampled for each step. `failed`: # slice |-> why its request can't go
    on; what it has drawn means nothing
    """

    sampled: tuple[tuple[Sampled, ...], ...]
    prompt_logprobs: Mapping[int, tuple[PromptLogprob, ...]] = field(default_factory=dict)
    failed: Mapping[int, str] = field(default_factory=dict)


# --- between a scheduler and its worker ---------------------------------------------------------


@value
class StepWanted:
    """The device is free and asks for a step. Up to `most_steps` may be run in a row."""

    most_steps: int = 1


@value
class OverlapStepWanted:
    """A step of the scheduler is on the device. Can the next one be launched before it has
    ended?"""


@value
class StepDone:
    """The step that was launched first has ended. `steps` of those that RunStep allowed have run,
    in `seconds` together."""

    outcome: StepOutcome
    seconds: float
    steps: int = 1


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed; leases may have ended."""


@value
class RunStep:
    """Make the copies, then run the batch; its outcome comes back as StepDone.

    LayersWritten, with this step's `number`, comes for each layer of `layer_marks` once its KV is
    written; a step without marks needs no number. With `steps` above 1 every slice is one token of
    one choice, and its tables have room for all steps. The batch may be run that often, each time
    with the tokens just drawn, up to the step that ends a sequence.
    """

    batch: StepBatch
    steps: int = 1
    copies: tuple[CopyPairs, ...] = ()
    layer_marks: frozenset[int] = frozenset()
    number: int = 0


@value
class Emit:
    """Send these events to the router of the request."""

    events: tuple[WorkerEvent, ...]


KvMove = WriteSlab | ScatterSlab | FetchPiece | ReplaceSlab | DigestBlocks
Command = RunStep | Emit | SendPeer | KvMove


def finish_reason(sampling: Sampling, drawn: Sampled, *, emitted: int) -> FinishReason | None:
    """Called after `drawn` became the `emitted`-th token of its choice (1-based). None: continue.

    Stop ids can't be drawn before `min_tokens` (the sampler masks them), unless the choice's
    grammar allows nothing else.
    """
    if drawn.ends or drawn.token_id in sampling.stop_token_ids:
        return FinishReason.STOP
    return FinishReason.LENGTH if emitted >= sampling.max_tokens else None


def needs_history(sampling: Sampling) -> bool:
    """True if the sampler must see the earlier tokens."""
    return bool(sampling.grammar) or has_penalties(sampling)


def has_penalties(sampling: Sampling) -> bool:
    """True if the scores depend on the earlier tokens."""
    return (
        sampling.repetition_penalty != 1.0
        or sampling.presence_penalty != 0.0
        or sampling.frequency_penalty != 0.0
    )


class LastRows(Protocol):
    """# slice |-> its last row"""

    def __getitem__(self, index: int, /) -> SupportsInt: ...


MOST_SCORED_TOKENS = 512
"""Scored tokens of one step. Each takes a row of logits: half a megabyte with a vocabulary of
128,000 ids."""


def scoring_of(spec: RequestSpec, start: int, end: int) -> Scoring | None:
    """The scoring of a slice `[start, end)`; None: none of its tokens is scored."""
    top = spec.sampling.prompt_logprobs
    if top is None:
        return None
    next_ids = spec.prompt_ids[start + 1 : end + 1]
    return Scoring(next_ids=next_ids, top=top) if next_ids else None


def scored_event(
    spec: RequestSpec, end: int, take: int, entries: tuple[PromptLogprob, ...], now_s: float
) -> PromptLogprobs:
    """For a step that has computed `take` tokens, up to `end`."""
    first = end - take + 1
    return PromptLogprobs(key=spec.key, at_s=now_s, first_position=first, entries=entries)


def scored_rows(slices: Sequence[SequenceSlice], last_rows: LastRows) -> list[int]:
    """Rows whose logits score a token, slice by slice."""
    rows: list[int] = []
    for i, piece in enumerate(slices):
        if piece.scoring is not None:
            first = int(last_rows[i]) - len(piece.token_ids) + 1
            rows += range(first, first + len(piece.scoring.next_ids))
    return rows


def row_owners(slices: Sequence[SequenceSlice], picked: Sequence[int]) -> list[tuple[bool, int]]:
    """For a step of the `picked` slices alone: whether each row scores, and its slice. Sorted, the
    rows of several such steps are in the order of all."""
    owners = [(False, i) for i in picked if slices[i].samples]
    for i in picked:
        scoring = slices[i].scoring
        owners += [(True, i)] * len(scoring.next_ids if scoring is not None else ())
    return owners
