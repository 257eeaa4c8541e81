"""Which hardware profile a simulated worker has, and what it tells routers of its step times."""

from __future__ import annotations

from pathlib import Path

from cluster.sim.config import ProfileSource
from cluster.sim.profiles.load import HardwareProfile, build_profile, load_profile, parse_profile
from engine.fit_times import Timed, fit_times
from engine.latency import NotCovered, StepTimes
from engine.latency_fit import LinearTimes
from engine.time_design import Shape, design

BUILT_IN: dict[str, object] = {
    "name": "built-in",
    "kind": "linear",
    "prefill_overhead_s": 0.012,
    "prefill_token_s": 2.5e-5,
    "prefill_pair_s": 6e-10,
    "decode_knots": [[1, 0.0075], [64, 0.009], [256, 0.014], [4096, 0.12]],
    "decode_kv_token_s": 3e-8,
}
"""An 8B model on a GPU like H100, from its data sheet: for first tries."""


BUILT_IN_TEXT = "built-in: an 8B model on a GPU like H100, for first tries"


def read_profile(source: ProfileSource, key: str) -> HardwareProfile:
    """`key` is where the cluster file has it. Raises ConfigError or ModelError."""
    match source:
        case None:
            return build_profile(parse_profile(dict(BUILT_IN), key), Path())
        case str():
            return load_profile(Path(source).expanduser())
        case dict():
            raw = {"name": str(source.get("kind"))} | source
            return build_profile(parse_profile(raw, key), Path())


def told_times(
    times: StepTimes, *, chunk_tokens: int, most_sequences: int, max_model_len: int, tokens: int
) -> LinearTimes:
    """What a worker that measured these times at its start would have fitted to them."""
    if isinstance(times, LinearTimes):
        return times
    shapes = design(
        chunk_tokens=chunk_tokens,
        most_sequences=most_sequences,
        max_model_len=max_model_len,
        pool_tokens=tokens,
    )
    timed = [_timed(times, shape) for shape, _ in shapes]
    return fit_times([one for one in timed if one is not None])


def _timed(times: StepTimes, shape: Shape) -> Timed | None:
    try:
        return Timed(shape.work, times.step_s(shape.work))
    except NotCovered:
        return None
