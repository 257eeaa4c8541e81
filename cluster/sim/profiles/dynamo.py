"""Step times of Dynamo's mocker (its polynomial timing, lib/llm/src/mocker).

prefill_ms = 4.209989e-7 T^2 + 1.518344e-2 T + 16.50142 for T new tokens; decode_ms = -25.74 u^2 +
54.01 u + 5.74 for a share u of the KV capacity in use, at least 1 ms.
"""

from __future__ import annotations

from dataclasses import dataclass

from cluster.sim.profiles.schema import DynamoProfile
from engine.latency import NotCovered, StepWork

_LEAST_MS = 1.0
_MS_PER_S = 1000.0


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
