"""A sequence of a decode worker: a choice of a request, or a prompt until its choices part. Pure.

prompt ids | emitted ids
[0 ............ computed)   KV is in the blocks
               [computed, length)   to be run next; 1 token when decoding, more after a
                                    preemption or for a prompt that is prefilled here
"""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.core.step import (
    Sampled,
    SampleRequest,
    SequenceSlice,
    finish_reason,
    has_penalties,
    needs_history,
    scoring_of,
)
from kvpool.core.blocks.holding import Holder
from kvpool.core.layout.block_names import ChainNames, HashChain
from kvpool.core.layout.layout import Tables
from kvrelay.messages import Lifetime, LifetimeMoment, PrefixSource, Tokens
from kvrelay.types import FinishReason, PrefixOrigin, RequestKey, RequestSpec

_UNKNOWN = (0,)
"""Stands for a token that is drawn in its step only."""


@dataclass(slots=True, kw_only=True, eq=False)
class Sequence:
    """`arrival` orders sequences: the newest is preempted first. `choices` share all tokens so far;
    those `stopped` end with the token at which the choices part. Of the `computed` tokens the first
    `cached` were found when it began. `hint`: who may have more of them, until it was asked.

    A sequence that decodes may have to pause for others: for `paused_s` so far, and now since
    `paused_since_s`. `preempted`: it also lost its slot or its blocks. While others may hold it up,
    `advanced_s` is the time of its last step.

    `may_overlap`: the next token of its one choice can be computed while the last one isn't known
    yet. A grammar needs the last one only when the next one is drawn.
    """

    spec: RequestSpec
    choices: tuple[int, ...]
    holder: Holder
    names: HashChain
    arrival: int
    emitted: list[int] = field(default_factory=list)
    hint: PrefixSource | None = None
    cached: int = 0
    origin: PrefixOrigin = PrefixOrigin.COMPUTED
    computed: int = 0
    joined: bool = False
    dropped: bool = False
    stopped: set[int] = field(default_factory=set)
    preempted: bool = False
    paused_s: float = 0.0
    paused_since_s: float | None = None
    advanced_s: float | None = None
    _samples: tuple[SampleRequest, ...] = ()  # kept if without the history
    key: RequestKey = field(init=False)
    prompt_tokens: int = field(init=False)
    length: int = field(init=False)  # of the prompt and what it has emitted
    context_tokens: int = field(init=False)  # those that it began with
    most_tokens: int = field(init=False)  # the length at which it ends
    may_overlap: bool = field(init=False)
    _needs_history: bool = field(init=False)
    _has_scored_prompt: bool = field(init=False)

    def __post_init__(self) -> None:
        self.key = self.spec.key
        self.prompt_tokens = len(self.spec.prompt_ids)
        self.context_tokens = self.prompt_tokens + len(self.spec.emitted_ids)
        self.most_tokens = self.prompt_tokens + self.spec.sampling.max_tokens
        self.may_overlap = self.spec.sampling.n == 1 and not has_penalties(self.spec.sampling)
        self._needs_history = needs_history(self.spec.sampling)
        self._has_scored_prompt = self.spec.is_scored
        self.length = self.prompt_tokens + len(self.emitted)

    @property
    def is_alone(self) -> bool:
        """No other request is in its steps for now: it may be what killed a worker."""
        alone = self.spec.alone_tokens
        if not alone:
            return False
        since = self.context_tokens + len(self.spec.resumed_by(self.choices[0]))
        return self.length < since + alone

    @property
    def needed(self) -> int:
        """Tokens to be run before the next one is drawn."""
        return self.length - self.computed

    def pause(self, now_s: float) -> None:
        if self.emitted and self.paused_since_s is None:
            self.paused_since_s = now_s

    def resume(self, now_s: float) -> None:
        """It is to yield its next token."""
        assert self.paused_since_s is not None
        self.paused_s += now_s - self.paused_since_s
        self.paused_since_s = None

    def part(self, choice: int, token_ids: tuple[int, ...]) -> Sequence:
        """One of its choices, which goes on with `token_ids`: the first token drawn, or all that it
        emitted in earlier attempts. Their KV is computed here."""
        return Sequence(
            spec=self.spec,
            choices=(choice,),
            holder=Holder("decode", self.key, choice),
            names=self.names.copy(),
            arrival=self.arrival,
            emitted=[*self.emitted, *token_ids],
            computed=self.computed,
            joined=self.joined,
            hint=self.hint,
        )

    def __getitem__(self, positions: slice) -> tuple[int, ...]:
        """Token ids at `[start, stop)`, of the prompt and emitted ones."""
        border = self.prompt_tokens
        start, end, _ = positions.indices(border + len(self.emitted))
        if start >= border:
            return tuple(self.emitted[start - border : end - border])
        return (*self.spec.prompt_ids[start:end], *self.emitted[: max(0, end - border)])

    @property
    def reusable(self) -> ChainNames:
        """The names of what may be taken from the cache. The last token is always run, for its
        logits; all tokens are run where all are scored."""
        self.names.extend(self, self.length)
        return self.names.full(0 if self.is_scored else self.length - 1)

    @property
    def is_scored(self) -> bool:
        """The log probabilities of its prompt are wanted, and come before its first token."""
        return self._has_scored_prompt and len(self.emitted) == len(self.spec.emitted_ids)

    @property
    def filled(self) -> ChainNames:
        """The names of the blocks that are full."""
        self.names.extend(self, self.computed)
        return self.names.full(self.computed)

    def slice(self, take: int, tables: Tables) -> SequenceSlice:
        """Its next `take` tokens; with the last of them, a token of each choice is drawn."""
        start, needed = self.computed, self.needed
        return SequenceSlice(
            key=self.key,
            choice=self.choices[0],
            token_ids=self[start : start + take],
            start=start,
            tables=tables,
            samples=self._wanted() if take == needed else (),
            index=len(self.emitted),
            prompt_tokens=self.length if needed > 1 else self.context_tokens,
            scoring=scoring_of(self.spec, start, start + take) if self.is_scored else None,
        )

    def slice_behind(self, place: int, tables: Tables) -> SequenceSlice:
        """The token that the step on the device draws with its slice at `place`."""
        (choice,) = self.choices
        return SequenceSlice(
            key=self.key,
            choice=choice,
            token_ids=_UNKNOWN,
            start=self.computed + 1,
            tables=tables,
            samples=self._wanted(),
            index=len(self.emitted) + 1,
            prompt_tokens=self.context_tokens,
            follows=place,
        )

    def _wanted(self) -> tuple[SampleRequest, ...]:
        """What to draw once all tokens are run; with the history where it matters."""
        if self._samples:
            return self._samples
        history, spec = self._needs_history, self.spec
        found = tuple(
            [
                SampleRequest(
                    sampling=spec.sampling,
                    choice=choice,
                    prompt_ids=spec.prompt_ids if history else (),
                    emitted_ids=tuple(self.emitted) if history else (),
                )
                for choice in self.choices
            ]
        )
        if not history:
            self._samples = found
        return found

    @property
    def decodes_one(self) -> bool:
        """Its next step runs one token of one choice."""
        return len(self.choices) == 1 and self.needed == 1

    @property
    def tokens_left(self) -> int:
        """The most tokens that it may still yield."""
        return self.most_tokens - self.length

    def joined_event(self, now_s: float) -> Lifetime:
        """It is in a step for the first time."""
        if len(self.emitted) > len(self.spec.emitted_ids):
            return Lifetime(key=self.key, at_s=now_s, name=LifetimeMoment.DECODE_JOINED)
        return Lifetime(
            key=self.key,
            at_s=now_s,
            name=LifetimeMoment.PREFILL_STARTED,
            tokens=self.cached,
            source=self.origin,
        )

    def tokens_event(self, choice: int, drawn: tuple[Sampled, ...], now_s: float) -> Tokens:
        """The tokens of one step, or of several in a row, whose last one may end it. `emitted` does
        not have them yet."""
        last, first = drawn[-1], len(self.emitted)
        ids = (last.token_id,) if len(drawn) == 1 else tuple([one.token_id for one in drawn])
        reason = finish_reason(self.spec.sampling, last, emitted=first + len(drawn))
        has_logprobs = last.logprobs is not None
        return Tokens(
            key=self.key,
            at_s=now_s,
            choice=choice,
            first_index=first,
            token_ids=ids,
            logprobs=tuple([one.logprobs for one in drawn if one.logprobs]) if has_logprobs else (),
            finish_reason=reason,
            stop_token_id=last.token_id if reason is FinishReason.STOP else None,
            stood_back_s=0.0 if reason is None else self.paused_s,
        )
