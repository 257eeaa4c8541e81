"""One step as a rank is told it: whole numbers in one buffer. Pure.

[slices, groups, is_long | of each slice: tokens, start, samples, blocks of each group |
all tokens | all blocks)
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from engine.step import SampleRequest, SequenceSlice
from kvpool.layout import BlockId
from kvrelay.types import RequestKey, Sampling

_NOBODY = RequestKey("", 0)
_SAMPLE = SampleRequest(
    sampling=Sampling(max_tokens=1, seed=0), choice=0, index=0, prompt_ids=(), emitted_ids=()
)


def encode_step(slices: Sequence[SequenceSlice], is_long: bool) -> bytes:
    """What the forward pass needs: not what is sampled, nor for whom."""
    groups = len(slices[0].tables)
    facts = [[len(s.token_ids), s.start, bool(s.samples), *map(len, s.tables)] for s in slices]
    numbers = [np.asarray([len(slices), groups, is_long]), np.asarray(facts).ravel()]
    numbers += [np.asarray(s.token_ids) for s in slices]
    numbers += [np.asarray(table) for s in slices for table in s.tables]
    return np.concatenate(numbers).astype(np.int32).tobytes()


def decode_step(payload: bytes) -> tuple[list[SequenceSlice], bool]:
    numbers = np.frombuffer(payload, dtype=np.int32)
    count, groups, is_long = (int(n) for n in numbers[:3])
    body = 3 + count * (3 + groups)
    facts = numbers[3:body].reshape(count, 3 + groups)
    tokens = _cut(numbers[body:], facts[:, 0])
    tables = _cut(numbers[body + int(facts[:, 0].sum()) :], facts[:, 3:].ravel())
    return [
        SequenceSlice(
            key=_NOBODY,
            choice=0,
            token_ids=tokens[i],
            start=int(facts[i, 1]),
            tables=tuple(
                tuple(BlockId(b) for b in table) for table in tables[i * groups : (i + 1) * groups]
            ),
            samples=(_SAMPLE,) if facts[i, 2] else (),
        )
        for i in range(count)
    ], bool(is_long)


def _cut(numbers: NDArray[np.int32], lengths: NDArray[np.int32]) -> list[tuple[int, ...]]:
    ends = np.cumsum(lengths)
    return [
        tuple(numbers[end - length : end].tolist())
        for end, length in zip(ends, lengths, strict=True)
    ]
