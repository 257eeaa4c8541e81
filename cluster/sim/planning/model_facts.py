"""What `plan` is asked about: a bundled shape, a checkpoint's folder, or a hub id."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from cluster.sim.profiles.capacity import PlannedModel
from cluster.sim.profiles.load import known_shape, model_names
from cluster.sim.profiles.roofline import Precision, precision_of
from cluster.sim.profiles.schema import Dtype
from engine.core.model_shape import read_shape
from engine.model.checkpoint import find_config, open_weights
from kvrelay.errors import ModelError


def find_facts(model: str, weights: Dtype | None = None, kv: Dtype | None = None) -> PlannedModel:
    """Of a hub id only the configuration is fetched. `weights` and `kv` replace the formats that
    the configuration says. Raises ModelError."""
    known = known_shape(model)
    config = {} if known else _config(model)
    stored = precision_of(config)
    precision = Precision(
        weights=weights or stored.weights,
        experts=weights or stored.experts,
        kv=kv or stored.kv,
    )
    facts = PlannedModel.of(known or read_shape(config, model), precision)
    held = None if known or weights else _weights_here(Path(model).expanduser())
    return facts if held is None else replace(facts, weight_bytes=held)


def _config(model: str) -> dict[str, object]:
    try:
        return find_config(model)
    except ModelError as error:
        names = ", ".join(model_names())
        raise ModelError(f"{error}; shapes known by name are {names}") from None


def _weights_here(folder: Path) -> float | None:
    if not (folder.is_dir() and list(folder.glob("*.safetensors"))):
        return None
    return float(sum(file.data_bytes for file in open_weights(folder)))
