"""From a profile's YAML file to step times and what they cost, or to one line that says what is
wrong. Files and folders that a profile names are relative to `data`, by default its own folder."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import assert_never

from pydantic import ValidationError

from cluster.config.load import Node, describe, read_yaml
from cluster.sim.profiles.distserve import distserve_times
from cluster.sim.profiles.dynamo import dynamo_times
from cluster.sim.profiles.known_names import known_device, shape_of
from cluster.sim.profiles.roofline import Parallel, Precision, RooflineTimes, roofline_times
from cluster.sim.profiles.schema import (
    KINDS,
    Device,
    DistServeProfile,
    DynamoProfile,
    LinearProfile,
    Links,
    Power,
    Profile,
    RooflineProfile,
    SiliconProfile,
    TableProfile,
)
from cluster.sim.profiles.silicon import silicon_times
from cluster.sim.profiles.table import table_times
from engine.latency import StepTimes
from engine.latency_fit import LinearTimes
from kvrelay.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class HardwareProfile:
    """Of the `devices` that share one copy of the model. Prices, power and memory are theirs
    together; None: neither the file nor its device says."""

    name: str
    times: StepTimes
    devices: int
    price_per_hour: float | None
    power_w: Power | None
    memory_bytes: int | None
    links: Links | None


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
        price_per_hour=price,
        power_w=power,
        memory_bytes=memory_bytes,
        links=profile.links or (device.links if device else None),
    )


def _devices(profile: Profile) -> int:
    if isinstance(profile, RooflineProfile):
        return _parallel(profile).devices
    return profile.devices


def _power_of(device: Device, count: int) -> Power:
    return Power(idle=count * device.power_w.idle, peak=count * device.power_w.peak)


def _times(profile: Profile, device: Device | None, data: Path) -> StepTimes:
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


def _roofline(profile: RooflineProfile, device: Device | None, data: Path) -> RooflineTimes:
    if device is None:
        raise ConfigError(f"{profile.name}: device: missing, a roofline needs a known one")
    return roofline_times(
        device,
        shape_of(profile.model, data),
        precision=Precision(
            weights=profile.weight_dtype,
            experts=profile.expert_dtype or profile.weight_dtype,
            kv=profile.kv_dtype,
        ),
        parallel=_parallel(profile),
        efficiency=profile.efficiency,
    )
