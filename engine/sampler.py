"""Chooses tokens from logits: penalties, then truncation, then the draw of `engine.gumbel`.

Counter based: a token depends on its own request alone. On a GPU nothing waits for the device until
the tokens are asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec

import torch

from engine import gumbel
from engine.logprobs import Logprobs, find_logprobs
from engine.native.draw import host_draw
from engine.penalties import apply_penalties
from engine.sending import fetch, send
from engine.step import Sampled, SampleRequest
from engine.truncation import truncate
from kvrelay.types import Sampling


def sample(
    logits: torch.Tensor, wanted: Sequence[Sequence[SampleRequest]]
) -> list[tuple[Sampled, ...]]:
    """`logits` fp32 `[rows, vocab]`; row i serves all of `wanted[i]` (the choices of a prompt)."""
    return draw(logits, wanted).sampled()


@dataclass(frozen=True, slots=True)
class Drawn:
    """What is drawn for the `requests`. `tokens` `[requests]` stay on the device."""

    wanted: Sequence[Sequence[SampleRequest]]
    requests: Sequence[SampleRequest]
    tokens: torch.Tensor
    logprobs: Logprobs | None
    _fetched: torch.Tensor  # the tokens

    def sampled(self) -> list[tuple[Sampled, ...]]:
        """The device has come to where they were drawn."""
        tokens: list[int] = self._fetched.tolist()
        logprobs = {} if self.logprobs is None else self.logprobs.told(self.requests, tokens)
        if not logprobs and len(self.requests) == len(self.wanted):
            return [(Sampled(token_id=token),) for token in tokens]
        flat = iter([Sampled(token_id=t, logprobs=logprobs.get(i)) for i, t in enumerate(tokens)])
        return [tuple(next(flat) for _ in row) for row in self.wanted]


@torch.inference_mode()
def draw(logits: torch.Tensor, wanted: Sequence[Sequence[SampleRequest]]) -> Drawn:
    """As `sample`. Logprobs are told of the logits before temperature and truncation."""
    requests = [request for row in wanted for request in row]
    if len(requests) > len(wanted):
        rows = [i for i, row in enumerate(wanted) for _ in row]
        logits = logits[send(rows, torch.long, logits.device)]
    logits = apply_penalties(logits, requests)
    tokens = _choose(logits, requests)
    return Drawn(wanted, requests, tokens, find_logprobs(logits, requests, tokens), fetch(tokens))


def _choose(logits: torch.Tensor, requests: Sequence[SampleRequest]) -> torch.Tensor:
    if all(request.sampling.temperature == 0 for request in requests):
        return _most_likely(logits)
    return draw_tokens(logits, gumbel.draws_of(requests))


def draw_tokens(logits: torch.Tensor, draws: gumbel.Draws) -> torch.Tensor:
    """Truncates and draws by the fastest way that there is here; all draw the same."""
    if logits.device.type == "cpu" and (kernel := host_draw()) is not None:
        return kernel.draw(logits, draws)
    logits = truncate(logits, draws)
    if logits.device.type == "cuda" and _has_triton():
        from engine.backends import triton_draw

        return triton_draw.draw(logits, draws)
    return gumbel.draw(logits, draws)


def prepare_draws(device: torch.device, vocab: int) -> None:
    """Builds or compiles what draws there, so that the first request doesn't wait for it."""
    sampling = Sampling(max_tokens=1, seed=0, temperature=1.0)
    one = SampleRequest(sampling=sampling, choice=0, index=0, prompt_ids=(), emitted_ids=())
    draw_tokens(torch.zeros((1, vocab), device=device), gumbel.draws_of([one]))


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


def _most_likely(logits: torch.Tensor) -> torch.Tensor:
    """On a CPU numpy takes a tenth of the time that torch does; both take the first of equals."""
    if logits.device.type == "cpu":
        return torch.from_numpy(logits.numpy().argmax(axis=-1))
    return logits.argmax(dim=-1)
