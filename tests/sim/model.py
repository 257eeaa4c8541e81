"""A model without a device: the next token is a hash of all before it, and KV is that history.

So a request's right tokens are known whatever the schedule, and wrong KV is noticed at once.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from engine.step import Sampled, SequenceSlice
from kvpool.layout import KvLayout, LayerGroup, Plane, Tables
from kvpool.tables import CopyPairs
from kvrelay.types import FinishReason, RequestKey, RequestSpec, Sampling

BLOCK = 4
SLAB_TOKENS = 8
VOCABULARY = 50

Content = list[list[tuple[int, ...]]]
"""# group |-> content of each token"""

PLANES = (Plane(name="k", heads=1, dim=1), Plane(name="v", heads=1, dim=1))
LAYOUT = KvLayout(
    groups=(
        LayerGroup(layers=(0, 2), planes=PLANES),
        LayerGroup(layers=(1,), planes=PLANES, window=8),
    ),
    dtype="float32",
    block_size=BLOCK,
)


def right_token(prompt: tuple[int, ...], choice: int, emitted: tuple[int, ...]) -> int:
    """The hash model: what follows, for one choice."""
    state = 17 + 31 * choice
    for token in (*prompt, *emitted):
        state = (state * 6364136223846793005 + token + 1442695040888963407) % 2**64
    return (state >> 33) % VOCABULARY


def make_spec(rng: random.Random, number: int, longest: int = 40) -> RequestSpec:
    prompt = tuple(rng.randrange(VOCABULARY) for _ in range(rng.randint(1, longest)))
    sampling = Sampling(
        max_tokens=rng.randint(1, 12),
        seed=number,
        n=rng.choice([1, 1, 1, 2, 3]),
        stop_token_ids=(rng.randrange(VOCABULARY),),
    )
    return RequestSpec(key=RequestKey(f"r{number}", 0), prompt_ids=prompt, sampling=sampling)


def expected(spec: RequestSpec, choice: int) -> tuple[list[int], FinishReason]:
    tokens: list[int] = []
    while True:
        token = right_token(spec.prompt_ids, choice, tuple(tokens))
        tokens.append(token)
        if token in spec.sampling.stop_token_ids:
            return tokens, FinishReason.STOP
        if len(tokens) == spec.sampling.max_tokens:
            return tokens, FinishReason.LENGTH


@dataclass(slots=True)
class Memory:
    """What a real pool's slots would hold: # group, slot |-> (sequence so far) at that position.

    A slot's KV depends on all tokens up to it, so the tuple of those tokens stands for it.
    """

    slots: dict[tuple[int, int], tuple[int, ...]] = field(default_factory=dict)

    def run(self, piece: SequenceSlice) -> tuple[int, ...]:
        """Write the slice's KV, check that all earlier KV is right; the whole sequence."""
        prefix = self.read(piece, piece.start - 1) if piece.start else ()
        for i, token in enumerate(piece.token_ids):
            prefix = (*prefix, token)
            for group, table in enumerate(piece.tables):
                self.slots[group, slot(table, piece.start + i)] = prefix
        for position in range(len(prefix)):
            assert self.read(piece, position) == prefix[: position + 1], "KV was overwritten"
        return prefix

    def copy(self, copies: tuple[CopyPairs, ...]) -> None:
        for pairs in copies:
            for group, group_pairs in enumerate(pairs):
                for source, target in group_pairs:
                    for i in range(BLOCK):
                        if (group, source * BLOCK + i) in self.slots:
                            kept = self.slots[group, source * BLOCK + i]
                            self.slots[group, target * BLOCK + i] = kept

    def read(self, piece: SequenceSlice, position: int) -> tuple[int, ...]:
        found = {
            self.slots[group, slot(table, position)] for group, table in enumerate(piece.tables)
        }
        assert len(found) == 1, "the groups disagree"
        return found.pop()

    def sample(self, piece: SequenceSlice) -> tuple[Sampled, ...]:
        whole = self.run(piece)
        samples = []
        for wanted in piece.samples:
            prompt_end = len(whole) - wanted.index
            token = right_token(whole[:prompt_end], wanted.choice, whole[prompt_end:])
            samples.append(Sampled(token_id=token))
        return tuple(samples)

    def take(self, tables: Tables, start: int, tokens: int) -> Content:
        span = range(start, start + tokens)
        return [
            [self.slots[group, slot(table, at)] for at in span]
            for group, table in enumerate(tables)
        ]

    def put(self, tables: Tables, start: int, content: Content) -> None:
        for group, table in enumerate(tables):
            for at, tokens in enumerate(content[group], start):
                self.slots[group, slot(table, at)] = tokens


def slot(table: tuple[int, ...], position: int) -> int:
    return table[position // BLOCK] * BLOCK + position % BLOCK
