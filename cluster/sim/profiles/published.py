"""Step times from the polynomials of DistServe's simulator (OSDI'24, simdistserve/estimators).

prefill_ms = (a + b * tokens + c * sum of squared lengths) / pp + pp; decode_ms = (a + b * context
tokens + c * sequences) / pp, with other coefficients from `large_from` sequences on.

Step times of Dynamo's mocker (its polynomial timing, lib/llm/src/mocker).

prefill_ms = 4.209989e-7 T^2 + 1.518344e-2 T + 16.50142 for T new tokens; decode_ms = -25.74 u^2 +
54.01 u + 5.74 for a share u of the KV capacity in use, at least 1 ms.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from cluster.sim.profiles.schema import DistServeProfile, DynamoProfile
from engine.core.step_times import NotCovered, StepWork
from kvrelay.errors import ConfigError

Polynomial = tuple[float, float, float]

_MS_PER_S = 1000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DistServeTimes:
    """Coefficients in milliseconds. A step that mixes both kinds takes their sum: its authors'
    simulator keeps them apart."""

    prefill: Polynomial
    decode_small: Polynomial
    decode_large: Polynomial
    large_from: int
    pipeline_parallel: int = 1

    def step_s(self, work: StepWork) -> float:
        prefill_ms = self._prefill_ms(work) if work.prefill_tokens else 0.0
        decode_ms = self._decode_ms(work) if work.decode_sequences else 0.0
        return (prefill_ms + decode_ms) / _MS_PER_S

    def _prefill_ms(self, work: StepWork) -> float:
        a, b, c = self.prefill
        squares = 2 * work.attended_tokens - work.prefill_tokens
        whole = a + b * work.prefill_tokens + c * squares
        return whole / self.pipeline_parallel + self.pipeline_parallel

    def _decode_ms(self, work: StepWork) -> float:
        large = work.decode_sequences >= self.large_from
        a, b, c = self.decode_large if large else self.decode_small
        return (a + b * work.kv_tokens + c * work.decode_sequences) / self.pipeline_parallel


def distserve_times(profile: DistServeProfile, folder: Path) -> DistServeTimes:
    """Raises ConfigError where the file lacks the model or the degree."""
    path = folder / profile.file
    try:
        models = json.loads(path.read_text(encoding="utf-8"))
        fitted = models[profile.model][str(profile.tensor_parallel)]
        return DistServeTimes(
            prefill=_three(fitted["prefill"]),
            decode_small=_three(fitted["decoding_smallbs"]),
            decode_large=_three(fitted["decoding_largebs"]),
            large_from=int(fitted["decoding_large_small_bs_threshold"]),
            pipeline_parallel=profile.pipeline_parallel,
        )
    except OSError as error:
        raise ConfigError(f"{path}: can't read it: {error.strerror}") from None
    except KeyError as error:
        asked = f"{profile.model} at tensor_parallel {profile.tensor_parallel}"
        raise ConfigError(f"{path}: nothing is fitted for {asked} (no {error})") from None
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{path}: not a profiler-*.json of DistServe: {error}") from None


def _three(values: list[float]) -> Polynomial:
    a, b, c = (float(value) for value in values)
    return a, b, c


_LEAST_MS = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DynamoTimes:
    """A step that mixes both kinds takes their sum."""

    kv_capacity_tokens: int
    saturates: bool = False

    def step_s(self, work: StepWork) -> float:
        """Raises NotCovered for more KV than the capacity, where the polynomial falls again, unless
        that `saturates`."""
        prefill_ms = _prefill_ms(work.prefill_tokens) if work.prefill_tokens else 0.0
        decode_ms = self._decode_ms(work.kv_tokens) if work.decode_sequences else 0.0
        return (prefill_ms + decode_ms) / _MS_PER_S

    def _decode_ms(self, kv_tokens: int) -> float:
        if kv_tokens > self.kv_capacity_tokens and not self.saturates:
            raise NotCovered(
                f"{kv_tokens} KV tokens asked, the profile's kv_capacity_tokens is "
                f"{self.kv_capacity_tokens}"
            )
        used = min(1.0, kv_tokens / self.kv_capacity_tokens)
        return max(_LEAST_MS, -25.74 * used**2 + 54.01 * used + 5.74)


def _prefill_ms(tokens: int) -> float:
    return 4.209989e-7 * tokens**2 + 1.518344e-2 * tokens + 16.50142


def dynamo_times(profile: DynamoProfile) -> DynamoTimes:
    return DynamoTimes(kv_capacity_tokens=profile.kv_capacity_tokens, saturates=profile.saturates)
