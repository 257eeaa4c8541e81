"""What clients ask: prompts and outputs of many lengths, whose tokens are known once. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from kvrelay.client.options import GenerateOptions

VOCABULARY = 3072
"""Of the bundled model; the first ids are special tokens."""
FIRST_ID = 16
TWO_CHOICES = 8
"""One in so many requests asks for two choices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Uniform between the two, in tokens."""

    prompt: tuple[int, int] = (64, 960)
    output: tuple[int, int] = (64, 448)

    def __str__(self) -> str:
        return f"{self.prompt[0]} to {self.prompt[1]} in, {self.output[0]} to {self.output[1]} out"


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """Its tokens are the same each time: greedy, or drawn from a seed."""

    prompt_ids: tuple[int, ...]
    output_tokens: int
    seed: int
    temperature: float
    choices: int

    def options(self) -> GenerateOptions:
        return {
            "max_tokens": self.output_tokens,
            "ignore_eos": True,
            "seed": self.seed,
            "temperature": self.temperature,
            "n": self.choices,
        }


Answer = tuple[tuple[tuple[int, ...], str], ...]
"""(token ids, text) of each choice."""


def draw_requests(count: int, lengths: Lengths, seed: int) -> list[Asked]:
    """Half of them are greedy."""
    rng = Random(seed)
    return [_drawn(number, lengths, rng) for number in range(count)]


def _drawn(number: int, lengths: Lengths, rng: Random) -> Asked:
    tokens = rng.randint(*lengths.prompt)
    choices = 2 if number % TWO_CHOICES == TWO_CHOICES - 1 else 1
    return Asked(
        prompt_ids=tuple(rng.randrange(FIRST_ID, VOCABULARY) for _ in range(tokens)),
        output_tokens=max(1, rng.randint(*lengths.output) // choices),
        seed=rng.randrange(2**31),
        temperature=0.8 * (number % 2),
        choices=choices,
    )


def unrepeatable(first: Sequence[Answer], second: Sequence[Answer]) -> set[int]:
    """Requests whose tokens differ between two runs without any fault."""
    return {i for i, (a, b) in enumerate(zip(first, second, strict=True)) if a != b}
