"""The sampling parameters of a step's draws by column. The same requests draw in step after step,
so all but their indices is kept. Runs in the worker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from engine.core.step import SampleRequest, has_penalties
from engine.sampling.gumbel import Draws
from kvrelay.types import Sampling

_Number = TypeVar("_Number", np.uint32, np.float32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """`is_greedy`: all take the most likely id. `may_change`: logits may change before the draw, by
    more than a grammar's mask."""

    samplings: list[Sampling]
    choices: list[int]
    keys: NDArray[np.uint32]  # as in Draws, with an index of 0
    temperatures: NDArray[np.float32]
    cuts: NDArray[np.float32]
    is_greedy: bool
    wants_logprobs: bool
    may_change: bool

    @staticmethod
    def of(samplings: list[Sampling], choices: list[int]) -> Parameters:
        """Seeds count modulo 2^64."""
        seeds = [sampling.seed for sampling in samplings]
        low, high = ([seed >> shift & 0xFFFFFFFF for seed in seeds] for shift in (0, 32))
        cuts = zip(*[(s.top_k, s.top_p, s.min_p) for s in samplings], strict=True)
        return Parameters(
            samplings=samplings,
            choices=choices,
            keys=_rows(low, high, choices, [0] * len(seeds), dtype=np.uint32),
            temperatures=np.array([s.temperature for s in samplings], dtype=np.float32),
            cuts=_rows(*cuts, dtype=np.float32),
            is_greedy=all(sampling.temperature == 0 for sampling in samplings),
            wants_logprobs=any(sampling.logprobs is not None for sampling in samplings),
            may_change=any(map(_may_change, samplings)),
        )

    def draws(self, indices: Sequence[int]) -> Draws:
        """# request that these parameters are of |-> index of its draw"""
        keys = self.keys.copy()
        keys[:, 3] = indices
        return Draws(keys=keys, temperatures=self.temperatures, cuts=self.cuts)


def _may_change(sampling: Sampling) -> bool:
    return has_penalties(sampling) or sampling.min_tokens > 0 or bool(sampling.logit_bias)


def _rows(*columns: Sequence[float], dtype: type[_Number]) -> NDArray[_Number]:
    """`[rows, columns]`: numpy reads a few long lists faster than many short ones."""
    return np.ascontiguousarray(np.array(columns, dtype=dtype).T)


class KeptParameters:
    """Those of the last step."""

    def __init__(self) -> None:
        self._last: Parameters | None = None

    def of(self, requests: Sequence[SampleRequest]) -> Parameters:
        samplings = [request.sampling for request in requests]
        choices = [request.choice for request in requests]
        last = self._last
        if last is None or last.samplings != samplings or last.choices != choices:
            last = self._last = Parameters.of(samplings, choices)
        return last


def draws_of(requests: Sequence[SampleRequest], indices: Sequence[int]) -> Draws:
    return KeptParameters().of(requests).draws(indices)
