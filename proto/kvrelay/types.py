"""Values that every part agrees on. Pure.

The token ids that an attempt begins with: prompt, and what earlier ones emitted. Pure.

Values that are made many times in each step. Pure.

How long a worker's steps take, as the coefficients that it tells. Pure.

`engine.core.step_times` computes with them; `engine.time_profile` measures them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise
from math import inf
from typing import NamedTuple, NewType, TypeVar, dataclass_transform, overload


@dataclass(frozen=True, slots=True)
class Context(Sequence[int]):
    """Both as one, neither copied."""

    prompt: Sequence[int]
    emitted: Sequence[int]

    def __len__(self) -> int:
        return len(self.prompt) + len(self.emitted)

    @overload
    def __getitem__(self, at: int) -> int: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[int]: ...
    def __getitem__(self, at: int | slice) -> int | Sequence[int]:
        border = len(self.prompt)
        if isinstance(at, slice):
            return self._span(range(len(self))[at])
        position = range(len(self))[at]
        return self.prompt[position] if position < border else self.emitted[position - border]

    def _span(self, span: range) -> Sequence[int]:
        assert span.step == 1, span
        border = len(self.prompt)
        if span.stop <= border:
            return self.prompt[span.start : span.stop]
        emitted = self.emitted[max(0, span.start - border) : span.stop - border]
        return (*self.prompt[span.start :], *emitted) if span.start < border else emitted


T = TypeVar("T")


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(field,))
def value(cls: type[T]) -> type[T]:
    """A frozen dataclass to the type checker, with slots and keywords only. Nothing guards it at
    run time: making a frozen one takes twice as long."""
    return dataclass(slots=True, kw_only=True, unsafe_hash=True)(cls)


Incarnation = NewType("Incarnation", str)
"""Random id of one process life: a restarted worker is a new peer."""

WIRE_VERSION = 27
"""1: first. 2: pool nodes have addresses for workers of other hosts. 3: requests are resumed from
what they have emitted. 4: reservations without a source. 5: pieces of a handoff are cut at
multiples of 16 tokens. 6: a worker's KV may be shared out among ranks. 7: the pieces of a span are
announced and awaited together, and read ones told together. 8: tokens are drawn by Gumbel-max, so
both ends of a handoff must draw by it. 9: pool nodes no longer pin prefixes. 10: a commit carries a
digest of the KV. 11: pool nodes tell routers of their blocks themselves. 12: every field has the
name that it has in its dataclass, and enums travel by name. 13: routers are told of blocks in
strands. 14: a pool node confirms each store by a reply of its own. 15: decode workers are told of
prefix sources. 16: and of what prefill workers have stored so far. 17: workers are told of silent
ones. 18: leases are renewed for what moves, and peers hear that a link has stalled. 19: workers
have a witness of their end, and requests may run alone. 20: the output of a request may have to
match a grammar. 21: workers tell their role, and a request leaves a worker in one message.
22: all choices of a request are moved together. 23: workers tell how long each phase of their start
took. 24: workers tell which prompts they take. 25: a router's state is watched, not asked for. 26:
workers name their pool. 27: and tell what their memory is for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPart:
    """What a part of a worker's memory is for, and its bytes on all ranks together."""

    part: str
    nbytes: int


