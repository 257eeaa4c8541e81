"""Chooses tokens from logits: penalties, then the mask of a grammar, then truncation, then a draw
(`engine.sampling.gumbel`).

Counter based: a token depends on its own request alone. On a GPU nothing waits for the device until
the tokens are asked for.

Also the log probabilities of drawn tokens, of the most likely ones, and of a prompt's tokens. Runs
in the worker.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from itertools import accumulate

import torch

from engine.core.step import Sampled, SampleRequest, Scoring, SequenceSlice
from engine.device.streams import fetch, send
from engine.sampling import gumbel
from engine.sampling.grammars import Masks
from engine.sampling.native_draw import host_draw
from engine.sampling.parameters import KeptParameters, Parameters, draws_of
from engine.sampling.penalties import apply_penalties
from engine.sampling.truncation import truncate
from kvrelay.types import PromptLogprob, Sampling, TokenLogprobs


@dataclass(frozen=True, slots=True)
class Logprobs:
    """On the host once the device has reached the point where they were made."""

    rows: list[int]  # of the requests that want any
    own: torch.Tensor  # [rows, 1]
    ids: torch.Tensor  # [rows, widest], most likely first
    values: torch.Tensor

    def told(
        self, requests: Sequence[SampleRequest], tokens: Sequence[int]
    ) -> dict[int, TokenLogprobs]:
        """# request |-> its token's logprobs, if it wants them"""
        found = (self.own.tolist(), self.ids.tolist(), self.values.tolist())
        return {
            row: TokenLogprobs(tokens[row], own[0], _top(ids, values, requests[row]))
            for row, own, ids, values in zip(self.rows, *found, strict=True)
        }


def find_logprobs(
    logits: torch.Tensor, requests: Sequence[SampleRequest], tokens: torch.Tensor
) -> Logprobs:
    """For `tokens` `[requests]`, of which one at least wants them."""
    rows = [i for i, r in enumerate(requests) if r.sampling.logprobs is not None]
    picked = send(rows, torch.long, logits.device)
    logs = torch.log_softmax(logits[picked], dim=-1)
    widest = max(requests[row].sampling.logprobs or 0 for row in rows)
    values, ids = logs.topk(min(widest, logs.shape[1]), dim=-1)
    own = logs.gather(1, tokens[picked][:, None])
    return Logprobs(rows, fetch(own), fetch(ids), fetch(values))


def _top(
    ids: list[int], values: list[float], request: SampleRequest
) -> tuple[tuple[int, float], ...]:
    pairs = zip(ids, values, strict=True)
    possible = [(token, value) for token, value in pairs if value > float("-inf")]
    return tuple(possible[: request.sampling.logprobs])


def sample(
    logits: torch.Tensor, wanted: Sequence[Sequence[SampleRequest]], indices: Sequence[int]
) -> list[tuple[Sampled, ...]]:
    """`logits` fp32 `[rows, vocab]`; row i serves all of `wanted[i]` (the choices of a prompt), of
    which each has `indices[i]` tokens so far."""
    return draw(logits, wanted, indices).sampled()


@dataclass(frozen=True, slots=True)
class Drawn:
    """The drawn tokens of the `requests`. `tokens` `[requests]` stay on the device."""

    wanted: Sequence[Sequence[SampleRequest]]
    requests: Sequence[SampleRequest]
    tokens: torch.Tensor
    logprobs: Logprobs | None
    masks: Masks | None
    _fetched: torch.Tensor  # the tokens

    def ids(self) -> list[int]:
        """Call it when the device has reached the point of the draw."""
        found: list[int] = self._fetched.tolist()
        return found

    def id_of(self, index: int) -> int:
        """One of `ids`."""
        return int(self._fetched[index])

    def sampled(self) -> list[tuple[Sampled, ...]]:
        """Call it when the device has reached the point of the draw."""
        tokens, masks = self.ids(), self.masks
        logprobs = {} if self.logprobs is None else self.logprobs.told(self.requests, tokens)
        if not logprobs and masks is None and len(self.requests) == len(self.wanted):
            return [(Sampled(token_id=token),) for token in tokens]
        flat = iter(enumerate(tokens))
        return [
            tuple(
                Sampled(
                    token_id=token,
                    logprobs=logprobs.get(i),
                    ends=masks is not None and masks.ends(row, token),
                )
                for i, token in (next(flat) for _ in requests)
            )
            for row, requests in enumerate(self.wanted)
        ]


