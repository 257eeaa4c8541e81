"""One sequence being decoded: a choice of a request, or a prompt whose choices are still one. Pure.

prompt ids | emitted ids
[0 ............ computed)   KV is in the blocks
               [computed, length)   to be run next; 1 token when decoding, more after a
                                    preemption or for a prompt that is prefilled here
"""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass, field

from engine.core.step import (
    Sampled,
    SampleRequest,
    Scoring,
    finish_reason,
    needs_history,
    scoring_of,
)
from kvpool.core.blocks.holding import Holder
from kvpool.core.layout.block_names import HashChain
from kvpool.core.layout.hashes import BlockHash
from kvrelay.messages import Lifetime, Tokens
from kvrelay.types import FinishReason, PrefixOrigin, RequestKey, RequestSpec


@dataclass(slots=True, kw_only=True, eq=False)
class Sequence:
    """`arrival` orders sequences: the newest is preempted first. `choices` share all so far;
    those `stopped` end with the token that the choices part at. Of `computed` tokens the first
    `cached` were found in the blocks when it began. While it decodes it may stand back for others:
    so far for `stood_back_s`, and now since `back_since_s`; `parked`: then it lost its place or its
    blocks.
    While others may hold it up, `advanced_s` is the time of the last step that it was in."""

    spec: RequestSpec
    choices: tuple[int, ...]
    holder: Holder
    names: HashChain
    arrival: int
    emitted: list[int] = field(default_factory=list)
    cached: int = 0
    origin: PrefixOrigin = PrefixOrigin.COMPUTED
    computed: int = 0
    joined: bool = False
    dropped: bool = False
    stopped: set[int] = field(default_factory=set)
    parked: bool = False
    stood_back_s: float = 0.0
    back_since_s: float | None = None
    advanced_s: float | None = None

    @property
    def key(self) -> RequestKey:
        return self.spec.key

    @property
    def length(self) -> int:
        return len(self.spec.prompt_ids) + len(self.emitted)

    @property
    def needed(self) -> int:
        return self.end - self.computed

    @property
    def end(self) -> int:
        """What is to be run next ends here."""
        return self.length

    def stands_back(self, now_s: float) -> None:
        if self.emitted and self.back_since_s is None:
            self.back_since_s = now_s

    def goes_on(self, now_s: float) -> None:
        """It is to yield its next token."""
        assert self.back_since_s is not None
        self.stood_back_s += now_s - self.back_since_s
        self.back_since_s = None

    def part(self, choice: int, token_ids: tuple[int, ...]) -> Sequence:
        """One choice of it, that goes on with `token_ids`: the first one drawn, or all that it has
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
        )

    def __getitem__(self, positions: slice) -> tuple[int, ...]:
        """Token ids at `[start, stop)`, of the prompt and emitted ones."""
        prompt = self.spec.prompt_ids
        start, end, _ = positions.indices(self.length)
        if start >= len(prompt):
            return tuple(self.emitted[start - len(prompt) : end - len(prompt)])
        return (*prompt[start:end], *self.emitted[: max(0, end - len(prompt))])

    @property
    def reusable(self) -> abc.Sequence[BlockHash]:
        """What may be found in the cache: at least the last token is run, for its logits; all are
        where all are scored."""
        self.names.extend(self, self.length)
        return self.names.full(0 if self.is_scored else self.end - 1)

    @property
    def is_scored(self) -> bool:
        """The log probabilities of its prompt are wanted, and come before its first token."""
        return self.spec.is_scored and len(self.emitted) == len(self.spec.emitted_ids)

    def scoring(self, take: int) -> Scoring | None:
        """Of its next `take` tokens."""
        if not self.is_scored:
            return None
        return scoring_of(self.spec, self.computed, self.computed + take)

    @property
    def filled(self) -> abc.Sequence[BlockHash]:
        """The names of the blocks that are full."""
        self.names.extend(self, self.computed)
        return self.names.full(self.computed)

    @property
    def whole_tokens(self) -> int:
        """What is being computed as one prompt: after a preemption the emitted tokens too."""
        return self.end if self.needed > 1 else self.spec.context_tokens

    def samples(self) -> tuple[SampleRequest, ...]:
        """What to draw once all tokens are run; with the history where it matters."""
        history = needs_history(self.spec.sampling)
        return tuple(
            SampleRequest(
                sampling=self.spec.sampling,
                choice=choice,
                index=len(self.emitted),
                prompt_ids=self.spec.prompt_ids if history else (),
                emitted_ids=tuple(self.emitted) if history else (),
            )
            for choice in self.choices
        )

    @property
    def tokens_left(self) -> int:
        """The most that it may still yield."""
        return self.spec.sampling.max_tokens - len(self.emitted)

    def joined_event(self, now_s: float) -> Lifetime:
        """It is in a step for the first time."""
        if len(self.emitted) > len(self.spec.emitted_ids):
            return Lifetime(key=self.key, at_s=now_s, name="decode_joined")
        return Lifetime(
            key=self.key,
            at_s=now_s,
            name="prefill_started",
            tokens=self.cached,
            source=self.origin,
        )

    def tokens_event(self, choice: int, drawn: tuple[Sampled, ...], now_s: float) -> Tokens:
        """Of one step or of several, the last of which may end it. The emitted ones are as before
        the first."""
        last = drawn[-1]
        reason = finish_reason(
            self.spec.sampling, token_id=last.token_id, emitted=len(self.emitted) + len(drawn)
        )
        return Tokens(
            key=self.key,
            at_s=now_s,
            choice=choice,
            first_index=len(self.emitted),
            token_ids=tuple([one.token_id for one in drawn]),
            logprobs=tuple([one.logprobs for one in drawn if one.logprobs is not None]),
            finish_reason=reason,
            stop_token_id=last.token_id if reason is FinishReason.STOP else None,
            stood_back_s=0.0 if reason is None else self.stood_back_s,
        )
