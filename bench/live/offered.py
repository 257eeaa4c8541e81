"""What clients will ask, and when: Poisson arrivals, many lengths. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

LIMIT = 256
"""max_tokens of a request whose answer ends by itself: what the bundled model's context of 2,048
tokens leaves behind the longest prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """Lengths are uniform between the two, in tokens, and each output is as long as it may be. With
    `questions` (turns of a chat, as token ids) each prompt ends with one, and the model ends its
    answer itself: `LIMIT` tells the server nothing of its length."""

    prompt_tokens: tuple[int, int] = (1024, 1792)
    output_tokens: tuple[int, int] = (32, 192)
    questions: tuple[tuple[int, ...], ...] = ()

    @property
    def own_ends(self) -> bool:
        return bool(self.questions)

    @property
    def text(self) -> str:
        exactly = f"exactly {self.output_tokens[0]} to {self.output_tokens[1]}"
        out = f"answers that end by themselves, at most {LIMIT}," if self.own_ends else exactly
        return f"{self.prompt_tokens[0]} to {self.prompt_tokens[1]} tokens in, {out} out"


@dataclass(frozen=True, slots=True, kw_only=True)
class Offered:
    """`at_s` counts from the start of the load; `tier` empty: it names none. Objectives are its
    own. With `ignore_eos` decoding is greedy, else drawn from `seed`."""

    at_s: float
    prompt_ids: tuple[int, ...]
    max_tokens: int
    ignore_eos: bool
    seed: int = 0
    tier: str = ""
    ttft_s: float | None = None
    tpot_s: float | None = None


def poisson(
    mix: Mix, corpus: Sequence[int], *, rate_per_s: float, seconds: float, seed: int
) -> list[Offered]:
    """Each prompt is a piece of `corpus` behind a token of chance, so that no two share a block."""
    rng = Random(seed)
    offered: list[Offered] = []
    at_s = rng.expovariate(rate_per_s)
    while at_s < seconds:
        offered.append(one(mix, corpus, rng, at_s))
        at_s += rng.expovariate(rate_per_s)
    return offered


def one(mix: Mix, corpus: Sequence[int], rng: Random, at_s: float = 0.0) -> Offered:
    tokens = rng.randint(*mix.prompt_tokens)
    start = rng.randrange(len(corpus) - tokens)
    mark = rng.choice(corpus)
    question = rng.choice(mix.questions) if mix.own_ends else ()
    return Offered(
        at_s=at_s,
        prompt_ids=(mark, *corpus[start : start + tokens - 1 - len(question)], *question),
        max_tokens=LIMIT if mix.own_ends else rng.randint(*mix.output_tokens),
        ignore_eos=not mix.own_ends,
        seed=rng.getrandbits(31),
    )
