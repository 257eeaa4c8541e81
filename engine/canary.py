"""Sketches of logits, and how far apart two workers' sketches of one position may be.

The bound is measured when a worker starts: the same tokens in one chunk, and one by one as
transformers has the model. There all KV is computed in two shapes and two orders, in a canary only
the last position's, so the noise of the format stays below it; wrong KV is far above. Where KV may
travel encoded, the calibration's KV is encoded and decoded too, and the last position run over
that.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from engine.families import has_experts
from engine.runner import Engine
from engine.step import SampleRequest, SequenceSlice, StepBatch
from kvpool.canary import LogitSketch
from kvpool.codec import Codec
from kvpool.layout import BlockId, Tables
from kvpool.memory.sections import gather_write, scatter_write
from kvpool.piece import cut_span
from kvpool.write import Side, TokenSpan
from kvrelay.types import RequestKey, Sampling

_LENGTHS = tuple(range(1, 33))
"""Tokens of the sequences that the bound is measured with."""
_SAFETY = 4.0
"""A run meets other tokens, longer contexts and far more positions than these."""
_SAFETY_MIXED = 6.0
"""Between workers of two dtypes: their weights are rounded differently, too, which no run shows."""
_SAFETY_ALIKE = 2.5
"""Between workers of one dtype that send KV as it is: the distance measured is already that of two
orders of summation, of which such workers mostly have one."""
_ROUNDINGS = 8.0
"""The bound is at least so many relative roundings: few positions may agree by chance."""
_NEGLIGIBLE = 1e-3
"""Nor is it smaller than what matters to no token; one wrong block moves logits by 0.1 and more."""


def canary_bound(
    engine: Engine, codecs: Iterable[Codec] = (), *, mixed_precision: bool = False
) -> float | None:
    """The largest distance of two sketches of right KV, in spreads of the logits, whichever of
    `codecs` it has come by; None where none can be given: in 16 bits, or with KV that has lost
    something, a mixture of experts takes another one at a near tie.

    Overwrites the first blocks of the engine's memory: only before it serves.
    """
    dtype, lossy = engine.model.dtype, [codec for codec in codecs if codec is not Codec.NONE]
    exact = dtype == torch.float32 and not lossy and not mixed_precision
    if has_experts(engine.model.config) and not exact:
        return None
    plain = (_SAFETY_MIXED if mixed_precision else _SAFETY_ALIKE) * _worst(engine)
    encoded = [_SAFETY * _worst_encoded(engine, codec) for codec in lossy]
    return max(plain, *encoded, _ROUNDINGS * torch.finfo(dtype).eps, _NEGLIGIBLE)


def _otherwise(engine: Engine, slices: Sequence[SequenceSlice]) -> list[LogitSketch]:
    """As transformers has the model: a peer may round in that order."""
    model = engine.model
    engine.model = replace(model, flat=None)
    try:
        return _run(engine, slices)
    finally:
        engine.model = model


def _worst(engine: Engine) -> float:
    """The largest distance seen."""
    sequences = _sequences(engine)
    in_one = _run(engine, [one.piece(0, len(one.token_ids)) for one in sequences])
    worst = 0.0
    for start in range(len(sequences[-1].token_ids)):
        left = [i for i, one in enumerate(sequences) if len(one.token_ids) > start]
        found = _otherwise(
            engine, [sequences[i].piece(start, 1, in_one[i].token_ids) for i in left]
        )
        for i, sketch in zip(left, found, strict=True):
            if len(sequences[i].token_ids) == start + 1:
                worst = max(worst, in_one[i].distance(sketch))
    return worst


def _worst_encoded(engine: Engine, codec: Codec) -> float:
    """The largest distance after all positions but the last have travelled."""
    sequences = [one for one in _sequences(engine) if len(one.token_ids) > 1]
    before = _run(engine, [one.piece(0, len(one.token_ids)) for one in sequences])
    for one in sequences:
        _travel(engine, one, codec)
    last = [
        one.piece(len(one.token_ids) - 1, 1, sketch.token_ids)
        for one, sketch in zip(sequences, before, strict=True)
    ]
    after = _run(engine, last)
    pairs = zip(before, after, strict=True)
    return max((sketch.distance(found) for sketch, found in pairs), default=0.0)


def _travel(engine: Engine, sequence: _Sequence, codec: Codec) -> None:
    """Its KV is encoded and decoded where it lies."""
    layout, end = engine.layout, len(sequence.token_ids) - 1
    side = Side(tables=sequence.tables, block_size=layout.block_size)
    for write in cut_span(layout, TokenSpan(start=0, tokens=end, next_position=end), 2**62):
        encoded = write.encoded(codec)
        slab = torch.empty(encoded.nbytes, dtype=torch.uint8, device=engine.memory.device)
        gather_write(engine.memory, side, encoded, slab)
        scatter_write(engine.memory, side, encoded, slab)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sequence:
    token_ids: tuple[int, ...]
    blocks: tuple[BlockId, ...]
    groups: int

    @property
    def tables(self) -> Tables:
        return (self.blocks,) * self.groups

    def piece(self, start: int, tokens: int, sketch_ids: tuple[int, ...] = ()) -> SequenceSlice:
        sampling = Sampling(max_tokens=1, seed=0)
        request = SampleRequest(sampling=sampling, choice=0, index=0, prompt_ids=(), emitted_ids=())
        return SequenceSlice(
            key=RequestKey("canary", 0),
            choice=0,
            token_ids=self.token_ids[start : start + tokens],
            start=start,
            tables=self.tables,
            samples=(request,),
            prompt_tokens=len(self.token_ids),
            sketch_ids=sketch_ids,
        )


def _sequences(engine: Engine) -> list[_Sequence]:
    """The shortest first, as many and as long as the memory holds, each in blocks of its own."""
    layout, blocks = engine.layout, engine.memory.blocks
    count = min(len(_LENGTHS), blocks)
    each = blocks // count
    longest = min(each * layout.block_size, engine.facts.max_model_len)
    return [
        _Sequence(
            token_ids=_token_ids(number, min(length, longest), engine.facts.vocab_size),
            blocks=tuple(BlockId(number * each + i) for i in range(each)),
            groups=len(layout.groups),
        )
        for number, length in enumerate(_LENGTHS[-count:])
    ]


def _token_ids(number: int, tokens: int, vocab_size: int) -> tuple[int, ...]:
    """Well spread over the vocabulary."""
    return tuple((7919 * (i + 101 * number) + 13) % vocab_size for i in range(tokens))


def _run(engine: Engine, slices: Sequence[SequenceSlice]) -> list[LogitSketch]:
    sketches = engine.run(StepBatch(slices=tuple(slices))).sketches
    return [sketches[i] for i in range(len(slices))]
