"""One prompt that a prefill worker computes and hands over. Pure.

prompt ids, and those emitted by earlier attempts
[0 ...... computed)   KV is in the blocks; first what was found, then what was run
[computed, launched)  chunks in steps on the device
[launched, length)    to be launched, in chunks
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.core.step import (
    Sampled,
    SampleRequest,
    SequenceSlice,
    finish_reason,
    needs_history,
    scoring_of,
)
from kvpool.core.blocks.holding import Holder
from kvpool.core.layout.block_names import ChainNames, HashChain
from kvpool.core.layout.hashes import NO_NAMES, BlockHashes, FullNames, tenant_name
from kvpool.core.layout.layout import Tables
from kvrelay.messages import Lifetime, LifetimeMoment, Prefill, Tokens
from kvrelay.types import FinishReason, PrefixOrigin, RequestKey, Sampling, value
from prefill_worker.sender import Sender


@value
class Chunk:
    """Tokens `[start, end)` of a prompt, in one step."""

    job: PrefillJob
    start: int
    end: int

    @property
    def tokens(self) -> int:
        return self.end - self.start


@dataclass(slots=True, kw_only=True, eq=False)
class PrefillJob:
    """`cached` tokens were found, and not computed. With `pool`, the pool has the first `stored`
    blocks. `first` has the first token drawn of each choice; the `finished` choices end with it.
    The order of prompts sets `arrival`, `deadline_s` and `left_s`: how long the rest of it would
    take alone."""

    sender: Sender
    holder: Holder
    names: HashChain
    arrival: int = 0
    deadline_s: float | None = None
    left_s: float = 0.0
    cached: int = 0
    origin: PrefixOrigin = PrefixOrigin.COMPUTED
    computed: int = 0
    launched: int = 0
    started: bool = False
    first: tuple[int, ...] = ()
    finished: tuple[int, ...] = ()
    stored: int = 0
    committing: bool = False
    awaits_digest: bool = False
    message: Prefill = field(init=False)
    key: RequestKey = field(init=False)
    tenant: str = field(init=False)
    qos_tier: str = field(init=False)
    within_s: float | None = field(init=False)
    prompt: Sequence[int] = field(init=False)
    prompt_tokens: int = field(init=False)
    is_resumed: bool = field(init=False)  # its client has tokens of it
    is_alone: bool = field(init=False)  # it may have killed a worker: no other is in its steps

    def __post_init__(self) -> None:
        self.message = self.sender.message
        spec = self.message.spec
        self.key, self.tenant, self.qos_tier = spec.key, tenant_name(spec.tenant), spec.qos_tier
        self.within_s, self.is_alone = self.message.within_s, spec.alone_tokens > 0
        self.is_resumed = bool(spec.emitted_ids or spec.resumed)
        self.prompt, self.prompt_tokens = spec.context_ids, spec.context_tokens

    @property
    def first_index(self) -> int:
        """The index of the token to be drawn."""
        return len(self.message.spec.emitted_ids)

    @property
    def sampling(self) -> Sampling:
        return self.message.spec.sampling

    @property
    def remaining(self) -> int:
        """Tokens that no step has computed yet."""
        return self.prompt_tokens - self.computed

    @property
    def unlaunched(self) -> int:
        """Tokens that are in no step yet."""
        return self.prompt_tokens - self.launched

    @property
    def seen_from(self) -> int:
        """No later query needs KV that the query at this position doesn't see; nor does the decode
        worker."""
        return min(self.computed, self.sender.next_position)

    @property
    def reusable(self) -> FullNames:
        """The names of what may be taken from the cache. The last token is always run, for its
        logits; all tokens are run where all are scored."""
        return NO_NAMES if self.is_scored else self.names.full(self.prompt_tokens - 1)

    @property
    def is_scored(self) -> bool:
        """The log probabilities of its prompt are wanted."""
        return self.message.spec.is_scored

    @property
    def filled(self) -> ChainNames:
        """The names of the blocks that are full."""
        return self.names.full(self.computed)

    def fills_next_of(self, other: PrefillJob) -> bool:
        """The next block that its steps on the device fill is one that `other` begins with."""
        depth, filling, wanted = len(self.filled), self.names.full(self.launched), other.reusable
        is_in_both = depth < min(len(filling), len(wanted))
        return is_in_both and filling.at(depth) == wanted.at(depth)

    @property
    def has_unstored(self) -> bool:
        return self.stored < len(self.filled)

    @property
    def unstored(self) -> BlockHashes:
        """Of the full blocks those that may not be in the pool yet."""
        return BlockHashes(self.filled.packed_from(self.stored))

    @property
    def cancelled(self) -> str | None:
        """The reason, when it was cancelled."""
        return self.sender.cancelled

    @property
    def all_finished(self) -> bool:
        """No choice has anything left to decode."""
        return len(self.finished) == self.sampling.n

    @property
    def may_commit(self) -> bool:
        sent = self.sender.all_sent and self.sender.settled
        return sent and bool(self.first) and not self.committing

    def opened(self, tokens: int, origin: PrefixOrigin) -> None:
        """The KV of its first `tokens` tokens is there."""
        self.cached = self.computed = self.launched = tokens
        self.origin = origin

    def launch(self, tokens: int) -> Chunk:
        """Its next ones go into a step."""
        start, self.launched = self.launched, self.launched + tokens
        return Chunk(job=self, start=start, end=self.launched)

    def ran(self, chunk: Chunk) -> None:
        assert chunk.start == self.computed, "chunks end in the order of their launches"
        self.computed = chunk.end

    def started_event(self, now_s: float) -> Lifetime:
        return Lifetime(
            key=self.key,
            at_s=now_s,
            name=LifetimeMoment.PREFILL_STARTED,
            tokens=self.cached,
            source=self.origin,
        )

    def slice(self, chunk: Chunk, tables: Tables) -> SequenceSlice:
        """With its last tokens, a token of each choice is drawn."""
        return SequenceSlice(
            key=self.key,
            choice=0,
            token_ids=self.prompt[chunk.start : chunk.end],
            start=chunk.start,
            tables=tables,
            samples=self._samples() if chunk.end == self.prompt_tokens else (),
            index=len(self.message.spec.emitted_ids),
            prompt_tokens=self.prompt_tokens,
            scoring=scoring_of(self.message.spec, chunk.start, chunk.end),
        )

    def _samples(self) -> tuple[SampleRequest, ...]:
        spec, has_history = self.message.spec, needs_history(self.sampling)
        return tuple(
            [
                SampleRequest(
                    sampling=spec.sampling,
                    choice=choice,
                    prompt_ids=spec.prompt_ids if has_history else (),
                    emitted_ids=spec.emitted_ids if has_history else (),
                )
                for choice in range(spec.sampling.n)
            ]
        )

    def take_first(self, sampled: tuple[Sampled, ...], now_s: float) -> list[Tokens]:
        """Events of the first token of each choice, or of its end where no token is wanted. There
        is none for choices that ended in an earlier attempt, or go on after its tokens."""
        if not self.sampling.max_tokens:
            self.finished = tuple(range(self.sampling.n))
            return [self._end(choice, now_s) for choice in self.finished]
        spec, emitted = self.message.spec, self.first_index + 1
        reasons = [finish_reason(self.sampling, one, emitted=emitted) for one in sampled]
        drawn = [
            choice
            for choice in range(self.sampling.n)
            if not spec.resumed_by(choice) and choice not in spec.finished_choices
        ]
        ended = {choice for choice in drawn if reasons[choice] is not None}
        self.finished = tuple(sorted({*spec.finished_choices, *ended}))
        self.first = tuple(
            (*spec.resumed_by(choice), one.token_id)[0] for choice, one in enumerate(sampled)
        )
        return [
            self._first_event(choice, sampled[choice], reasons[choice], now_s) for choice in drawn
        ]

    def _first_event(
        self, choice: int, one: Sampled, reason: FinishReason | None, now_s: float
    ) -> Tokens:
        return Tokens(
            key=self.key,
            at_s=now_s,
            choice=choice,
            first_index=self.first_index,
            token_ids=(one.token_id,),
            logprobs=() if one.logprobs is None else (one.logprobs,),
            finish_reason=reason,
            stop_token_id=one.token_id if reason is FinishReason.STOP else None,
        )

    def _end(self, choice: int, now_s: float) -> Tokens:
        return Tokens(
            key=self.key,
            at_s=now_s,
            choice=choice,
            first_index=0,
            token_ids=(),
            finish_reason=FinishReason.LENGTH,
        )
