"""From a profile's YAML file to step times and what they cost, or to one line that says what is
wrong. Files and folders that a profile names are relative to `data`, by default its own folder.

The bundled library: published models' shapes and devices' data sheets, by name.

Which hardware profile a simulated worker has, and what it tells routers of its step times.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import assert_never

import yaml
from pydantic import ValidationError

from cluster.config.load import describe, read_yaml
from cluster.config.overrides import Node
from cluster.config.simulation import ProfileSource
from cluster.sim.profiles.capacity import STAGE_COUNTS, TENSOR_DEGREES, Refusals
from cluster.sim.profiles.measured import silicon_times, table_times
from cluster.sim.profiles.published import distserve_times, dynamo_times
from cluster.sim.profiles.roofline import Parallel, Precision, RooflineTimes, roofline_times
from cluster.sim.profiles.schema import (
    KINDS,
    DeviceLinks,
    DeviceProfile,
    DistServeProfile,
    DynamoProfile,
    LinearProfile,
    Power,
    Profile,
    RooflineProfile,
    SiliconProfile,
    TableProfile,
)
from engine.core.fitting import Shape, Timed, design, fit_times
from engine.core.model_shape import ModelShape, read_shape
from engine.core.step_times import LinearTimes, NotCovered, StepTimes
from engine.model.checkpoint import read_config
from kvrelay.errors import ConfigError

ProfileKeys = Mapping[str, object]


@cache
def _bundled(file: str) -> dict[str, ProfileKeys]:
    text = resources.files("cluster.sim.profiles.known").joinpath(file).read_text("utf-8")
    found: dict[str, ProfileKeys] = yaml.safe_load(text)
    return found


@cache
def known_device(name: str) -> DeviceProfile:
    """Raises ConfigError, with the names there are."""
    held = _bundled("devices.yaml")
    if name not in held:
        raise ConfigError(f"device {name}: unknown, expected one of {', '.join(held)}")
    return DeviceProfile.model_validate_json(json.dumps(held[name]))


def model_names() -> list[str]:
    return list(_bundled("models.yaml"))


@cache
def known_shape(name: str) -> ModelShape | None:
    """None: no bundled shape has this name."""
    held = _bundled("models.yaml")
    return read_shape(held[name], name) if name in held else None


def known_refusals(name: str) -> Refusals:
    """As written beside the bundled shape of this name."""
    entry = _bundled("models.yaml")[name]
    return Refusals(
        refused=str(entry.get("refused", "")),
        unsplit=_for_all(TENSOR_DEGREES[1:], entry.get("unsplit")),
        unstaged=_for_all(STAGE_COUNTS[1:], entry.get("unstaged")),
    )


def _for_all(counts: Sequence[int], why: object) -> dict[int, str]:
    return {} if why is None else {count: str(why) for count in counts}


def shape_of(model: str, folder: Path) -> ModelShape:
    """A bundled shape, or that of a checkpoint's folder (relative to `folder`). Raises ConfigError
    or ModelError."""
    known = known_shape(model)
    if known is not None:
        return known
    path = folder / model
    if not path.is_dir():
        raise ConfigError(
            f"model {model}: neither a folder with a config.json nor one of "
            f"{', '.join(model_names())}"
        )
    return read_shape(read_config(path), model)


@dataclass(frozen=True, slots=True, kw_only=True)
class HardwareProfile:
    """Of the `devices` that share one copy of the model, whose `stages` can work on different steps
    of prompts. Prices, power and memory are theirs together; None: neither the file nor its device
    says."""

    name: str
    times: StepTimes
    devices: int
    stages: int
    price_per_hour: float | None
    power_w: Power | None
    memory_bytes: int | None
    links: DeviceLinks | None


def load_profile(path: Path, data: Path | None = None) -> HardwareProfile:
    """Raises ConfigError or ModelError."""
    raw = read_yaml(path)
    raw.setdefault("name", path.stem)
    return build_profile(parse_profile(raw, str(path)), data or path.parent)


def parse_profile(raw: dict[str, Node], where: str) -> Profile:
    """Raises ConfigError: `where`, the path of the key, what was given and what was expected."""
    kind = raw.get("kind")
    if kind not in KINDS:
        raise ConfigError(f"{where}: kind: got {kind}, expected one of {', '.join(KINDS)}")
    section = KINDS[str(kind)]
    try:
        return section.model_validate_json(json.dumps(raw, default=str))
    except ValidationError as error:
        raise ConfigError(f"{where}: {describe(error, section, 'the profile')}") from None


def build_profile(profile: Profile, data: Path) -> HardwareProfile:
    """Raises ConfigError or ModelError."""
    device = known_device(profile.device) if profile.device else None
    count = _devices(profile)
    price, power = profile.price_per_hour, profile.power_w
    memory_bytes = profile.memory_bytes
    if device is not None:
        each_price = device.price_per_hour
        price = price if price is not None or each_price is None else count * each_price
        power = power or _power_of(device, count)
        memory_bytes = memory_bytes or count * device.memory_bytes
    return HardwareProfile(
        name=profile.name,
        times=_times(profile, device, data),
        devices=count,
        stages=_parallel(profile).pipeline if isinstance(profile, RooflineProfile) else 1,
        price_per_hour=price,
        power_w=power,
        memory_bytes=memory_bytes,
        links=profile.links or (device.links if device else None),
    )


def _devices(profile: Profile) -> int:
    if isinstance(profile, RooflineProfile):
        return _parallel(profile).devices
    return profile.devices


def _power_of(device: DeviceProfile, count: int) -> Power:
    return Power(idle=count * device.power_w.idle, peak=count * device.power_w.peak)


def _times(profile: Profile, device: DeviceProfile | None, data: Path) -> StepTimes:
    match profile:
        case LinearProfile():
            return _linear(profile)
        case TableProfile():
            return table_times(profile, data)
        case SiliconProfile():
            return silicon_times(profile, data)
        case DistServeProfile():
            return distserve_times(profile, data)
        case DynamoProfile():
            return dynamo_times(profile)
        case RooflineProfile():
            return _roofline(profile, device, data)
        case _:
            assert_never(profile)


def _linear(profile: LinearProfile) -> LinearTimes:
    try:
        return LinearTimes(
            prefill_overhead_s=profile.prefill_overhead_s,
            prefill_token_s=profile.prefill_token_s,
            prefill_pair_s=profile.prefill_pair_s,
            prefill_sequence_s=profile.prefill_sequence_s,
            decode_knots=profile.decode_knots,
            decode_kv_token_s=profile.decode_kv_token_s,
        )
    except ValueError as error:
        raise ConfigError(f"{profile.name}: expected {error}") from None


def _parallel(profile: RooflineProfile) -> Parallel:
    return Parallel(tensor=profile.tensor_parallel, pipeline=profile.pipeline_parallel)


def _roofline(profile: RooflineProfile, device: DeviceProfile | None, data: Path) -> RooflineTimes:
    if device is None:
        raise ConfigError(f"{profile.name}: device: missing, a roofline needs a known one")
    return roofline_times(
        device,
        shape_of(profile.model, data).as_served,
        precision=Precision(
            weights=profile.weight_dtype,
            experts=profile.expert_dtype or profile.weight_dtype,
            kv=profile.kv_dtype,
        ),
        parallel=_parallel(profile),
        efficiency=profile.efficiency,
    )


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
