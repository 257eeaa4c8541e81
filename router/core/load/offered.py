"""Sums of the work that clients have asked for. Pure."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(slots=True, kw_only=True)
class OfferedWork:
    """Sums since the start; of prompts only what no worker has cached. `prompt_pairs`: of a new
    token and one that it sees; `prompt_squares`: of each prompt's new tokens, for their spread;
    `context_tokens`: an output token's context, summed over all output tokens. Objectives are
    summed over the `with_` requests that have them."""

    requests: float = 0
    prompt_tokens: float = 0
    prompt_squares: float = 0
    prompt_pairs: float = 0
    output_tokens: float = 0
    context_tokens: float = 0
    ttft_s: float = 0.0
    with_ttft: float = 0
    tpot_s: float = 0.0
    with_tpot: float = 0

    def __add__(self, other: OfferedWork) -> OfferedWork:
        return self._with(other, 1.0)

    def __sub__(self, other: OfferedWork) -> OfferedWork:
        return self._with(other, -1.0)

    def scaled(self, by: float) -> OfferedWork:
        return OfferedWork(**{one: getattr(self, one) * by for one in _SUMS})

    def _with(self, other: OfferedWork, share: float) -> OfferedWork:
        sums = {one: getattr(self, one) + share * getattr(other, one) for one in _SUMS}
        return OfferedWork(**sums)


_SUMS = tuple(one.name for one in fields(OfferedWork))
