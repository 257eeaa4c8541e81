"""At load: kvrelay's attention must agree with the model's own eager forward."""

from __future__ import annotations

from collections.abc import Callable

import torch

from engine.model import Model
from engine.step import SampleRequest, SequenceSlice, StepBatch
from kvpool.layout import BlockId, KvLayout
from kvpool.memory.kv_memory import KvMemory
from kvrelay.errors import ModelError
from kvrelay.types import RequestKey, Sampling

_TOKENS = 24
_TOLERANCE = {"float32": 1e-3, "float16": 0.05, "bfloat16": 0.15, "float8_e4m3fn": 0.25}
"""Largest difference allowed, as a share of the range of the reference's logits; by KV dtype."""

# Step |-> (sequence, first position, end): split prompts, ragged, chunks mixed with decodes.
_STEPS = (
    ((0, 0, 7), (1, 0, 23)),
    ((0, 7, 20), (1, 23, 24)),
    ((0, 20, 21), (2, 0, 1)),
    ((2, 1, 24), (0, 21, 24)),
)

Logits = Callable[[KvMemory, StepBatch], torch.Tensor]


def eager_reference(model: Model) -> torch.Tensor:
    """What `check_against_eager` compares with, `[sequences, tokens, vocab]`; of a whole model."""
    return model.eager_logits(_token_ids(model)).float()


def check_against_eager(
    model: Model, layout: KvLayout, reference: torch.Tensor, logits: Logits
) -> None:
    """`logits` runs a step in the given memory. Raises ModelError, naming the family."""
    token_ids = _token_ids(model)
    blocks = layout.blocks_for(_TOKENS)
    memory = KvMemory(layout, 3 * blocks, model.device)
    worst = 0.0
    for step in _STEPS:
        pieces = [_piece(layout, token_ids, blocks, *part) for part in step]
        own = logits(memory, StepBatch(slices=tuple(pieces)))
        expected = torch.stack([reference[sequence, end - 1] for sequence, _, end in step])
        worst = max(worst, _difference(own, expected))
    allowed = _TOLERANCE[layout.dtype]
    if not worst <= allowed:
        raise ModelError(
            f"the {model.config.model_type} family can't be served: paged logits differ from its "
            f"own forward by {worst:.2g} of their range (allowed {allowed:g})"
        )


def _token_ids(model: Model) -> torch.Tensor:
    """Three sequences of well spread ids, `[3, tokens]`."""
    ids = (torch.arange(3 * _TOKENS, device=model.device) * 7919 + 13) % model.config.vocab_size
    return ids.view(3, _TOKENS)


def _piece(
    layout: KvLayout, token_ids: torch.Tensor, blocks: int, sequence: int, start: int, end: int
) -> SequenceSlice:
    """Blocks are interleaved among the sequences, so that none are neighbours."""
    table = tuple(BlockId(i * 3 + sequence) for i in range(layout.blocks_for(end)))
    assert len(table) <= blocks
    sampling = Sampling(max_tokens=1, seed=0)
    request = SampleRequest(sampling=sampling, choice=0, index=0, prompt_ids=(), emitted_ids=())
    return SequenceSlice(
        key=RequestKey("self-check", 0),
        choice=0,
        token_ids=tuple(token_ids[sequence, start:end].tolist()),
        start=start,
        tables=(table,) * len(layout.groups),
        samples=(request,),
        prompt_tokens=_TOKENS,
    )


def _difference(own: torch.Tensor, expected: torch.Tensor) -> float:
    spread = (expected.max() - expected.min()).clamp_min(1e-6)
    return float(((own - expected).abs().max() / spread).item())
