"""Chooses tokens from logits. Counter based: a token depends on its own request alone.

The draw is one uniform number and the inverse CDF over the kept ids, most likely first, ids of
equal probability in ascending order.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.penalties import apply_penalties
from engine.philox import uniforms
from engine.step import Sampled, SampleRequest
from kvrelay.types import Sampling, TokenLogprobs

_HEAD = 1024
"""Most draws fall among this many most likely ids; only the others sort the whole vocabulary."""


@torch.inference_mode()
def sample(
    logits: torch.Tensor, wanted: Sequence[Sequence[SampleRequest]]
) -> list[tuple[Sampled, ...]]:
    """`logits` fp32 `[rows, vocab]`; row i serves all of `wanted[i]` (the choices of a prompt)."""
    requests = [request for row in wanted for request in row]
    if len(requests) > len(wanted):
        rows = [i for i, row in enumerate(wanted) for _ in row]
        logits = logits[torch.tensor(rows, device=logits.device)]
    logits = apply_penalties(logits, requests)
    tokens = _choose(logits, requests)
    logprobs = _logprobs(logits, requests, tokens)
    if not logprobs and len(requests) == len(wanted):
        return [(Sampled(token_id=token),) for token in tokens]
    flat = iter(Sampled(token_id=token, logprobs=logprobs.get(i)) for i, token in enumerate(tokens))
    return [tuple(next(flat) for _ in row) for row in wanted]


def _choose(logits: torch.Tensor, requests: Sequence[SampleRequest]) -> list[int]:
    drawn = [i for i, r in enumerate(requests) if r.sampling.temperature > 0]
    if len(drawn) == len(requests):
        return _draw(logits, requests) if requests else []
    tokens = _most_likely(logits)
    if drawn:
        chosen = _draw(logits[torch.tensor(drawn, device=logits.device)], _pick(requests, drawn))
        for i, token in zip(drawn, chosen, strict=True):
            tokens[i] = token
    return tokens


def _most_likely(logits: torch.Tensor) -> list[int]:
    """On a CPU numpy takes a tenth of the time that torch does; both take the first of equals."""
    if logits.device.type == "cpu":
        return logits.numpy().argmax(axis=-1).tolist()
    found: list[int] = logits.argmax(dim=-1).tolist()
    return found


def _pick(requests: Sequence[SampleRequest], rows: Sequence[int]) -> list[SampleRequest]:
    return [requests[row] for row in rows]


def _draw(logits: torch.Tensor, requests: Sequence[SampleRequest]) -> list[int]:
    temperatures = _column([r.sampling.temperature for r in requests], logits)
    probabilities = torch.softmax(logits / temperatures, dim=-1)
    tokens, decided = _draw_among(probabilities, requests, min(_HEAD, logits.shape[1]))
    chosen: list[int] = tokens.tolist()
    open_rows = (~decided).nonzero()[:, 0].tolist()
    if open_rows:
        rest, _ = _draw_among(probabilities[open_rows], _pick(requests, open_rows), None)
        for row, token in zip(open_rows, rest.tolist(), strict=True):
            chosen[row] = token
    return chosen


def _draw_among(
    probabilities: torch.Tensor, requests: Sequence[SampleRequest], head: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens `[rows]`, and whether the `head` most likely ids (None: all) were enough to tell."""
    ranked, ids, known = _rank(probabilities, head)
    totals = ranked.cumsum(dim=-1)
    samplings = [r.sampling for r in requests]
    kept = _kept(ranked, totals, samplings)  # [rows, 1], how many of the ranked ids stay
    whole = _column([float(_keeps_all(s)) for s in samplings], ranked).bool()
    last = (kept - 1).clamp_min(0)
    mass = torch.where(whole, torch.ones_like(totals[:, :1]), totals.gather(1, last))
    draws = uniforms([(r.sampling.seed, r.choice, r.index) for r in requests])
    target = torch.from_numpy(draws).to(ranked.device)[:, None] * mass
    found = (totals <= target).sum(dim=-1, keepdim=True).minimum(last)
    beyond = _column([float(s.top_k > ranked.shape[1]) for s in samplings], ranked).bool()
    decided = torch.where(whole, found < known, kept <= known) & ~beyond
    if ranked.shape[1] == probabilities.shape[1]:
        decided = torch.ones_like(decided)
    return ids.gather(1, found)[:, 0], decided[:, 0]


def _rank(
    probabilities: torch.Tensor, head: int | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The most likely ids first, and how many of them are certain (`[rows, 1]`).

    `topk` breaks ties as it likes, so ids as likely as the last one are not certain.
    """
    vocab = probabilities.shape[1]
    if head is None or head == vocab:
        ranked, ids = probabilities.sort(dim=-1, descending=True, stable=True)
        return ranked, ids, torch.full_like(ids[:, :1], vocab)
    ids = probabilities.topk(head, dim=-1, sorted=False).indices.sort(dim=-1).values
    ranked, order = probabilities.gather(1, ids).sort(dim=-1, descending=True, stable=True)
    known = (ranked > ranked[:, -1:]).sum(dim=-1, keepdim=True)
    return ranked, ids.gather(1, order), known


def _keeps_all(sampling: Sampling) -> bool:
    return sampling.top_k == 0 and sampling.top_p >= 1.0 and sampling.min_p == 0.0


def _kept(
    ranked: torch.Tensor, totals: torch.Tensor, samplings: Sequence[Sampling]
) -> torch.Tensor:
    """How many ids top_k, then top_p (of what top_k left), then min_p keep: `[rows, 1]`, >= 1."""
    width = ranked.shape[1]
    limits = _column([min(s.top_k or width, width) for s in samplings], ranked).long()
    by_k = totals.gather(1, limits - 1)
    unlimited = _column([float(s.top_k == 0) for s in samplings], ranked).bool()
    mass = torch.where(unlimited, torch.ones_like(by_k), by_k)
    top_p = _column([s.top_p if s.top_p < 1.0 else float("inf") for s in samplings], ranked)
    min_p = _column([s.min_p for s in samplings], ranked)
    stays = (totals - ranked < top_p * mass) & (ranked >= min_p * ranked[:, :1])
    return stays.sum(dim=-1, keepdim=True).minimum(limits).clamp_min(1)


def _column(values: Sequence[float], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32, device=like.device)[:, None]


def _logprobs(
    logits: torch.Tensor, requests: Sequence[SampleRequest], tokens: list[int]
) -> dict[int, TokenLogprobs]:
    """# request |-> its token's logprobs, where it wants them"""
    rows = [i for i, r in enumerate(requests) if r.sampling.logprobs is not None]
    if not rows:
        return {}
    logs = torch.log_softmax(logits[torch.tensor(rows, device=logits.device)], dim=-1)
    widest = max(requests[row].sampling.logprobs or 0 for row in rows)
    values, ids = logs.topk(min(widest, logs.shape[1]), dim=-1)
    chosen = logs.gather(1, torch.tensor([[tokens[row]] for row in rows], device=logs.device))
    return {
        row: TokenLogprobs(tokens[row], own[0], _top(top_ids, top, requests[row]))
        for row, own, top_ids, top in zip(
            rows, chosen.tolist(), ids.tolist(), values.tolist(), strict=True
        )
    }


def _top(
    ids: list[int], values: list[float], request: SampleRequest
) -> tuple[tuple[int, float], ...]:
    pairs = zip(ids, values, strict=True)
    possible = [(token, value) for token, value in pairs if value > float("-inf")]
    return tuple(possible[: request.sampling.logprobs])