@torch.inference_mode()
def draw(
    logits: torch.Tensor,
    wanted: Sequence[Sequence[SampleRequest]],
    indices: Sequence[int],
    masks: Masks | None = None,
    kept: KeptParameters | None = None,
) -> Drawn:
    """Like `sample`. Logprobs are those of the logits before temperature and truncation. `kept`: of
    the draws of earlier steps."""
    requests = [request for row in wanted for request in row]
    if len(requests) > len(wanted):
        rows = [i for i, row in enumerate(wanted) for _ in row]
        logits = logits[send(rows, torch.long, logits.device)]
        indices = [indices[row] for row in rows]
    parameters = (kept or KeptParameters()).of(requests)
    if parameters.may_change:
        logits = apply_penalties(logits, requests, indices)
    if masks is not None:
        logits = masks.applied(logits, _flat_rows(wanted))
    tokens = _choose(logits, parameters, indices)
    logprobs = find_logprobs(logits, requests, tokens) if parameters.wants_logprobs else None
    return Drawn(wanted, requests, tokens, logprobs, masks, fetch(tokens))


def _flat_rows(wanted: Sequence[Sequence[SampleRequest]]) -> list[range]:
    """# row |-> the places of its requests among all"""
    ends = list(accumulate(len(row) for row in wanted))
    return [range(end - len(row), end) for row, end in zip(wanted, ends, strict=True)]


def _choose(logits: torch.Tensor, parameters: Parameters, indices: Sequence[int]) -> torch.Tensor:
    if parameters.is_greedy:
        return _most_likely(logits)
    return draw_tokens(logits, parameters.draws(indices))


def draw_tokens(logits: torch.Tensor, draws: gumbel.Draws) -> torch.Tensor:
    """Truncates and draws in the fastest available way; all ways draw the same tokens."""
    if logits.device.type == "cpu" and (kernel := host_draw()) is not None:
        return kernel.draw(logits, draws)
    logits = truncate(logits, draws)
    if logits.device.type == "cuda" and _has_triton():
        from engine.sampling import triton_draw

        return triton_draw.draw(logits, draws)
    return gumbel.draw(logits, draws)


def prepare_draws(device: torch.device, vocab: int) -> None:
    """Builds or compiles the kernel, so that the first request doesn't wait for it."""
    sampling = Sampling(max_tokens=1, seed=0, temperature=1.0)
    one = SampleRequest(sampling=sampling, choice=0, prompt_ids=(), emitted_ids=())
    draw_tokens(torch.zeros((1, vocab), device=device), draws_of([one], [0]))


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


def _most_likely(logits: torch.Tensor) -> torch.Tensor:
    """On a CPU numpy takes a tenth of torch's time; both take the first of equal ones."""
    if logits.device.type == "cpu":
        return torch.from_numpy(logits.numpy().argmax(axis=-1))
    return logits.argmax(dim=-1)


_ROWS = 64
"""Distributions made at a time: together they take as much memory as the logits."""


@dataclass(frozen=True, slots=True)
class Scored:
    """On the host once the device has reached the point where they were made."""

    wanted: list[tuple[int, Scoring]]  # slice and its scoring
    own: torch.Tensor  # [rows]
    ranks: torch.Tensor  # [rows]
    ids: torch.Tensor  # [rows, widest], most likely first
    values: torch.Tensor

    def told(self) -> dict[int, tuple[PromptLogprob, ...]]:
        """# slice |-> one entry for each scored token"""
        found = (self.own.tolist(), self.ranks.tolist(), self.ids.tolist(), self.values.tolist())
        rows = zip(*found, strict=True)
        return {
            i: tuple([_entry(token, scoring.top, *next(rows)) for token in scoring.next_ids])
            for i, scoring in self.wanted
        }


def _entry(
    token: int, top: int, own: float, rank: int, ids: list[int], values: list[float]
) -> PromptLogprob:
    return PromptLogprob(token, own, rank, tuple(zip(ids[:top], values[:top], strict=True)))


@torch.inference_mode()
def score(logits: torch.Tensor, slices: Sequence[SequenceSlice]) -> Scored | None:
    """`logits` fp32 `[tokens scored, vocab]`, slice by slice; None: nothing is scored."""
    wanted = [(i, piece.scoring) for i, piece in enumerate(slices) if piece.scoring is not None]
    if not wanted:
        return None
    next_ids = [token for _, scoring in wanted for token in scoring.next_ids]
    tokens = send(next_ids, torch.long, logits.device)
    widest = min(max(scoring.top for _, scoring in wanted), logits.shape[1])
    pairs = zip(logits.split(_ROWS), tokens.split(_ROWS), strict=True)
    parts = [_part(rows, known, widest) for rows, known in pairs]
    return Scored(wanted, *(fetch(torch.cat(part)) for part in zip(*parts, strict=True)))


def _part(
    logits: torch.Tensor, tokens: torch.Tensor, widest: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    logs = torch.log_softmax(logits, dim=-1)
    own = logs.gather(1, tokens[:, None])
    ranks = (logs > own).sum(dim=-1) + 1
    values, ids = logs.topk(widest, dim=-1)
    return own[:, 0], ranks, ids, values
