"""What `plan` is asked about: a bundled shape, a checkpoint's folder, or a hub id."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from cluster.sim.profiles.capacity import STAGE_COUNTS, TENSOR_DEGREES, PlannedModel, Refusals
from cluster.sim.profiles.load import known_refusals, known_shape, model_names
from cluster.sim.profiles.roofline import Precision, precision_of
from cluster.sim.profiles.schema import Dtype
from engine.core.model_shape import ModelShape, read_shape
from engine.model.checkpoint import (
    WeightFile,
    check_dtypes,
    find_config,
    open_weights,
    read_config,
)
from kvrelay.errors import ModelError

_SERVED: tuple[Dtype, ...] = ("float32", "float16", "float8")


def find_facts(model: str, weights: Dtype | None = None, kv: Dtype | None = None) -> PlannedModel:
    """Of a hub id only the configuration is fetched. `weights` and `kv` replace the formats that
    the configuration says. Raises ModelError."""
    facts = _found(model, weights, kv)
    unserved = facts.refusals.refused or _unserved(weights, kv, facts.precision)
    refusals = replace(facts.refusals, refused=unserved)
    return replace(facts, refusals=refusals, dtype=_dtype(weights, facts.precision))


def _dtype(weights: Dtype | None, precision: Precision) -> str:
    if weights is None and precision.weights != "float8":
        return "auto"
    return "float32" if precision.weights == "float32" else "bfloat16"


def _found(model: str, weights: Dtype | None, kv: Dtype | None) -> PlannedModel:
    known = known_shape(model)
    if known is not None:
        precision, refusals = _precision({}, weights, kv), known_refusals(model)
        return PlannedModel.of(known.as_served, precision, refusals)
    folder = _folder(model)
    config, files = read_config(folder), _weights_here(Path(model).expanduser())
    refusals = _refusals(folder, files)
    shape = _shape(config, model, refusals).as_served
    facts = PlannedModel.of(shape, _precision(config, weights, kv), refusals)
    if weights or not files:
        return facts
    return replace(facts, weight_bytes=float(sum(file.data_bytes for file in files)))


def _precision(config: Mapping[str, object], weights: Dtype | None, kv: Dtype | None) -> Precision:
    """As `model.quantization: fp8` does, float8 leaves experts in 16 bits. KV has the dtype of the
    weights, unless they are quantised."""
    stored = precision_of(config)
    dense = weights or stored.weights
    return Precision(
        weights=dense,
        experts="float16" if weights == "float8" else weights or stored.experts,
        kv=kv or ("float32" if dense == "float32" else stored.kv),
    )


def _unserved(weights: Dtype | None, kv: Dtype | None, found: Precision) -> str:
    """Why a worker can't have these formats; empty: it can."""
    if weights not in (None, *_SERVED):
        return (
            f"--weights {weights}: a worker loads weights of 16 or 32 bits, and converts them to "
            "float8 at most (model.quantization: fp8)"
        )
    if kv not in (None, "float8", found.computed):
        return (
            f"--kv {kv}: a worker keeps KV in the dtype of the weights, here {found.computed}, or "
            "as float8 (engine.kv_dtype: fp8)"
        )
    return ""


def _folder(model: str) -> Path:
    try:
        return find_config(model)
    except ModelError as error:
        names = ", ".join(model_names())
        raise ModelError(f"{error}; shapes known by name are {names}") from None


def _refusals(folder: Path, files: tuple[WeightFile, ...]) -> Refusals:
    """By the checks of a worker that starts: they import transformers, which takes seconds."""
    from engine.family.startable import parallel_refusals

    try:
        check_dtypes(folder, files)
        unsplit, unstaged = parallel_refusals(folder, TENSOR_DEGREES, STAGE_COUNTS)
        return Refusals(unsplit=unsplit, unstaged=unstaged)
    except ModelError as error:
        return Refusals(refused=str(error))


def _shape(config: Mapping[str, object], model: str, refusals: Refusals) -> ModelShape:
    try:
        return read_shape(config, model)
    except ModelError as error:
        raise ModelError(refusals.refused or str(error)) from None


def _weights_here(folder: Path) -> tuple[WeightFile, ...]:
    """None where the folder has no weights."""
    if not (folder.is_dir() and list(folder.glob("*.safetensors"))):
        return ()
    return open_weights(folder)