def size_text(nbytes: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if nbytes < 1024:
            return f"{nbytes:.4g} {unit}"
        nbytes /= 1024
    return f"{nbytes:.4g} GiB"


class Role(StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"


@value
class PromptRule:
    """Which prompts a worker computes: of `min_prompt_tokens` to `max_prompt_tokens` (None: of any
    length), in one of these QoS `tiers` (none named: in any)."""

    min_prompt_tokens: int | None = None
    max_prompt_tokens: int | None = None
    tiers: tuple[str, ...] = ()

    def admits(self, prompt_tokens: int, tier: str) -> bool:
        return (
            (self.min_prompt_tokens is None or prompt_tokens >= self.min_prompt_tokens)
            and (self.max_prompt_tokens is None or prompt_tokens <= self.max_prompt_tokens)
            and (not self.tiers or tier in self.tiers)
        )

    def __str__(self) -> str:
        """Such as "5000 tokens or more of tier batch"."""
        least, most = self.min_prompt_tokens, self.max_prompt_tokens
        length = "any length" if least is None else f"{least} tokens or more"
        if most is not None:
            length = f"{least or 1} to {most} tokens"
        return length + (f" of tier {' or '.join(self.tiers)}" if self.tiers else "")


TAKES_ALL = PromptRule()


class Tier(StrEnum):
    """Of the memory that cached blocks lie in."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"


class PrefixOrigin(StrEnum):
    """Where the KV of a sequence's first tokens came from; `device` is the worker's own cache,
    `remote` another host's pool node."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"
    PEER = "peer"
    REMOTE = "remote"
    COMPUTED = "computed"


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


class RequestKey(NamedTuple):
    """One try of one request. What an old attempt says is dropped. A tuple, for it is hashed and
    compared wherever a request is looked up."""

    request_id: str
    attempt: int

    def __str__(self) -> str:
        return f"{self.request_id}#{self.attempt}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Resolved sampling parameters of one request, validated at the router.

    `temperature` 0 is greedy. `top_k` 0 and `top_p` 1 keep everything. `stop_token_ids` already
    holds the model's end-of-sequence ids unless the request ignores them. `logprobs` is the
    number of top alternatives reported beside the chosen token, None for no logprobs at all;
    `prompt_logprobs` is the same for the tokens of the prompt. With `max_tokens` 0 only the prompt
    is computed. `grammar`, unless empty, is what the output must match, as llguidance writes it.
    """

    max_tokens: int
    seed: int
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    n: int = 1
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    grammar: str = ""


@value
class Objectives:
    """What a request is to be served within; None: any time will do.

    `ttft_s` to its first token and `deadline_s` to its last, both from when it was received;
    `tpot_s` is the mean time per token after the first.
    """

    ttft_s: float | None = None
    tpot_s: float | None = None
    deadline_s: float | None = None

    def or_else(self, others: Objectives) -> Objectives:
        """Each of these, or where it is None that of `others`."""
        if others is NO_OBJECTIVES:
            return self
        return Objectives(
            ttft_s=others.ttft_s if self.ttft_s is None else self.ttft_s,
            tpot_s=others.tpot_s if self.tpot_s is None else self.tpot_s,
            deadline_s=others.deadline_s if self.deadline_s is None else self.deadline_s,
        )


NO_OBJECTIVES = Objectives()


@value
class RequestSpec:
    """What a worker is told about a request: token ids in, sampling parameters, nothing of text.

    Requests of different `tenant`s share no cached KV. `qos_tier` names the tier that it belongs
    to; while it decodes, the mean time per token is to stay within `tpot_s`.

    `emitted_ids` of earlier attempts count as prompt: its choices part behind them. Then each goes
    on behind what it has emitted since, in `resumed`: empty, or an entry for each choice.
    `finished_choices` ended in an earlier attempt.

    One that may have killed a worker has no other request in its steps, from its prompt on until
    each choice has `alone_tokens` more tokens.
    """

    key: RequestKey
    prompt_ids: Sequence[int]
    sampling: Sampling
    tenant: str = ""
    qos_tier: str = ""
    tpot_s: float | None = None
    emitted_ids: tuple[int, ...] = ()
    resumed: tuple[tuple[int, ...], ...] = ()
    finished_choices: tuple[int, ...] = ()
    alone_tokens: int = 0

    def resumed_by(self, choice: int) -> tuple[int, ...]:
        """What the choice has emitted since the choices parted."""
        return self.resumed[choice] if self.resumed else ()

    @property
    def context_ids(self) -> Sequence[int]:
        """What its next token is computed from."""
        return Context(self.prompt_ids, self.emitted_ids) if self.emitted_ids else self.prompt_ids

    @property
    def context_tokens(self) -> int:
        return len(self.prompt_ids) + len(self.emitted_ids)

    @property
    def is_scored(self) -> bool:
        """Whether the log probabilities of its prompt are told."""
        return self.sampling.prompt_logprobs is not None


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural logarithms: of the chosen token, and of the most likely ones, best first.

    Taken from the distribution before temperature and truncation, after penalties, bias and the
    mask of a grammar.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class PromptLogprob:
    """Natural logarithms: of one token of the prompt, given those before it, and of the most likely
    ones, best first. `rank` counts from 1, the most likely. Taken from the model's own
    distribution: no sampling parameter changes it."""

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


SCALARS = (
    "prefill_overhead_s",
    "prefill_token_s",
    "prefill_pair_s",
    "prefill_sequence_s",
    "decode_kv_token_s",
    "error",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCoefficients:
    """Of prefill: each step, each new token, each pair of a new token and one that it sees, each
    sequence. Of decode: a step without KV at some numbers of sequences (linear between these), and
    each token of context. `error` is the median relative error in steps that were not fitted.

    Raises ValueError, naming the field, for what no step can take.
    """

    prefill_overhead_s: float = 0.0
    prefill_token_s: float = 0.0
    prefill_pair_s: float = 0.0
    prefill_sequence_s: float = 0.0
    decode_knots: tuple[tuple[int, float], ...] = ()
    decode_kv_token_s: float = 0.0
    error: float = 0.0

    def __post_init__(self) -> None:
        for name in SCALARS:
            if not 0 <= getattr(self, name) < inf:
                raise ValueError(f"{name}: a number that is not negative")
        if not all(sequences > 0 and 0 <= s < inf for sequences, s in self.decode_knots):
            raise ValueError("decode_knots: pairs of at least 1 sequence and seconds")
        if any(few[0] >= more[0] for few, more in pairwise(self.decode_knots)):
            raise ValueError("decode_knots: ascending numbers of sequences")
