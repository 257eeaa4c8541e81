"""Changes to the logits before the choice: bias, penalties, minimum length. All sparse."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import torch

from engine.core.step import SampleRequest
from engine.device.streams import send


def apply_penalties(
    logits: torch.Tensor, requests: Sequence[SampleRequest], indices: Sequence[int]
) -> torch.Tensor:
    """`logits` fp32 `[requests, vocab]`, unchanged; a copy is returned if anything applies.

    Order: bias, repetition (Keskar et al., CTRL, §4.1; prompt and output ids), frequency and
    presence (output ids), then stop ids are masked while fewer than `min_tokens` are out. Where a
    grammar may allow nothing else, its mask decides that (`engine.sampling.grammars`).
    """
    if all(map(_is_plain, requests, indices)):
        return logits
    bias = _entries([dict(request.sampling.logit_bias) for request in requests])
    repetition = _entries(map(_repeated, requests))
    counted = _entries(map(_counted, requests))
    early = _entries(map(_too_early, requests, indices))
    logits = logits.clone()
    if bias:
        _add(logits, bias)
    if repetition:
        _rescale(logits, repetition)
    if counted:
        _add(logits, counted)
    if early:
        _add(logits, early)
    return logits


def _is_plain(request: SampleRequest, index: int) -> bool:
    """Nothing applies, as for nearly all requests in every step."""
    sampling = request.sampling
    return (
        sampling.repetition_penalty == 1.0
        and not sampling.frequency_penalty
        and not sampling.presence_penalty
        and (index >= sampling.min_tokens or bool(sampling.grammar))
        and not sampling.logit_bias
    )


_Entries = tuple[list[int], list[int], list[float]]
"""Sparse matrix: rows, token ids, values; each (row, id) once."""


def _entries(of_rows: Iterable[dict[int, float]]) -> _Entries | None:
    rows: list[int] = []
    ids: list[int] = []
    values: list[float] = []
    for row, found in enumerate(of_rows):
        rows += [row] * len(found)
        ids += found.keys()
        values += found.values()
    return (rows, ids, values) if rows else None


def _repeated(request: SampleRequest) -> dict[int, float]:
    penalty = request.sampling.repetition_penalty
    if penalty == 1.0:
        return {}
    return dict.fromkeys({*request.prompt_ids, *request.emitted_ids}, penalty)


def _counted(request: SampleRequest) -> dict[int, float]:
    frequency, presence = request.sampling.frequency_penalty, request.sampling.presence_penalty
    if not frequency and not presence:
        return {}
    counts = Counter(request.emitted_ids)
    return {token: -frequency * count - presence for token, count in counts.items()}


def _too_early(request: SampleRequest, index: int) -> dict[int, float]:
    if index >= request.sampling.min_tokens or request.sampling.grammar:
        return {}
    return dict.fromkeys(request.sampling.stop_token_ids, float("-inf"))


def _place(
    logits: torch.Tensor, entries: _Entries
) -> tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor]:
    rows, ids, values = entries
    index = send([rows, ids], torch.long, logits.device)
    return (index[0], index[1]), send(values, torch.float32, logits.device)


def _add(logits: torch.Tensor, entries: _Entries) -> None:
    index, values = _place(logits, entries)
    logits[index] = logits[index] + values


def _rescale(logits: torch.Tensor, entries: _Entries) -> None:
    index, penalty = _place(logits, entries)
    old = logits[index]
    logits[index] = torch.where(old > 0, old / penalty, old * penalty)
