"""Step times from coefficients, as a worker fits them when it starts. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.sim.profiles.interpolate import Axis, Curve
from cluster.sim.profiles.schema import LinearProfile
from engine.latency import StepWork
from kvrelay.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearTimes:
    """A step that mixes both kinds takes their sum."""

    overhead_s: float
    token_s: float
    pair_s: float
    sequence_s: float
    decode_s: Curve
    kv_token_s: float

    def step_s(self, work: StepWork) -> float:
        decode_s = self.decode_s.at(work.decode_sequences) if work.decode_sequences else 0.0
        return self._prefill_s(work) + decode_s + self.kv_token_s * work.kv_tokens

    def _prefill_s(self, work: StepWork) -> float:
        if not work.prefill_tokens:
            return 0.0
        tokens_s = self.token_s * work.prefill_tokens + self.pair_s * work.attended_tokens
        return self.overhead_s + tokens_s + self.sequence_s * work.prefill_sequences


def linear_times(profile: LinearProfile) -> LinearTimes:
    """Raises ConfigError where the knots don't ascend."""
    knots = [sequences for sequences, _ in profile.decode_knots]
    if knots != sorted(set(knots)):
        raise ConfigError(f"{profile.name}: decode_knots: got {knots}, expected ascending counts")
    source = f"{profile.name}: decode_knots"
    axis = Axis(values=tuple(map(float, knots)), name="sequences", source=source)
    curve = Curve(axis=axis, ys=tuple(seconds for _, seconds in profile.decode_knots))
    return LinearTimes(
        overhead_s=profile.prefill_overhead_s,
        token_s=profile.prefill_token_s,
        pair_s=profile.prefill_pair_s,
        sequence_s=profile.prefill_sequence_s,
        decode_s=curve,
        kv_token_s=profile.decode_kv_token_s,
    )
