"""transformers' own greedy `generate` (eager attention): what the engine must equal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.model.interface import NAME
from engine.model.model import Model

TIE = 1e-5
"""The reference's two best logits lie within this share of the range: either token is right."""


@dataclass(frozen=True, slots=True)
class Reference:
    prompt: list[int]
    tokens: list[int]
    logits: torch.Tensor  # [tokens, vocab]


def generate_reference(model: Model, prompt: Sequence[int], *, tokens: int) -> Reference:
    module = model.module
    module.set_attn_implementation("eager")
    try:
        ids = torch.tensor([list(prompt)], device=model.device)
        found = module.generate(
            ids,
            attention_mask=torch.ones_like(ids),  # else ids equal to the padding are not seen
            max_new_tokens=tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
    finally:
        module.set_attn_implementation(NAME)
    emitted = found.sequences[0, len(prompt) :].tolist()
    return Reference(list(prompt), emitted, torch.cat(found.logits).float())


def assert_same_tokens(reference: Reference, tokens: Sequence[int]) -> None:
    """Equal up to the first tie of the reference, which is printed."""
    for index, (expected, got) in enumerate(zip(reference.tokens, tokens, strict=True)):
        if expected == got:
            continue
        assert _is_tie(reference.logits[index]), (
            f"prompt of {len(reference.prompt)}: token {index} is {got}, not {expected}"
        )
        print(f"tie: prompt of {len(reference.prompt)}, token {index}: {got} for {expected}")
        return


def assert_close_logits(
    reference: Reference, logits: Sequence[torch.Tensor], *, within: float = 1e-4
) -> None:
    """Teacher-forced logits, one `[vocab]` for each of the reference's tokens."""
    own = torch.stack(list(logits)).to(reference.logits.device)
    worst = float((own - reference.logits).abs().max())
    assert worst <= within, f"prompt of {len(reference.prompt)}: logits differ by {worst:.2g}"
    for index, (expected, row) in enumerate(zip(reference.tokens, own, strict=True)):
        same = int(row.argmax()) == expected
        assert same or _is_tie(reference.logits[index]), f"token {index} differs"


def _is_tie(logits: torch.Tensor) -> bool:
    best, second = logits.topk(2).values.tolist()
    return best - second <= TIE * float(logits.max() - logits.min())
