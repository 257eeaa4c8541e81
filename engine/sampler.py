"""Chooses tokens from logits. Counter based: a token depends on its own request alone.

The draw is one uniform number and the inverse CDF over the kept ids, most likely first, ids of
equal probability in ascending order. Nothing waits for the device until the tokens are asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.logprobs import Logprobs, find_logprobs
from engine.penalties import apply_penalties
from engine.philox import uniforms
from engine.sending import fetch, send
from engine.step import Sampled, SampleRequest
from kvrelay.types import Sampling

_HEAD = 1024
"""Most draws fall among this many most likely ids; only the others sort the whole vocabulary."""


def sample(
    logits: torch.Tensor, wanted: Sequence[Sequence[SampleRequest]]
) -> list[tuple[Sampled, ...]]:
    """`logits` fp32 `[rows, vocab]`; row i serves all of `wanted[i]` (the choices of a prompt)."""
    return draw(logits, wanted).sampled()


@dataclass(frozen=True, slots=True)
class _Doubts:
    """Draws among the most likely ids, and for which `rows` those may not have been enough."""

    rows: list[int]  # of the requests
    probabilities: torch.Tensor  # [rows, vocab]
    are_open: torch.Tensor  # bool [rows]


@dataclass(slots=True)
class Drawn:
    """What is drawn for the `requests`. `tokens` `[requests]` stay on the device. They are those
    that `sampled` tells but for the `late` ones, which are known once it has returned."""

    wanted: Sequence[Sequence[SampleRequest]]
    requests: Sequence[SampleRequest]
    logits: torch.Tensor
    tokens: torch.Tensor
    doubts: _Doubts | None
    logprobs: Logprobs | None
    _fetched: torch.Tensor  # tokens, then which of the doubts are open
    late: tuple[int, ...] = ()

    @torch.inference_mode()
    def sampled(self) -> list[tuple[Sampled, ...]]:
        """The device has come to where they were drawn."""
        found: list[int] = self._fetched.tolist()
        tokens, are_open = found[: len(self.requests)], found[len(self.requests) :]
        if self.doubts is not None and any(are_open):
            self._settle(self.doubts, [i for i, is_open in enumerate(are_open) if is_open], tokens)
        logprobs = {} if self.logprobs is None else self.logprobs.told(self.requests, tokens)
        if not logprobs and len(self.requests) == len(self.wanted):
            return [(Sampled(token_id=token),) for token in tokens]
        flat = iter([Sampled(token_id=t, logprobs=logprobs.get(i)) for i, t in enumerate(tokens)])
        return [tuple(next(flat) for _ in row) for row in self.wanted]

    def _settle(self, doubts: _Doubts, are_open: list[int], tokens: list[int]) -> None:
        """Draws among all ids, waiting for the device, and changes `tokens`."""
        rows = [doubts.rows[i] for i in are_open]
        picked, _ = _draw_among(doubts.probabilities[are_open], _pick(self.requests, rows), None)
        for row, token in zip(rows, picked.tolist(), strict=True):
            tokens[row] = token
        self.late = tuple(rows)
        if self.logprobs is not None:
            device = self.logits.device
            known = send(tokens, torch.long, device)
            self.logprobs = find_logprobs(self.logits, self.requests, known)
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()


@torch.inference_mode()
def draw(logits: torch.Tensor, wanted: Sequence[Sequence[SampleRequest]]) -> Drawn:
    """As `sample`."""
    requests = [request for row in wanted for request in row]
    if len(requests) > len(wanted):
        rows = [i for i, row in enumerate(wanted) for _ in row]
        logits = logits[send(rows, torch.long, logits.device)]
    logits = apply_penalties(logits, requests)
    tokens, doubts = _choose(logits, requests)
    both = tokens if doubts is None else torch.cat([tokens, doubts.are_open.long()])
    logprobs = find_logprobs(logits, requests, tokens)
    return Drawn(wanted, requests, logits, tokens, doubts, logprobs, fetch(both))


def _choose(
    logits: torch.Tensor, requests: Sequence[SampleRequest]
) -> tuple[torch.Tensor, _Doubts | None]:
    drawn = [i for i, r in enumerate(requests) if r.sampling.temperature > 0]
    if not drawn:
        return _most_likely(logits), None
    if len(drawn) == len(requests):
        return _draw(logits, requests, drawn)
    rows = send(drawn, torch.long, logits.device)
    chosen, doubts = _draw(logits[rows], _pick(requests, drawn), drawn)
    return _most_likely(logits).index_copy_(0, rows, chosen), doubts


def _most_likely(logits: torch.Tensor) -> torch.Tensor:
    """On a CPU numpy takes a tenth of the time that torch does; both take the first of equals."""
    if logits.device.type == "cpu":
        return torch.from_numpy(logits.numpy().argmax(axis=-1))
    return logits.argmax(dim=-1)


def _pick(requests: Sequence[SampleRequest], rows: Sequence[int]) -> list[SampleRequest]:
    return [requests[row] for row in rows]


def _draw(
    logits: torch.Tensor, requests: Sequence[SampleRequest], rows: list[int]
) -> tuple[torch.Tensor, _Doubts]:
    temperatures = _column([r.sampling.temperature for r in requests], logits)
    probabilities = torch.softmax(logits / temperatures, dim=-1)
    tokens, decided = _draw_among(probabilities, requests, min(_HEAD, logits.shape[1]))
    return tokens, _Doubts(rows, probabilities, ~decided)


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
    target = send(draws, torch.float32, ranked.device)[:, None] * mass
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
    return send(values, torch.float32, like.device)[:, None]
