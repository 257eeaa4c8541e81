"""Requests of clients that talk: prompts begin alike, and next turns hold the answers before."""

from __future__ import annotations

import random

from kvrelay.types import RequestKey, RequestSpec, Sampling
from tests.sim.contents import TENANTS
from tests.sim.model import VOCABULARY, expected

LONGEST = 44


def make_talks(rng: random.Random, requests: int, longest_answer: int = 12) -> list[RequestSpec]:
    """Requests that begin alike, and next turns of earlier ones with the answer in them."""
    systems = [draw_tokens(rng, 6, 20) for _ in range(4)]
    specs: list[RequestSpec] = []
    for number in range(requests):
        prompt, tenant = rng.choice(systems), rng.choice([*TENANTS, "", ""])
        if specs and rng.random() < 0.5:
            before = rng.choice(specs)
            prompt = (*before.prompt_ids, *expected(before, 0)[0])
            tenant = before.tenant
        prompt = (*prompt, *draw_tokens(rng, 1, 8))
        if len(prompt) > LONGEST:
            prompt = (*rng.choice(systems), *draw_tokens(rng, 1, 8))
        most = rng.randint(1, longest_answer)
        sampling = Sampling(max_tokens=most, seed=number, n=rng.choice([1, 1, 1, 2]))
        key = RequestKey(f"r{number}", 0)
        spec = RequestSpec(key=key, prompt_ids=prompt, sampling=sampling, tenant=tenant)
        specs.append(spec)
    return specs


def draw_tokens(rng: random.Random, least: int, most: int) -> tuple[int, ...]:
    return tuple(rng.randrange(VOCABULARY) for _ in range(rng.randint(least, most)))
