"""The bundled library: published models' shapes and devices' data sheets, by name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from importlib import resources
from pathlib import Path

import yaml

from cluster.sim.profiles.schema import Device
from engine.checkpoint import read_config
from engine.model_shape import ModelShape, read_shape
from kvrelay.errors import ConfigError

Node = Mapping[str, object]


@cache
def _bundled(file: str) -> dict[str, Node]:
    text = resources.files("cluster.sim.profiles.known").joinpath(file).read_text("utf-8")
    found: dict[str, Node] = yaml.safe_load(text)
    return found


@cache
def known_device(name: str) -> Device:
    """Raises ConfigError, with the names there are."""
    held = _bundled("devices.yaml")
    if name not in held:
        raise ConfigError(f"device {name}: unknown, expected one of {', '.join(held)}")
    return Device.model_validate_json(json.dumps(held[name]))


def model_names() -> list[str]:
    return list(_bundled("models.yaml"))


@cache
def known_shape(name: str) -> ModelShape | None:
    """None: no bundled shape has this name."""
    held = _bundled("models.yaml")
    return read_shape(held[name], name) if name in held else None


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
