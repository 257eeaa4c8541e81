"""How long a simulated worker's steps take."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.sim.config import ProfileSource
from engine.latency import StepTimes, StepWork
from kvrelay.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    name: str
    times: StepTimes
    price_per_hour: float | None = None
    peak_w: float | None = None
    idle_w: float | None = None


@dataclass(frozen=True, slots=True)
class PlainTimes:
    """Of an 8B model on a GPU of 2022, roughly: for first tries."""

    def step_s(self, work: StepWork) -> float:
        prefill_s = 0.0165 + 1.5e-5 * work.prefill_tokens + 2e-10 * work.attended_tokens
        decode_s = 0.006 + 1e-5 * work.decode_sequences + 4e-8 * work.kv_tokens
        return prefill_s * bool(work.prefill_tokens) + decode_s * bool(work.decode_sequences)


def read_profile(source: ProfileSource) -> Profile:
    """Raises ConfigError."""
    if source is not None:
        raise ConfigError("simulation.profile: not supported yet")
    return Profile(name="built-in", times=PlainTimes())
