"""What clients will ask, and when: Poisson arrivals, many lengths. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """Lengths are uniform between the two, in tokens. `own_ends`: the model ends where it will,
    else each output is as long as it may be."""

    prompt_tokens: tuple[int, int] = (1024, 1792)
    output_tokens: tuple[int, int] = (32, 192)
    own_ends: bool = False

    @property
    def text(self) -> str:
        ends = "the model's own ends within" if self.own_ends else "exactly"
        return (
            f"{self.prompt_tokens[0]} to {self.prompt_tokens[1]} tokens in, {ends} "
            f"{self.output_tokens[0]} to {self.output_tokens[1]} out"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Offered:
    """`at_s` counts from the start of the load; `tier` empty: it names none. Objectives are its
    own."""

    at_s: float
    prompt_ids: tuple[int, ...]
    max_tokens: int
    ignore_eos: bool
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
    return Offered(
        at_s=at_s,
        prompt_ids=(mark, *corpus[start : start + tokens - 1]),
        max_tokens=rng.randint(*mix.output_tokens),
        ignore_eos=not mix.own_ends,
    )
