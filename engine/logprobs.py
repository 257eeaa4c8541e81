"""Log probabilities of drawn tokens and of the most likely ones. Runs in the worker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.sending import fetch, send
from engine.step import SampleRequest
from kvrelay.types import TokenLogprobs


@dataclass(frozen=True, slots=True)
class Logprobs:
    """On the host once the device has come to where they were made."""

    rows: list[int]  # of the requests that want any
    own: torch.Tensor  # [rows, 1]
    ids: torch.Tensor  # [rows, widest], most likely first
    values: torch.Tensor

    def told(
        self, requests: Sequence[SampleRequest], tokens: Sequence[int]
    ) -> dict[int, TokenLogprobs]:
        """# request |-> its token's logprobs, where it wants them"""
        found = (self.own.tolist(), self.ids.tolist(), self.values.tolist())
        return {
            row: TokenLogprobs(tokens[row], own[0], _top(ids, values, requests[row]))
            for row, own, ids, values in zip(self.rows, *found, strict=True)
        }


def find_logprobs(
    logits: torch.Tensor, requests: Sequence[SampleRequest], tokens: torch.Tensor
) -> Logprobs | None:
    """Of `tokens`, `[requests]`; None: nobody wants any."""
    rows = [i for i, r in enumerate(requests) if r.sampling.logprobs is not None]
    if not rows:
        return None
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
