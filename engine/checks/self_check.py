"""At load, compares kvrelay's attention with the model's own eager forward.

The model that serves is compared on a few tokens, in its own dtype and with its own kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from engine.checks.summation_noise import noise_bound, row_differences, typical
from engine.core.step import SampleRequest, SequenceSlice, StepBatch
from engine.model.families import has_experts, refusal
from engine.model.kv_layout import LayerShape
from engine.model.model import Model
from kvpool.core.layout.layout import BlockId, KvLayout
from kvpool.memory.kv_memory import KvMemory
from kvrelay.types import RequestKey, Sampling

_FORMAT_LOSS = {"float8_e4m3fn": 0.25}
"""The largest loss of a KV dtype, as a share of the range of the logits."""
_PRODUCT_LOSS = 0.25
"""That of products in FP8."""

Part = tuple[int, int, int]
"""Sequence, first position, end."""
Logits = Callable[[KvMemory, StepBatch], torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """Sequences of equal length and the steps that run them: split prompts, ragged batches, chunks
    mixed with decodes."""

    sequences: int
    tokens: int
    steps: tuple[tuple[Part, ...], ...]


_SHORT = Trial(
    sequences=3,
    tokens=24,
    steps=(
        ((0, 0, 7), (1, 0, 23)),
        ((0, 7, 20), (1, 23, 24)),
        ((0, 20, 21), (2, 0, 1)),
        ((2, 1, 24), (0, 21, 24)),
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """`logits` `[sequences, tokens, vocab]` of the model's own forward. `bound`: the allowed
    distance of right logits, as a share of their range."""

    logits: torch.Tensor
    bound: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """The layers' `shapes` are those of the whole model, `own` those of this rank, which has only
    some layers, or some of their heads. The `reference` logits are of the model's own attention."""

    model: Model
    shapes: dict[int, LayerShape]
    own: dict[int, LayerShape]
    reference: Reference

    @property
    def needs_masks(self) -> bool:
        return not all(shape.is_plain for shape in self.shapes.values())


def eager_reference(model: Model) -> Reference:
    """The reference of `check_against_eager`. Ranks that share a model call this at the same
    time."""
    ids = short_token_ids(model)
    logits = model.eager_logits(ids).float()
    bounds = noise_bound(lambda: model.eager_logits(ids[:1])[0], logits[0])
    return Reference(logits=logits, bound=_typical(model, bounds))


def short_token_ids(model: Model) -> torch.Tensor:
    """The sequences of the reference, `[sequences, tokens]`."""
    return trial_token_ids(model, _SHORT)


def check_against_eager(
    model: Model, layout: KvLayout, reference: Reference, logits: Logits
) -> None:
    """`logits` runs a step in the given memory. Raises ModelError that names the family."""
    differences = trial_differences(model, layout, _SHORT, reference.logits, logits)
    allowed = max(reference.bound, _FORMAT_LOSS.get(layout.dtype, 0.0))
    allowed = max(allowed, _PRODUCT_LOSS if model.in_fp8 else 0.0)
    check_difference(model, "self", _typical(model, differences), allowed)


def check_difference(model: Model, check: str, found: float, allowed: float) -> None:
    """Raises ModelError that names the family."""
    if not found <= allowed:
        raise refusal(
            model.config.model_type,
            check,
            f"paged logits differ from its own forward by {found:.2g} of their range "
            f"(allowed {allowed:.2g})",
        )


def trial_differences(
    model: Model, layout: KvLayout, trial: Trial, reference: torch.Tensor, logits: Logits
) -> torch.Tensor:
    """For the last token of each part, as shares of the range of the step's logits."""
    token_ids = trial_token_ids(model, trial)
    memory = KvMemory(layout, trial.sequences * layout.blocks_for(trial.tokens), model.device)
    found = []
    for step in trial.steps:
        pieces = [_piece(layout, trial, token_ids, *part) for part in step]
        own = logits(memory, StepBatch(slices=tuple(pieces)))
        expected = torch.stack([reference[sequence, end - 1] for sequence, _, end in step])
        found.append(row_differences(own, expected))
    return torch.cat(found)


def _typical(model: Model, differences: torch.Tensor) -> float:
    return typical(differences, may_choose=has_experts(model.config), dtype=model.dtype)


def trial_token_ids(model: Model, trial: Trial) -> torch.Tensor:
    """Well spread ids, `[sequences, tokens]`."""
    count = trial.sequences * trial.tokens
    ids = (torch.arange(count, device=model.device) * 7919 + 13) % model.config.vocab_size
    return ids.view(trial.sequences, trial.tokens)


def _piece(
    layout: KvLayout, trial: Trial, token_ids: torch.Tensor, sequence: int, start: int, end: int
) -> SequenceSlice:
    """Blocks are interleaved among the sequences, so that none are neighbours."""
    blocks = layout.blocks_for(end)
    table = tuple(BlockId(i * trial.sequences + sequence) for i in range(blocks))
    sampling = Sampling(max_tokens=1, seed=0)
    request = SampleRequest(sampling=sampling, choice=0, prompt_ids=(), emitted_ids=())
    return SequenceSlice(
        key=RequestKey("self-check", 0),
        choice=0,
        token_ids=tuple(token_ids[sequence, start:end].tolist()),
        start=start,
        tables=(table,) * len(layout.groups),
        samples=(request,),
        prompt_tokens=trial.tokens,
    )
