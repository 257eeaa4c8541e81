"""Puts an engine together: load, probe, check, profile, size, allocate."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from engine.activity import Activity, Report, Stage, unheard
from engine.assembly import Assembly
from engine.backends.choice import choose_backend
from engine.backends.recording import record_decode
from engine.checkpoint import Checkpoint
from engine.compiled.build import compile_model
from engine.compiled.padding import sizes
from engine.model import Model, load_model
from engine.options import DEFAULT_OPTIONS, CudaOptions
from engine.parallel.group import Group
from engine.parallel.ranks import ALONE, Ranks, own_layout
from engine.parallel.share import Loaded, check_shares, share_out
from engine.probe import derive_layout
from engine.runner import Engine, EngineFacts
from engine.sampler import prepare_draws
from engine.sizing import EngineLimits
from kvpool.layout import KvLayout
from kvpool.memory.kv_memory import Allocate
from kvrelay.errors import ModelError


def load_engine(
    checkpoint: Checkpoint,
    *,
    device: str,
    dtype: str,
    block_size: int,
    blocks: int | None,
    limits: EngineLimits,
    allocate: Allocate | None = None,
    attention: str = "auto",
    cuda: CudaOptions = DEFAULT_OPTIONS,
    compiled: bool = True,
    ranks: Ranks = ALONE,
    report: Report = unheard,
) -> Engine:
    """`dtype` "auto" is the checkpoint's own; `blocks` None fills the memory that `limits` give.
    `allocate` gives the KV pool's memory, on `device`; None takes plain memory. `attention` is a
    backend of `engine.backends` or "auto". `compiled`: take seconds to make steps faster. All of
    `ranks` call this, for an engine with their share of the model; only rank 0's is used directly.
    `report` hears what is done now.

    Raises ModelError when the family, the files or the memory don't allow serving.
    """
    if torch.device(device).type == "cuda":
        torch.set_float32_matmul_precision("high" if cuda.tf32 else "highest")
    longest = _max_model_len(checkpoint, limits)

    def load_share() -> Loaded:
        return share_out(load_model(checkpoint, device=device, dtype=dtype), ranks.group, longest)

    report(Activity(stage=Stage.LOADS))
    with _memory_errors(device):
        loaded = ranks.in_turn(load_share)
    own_shapes = check_shares(loaded, ranks.group)
    if compiled:
        report(Activity(stage=Stage.COMPILES))
    model = _compiled(loaded.model, limits) if compiled else loaded.model
    kept = "float8_e4m3fn" if cuda.fp8_kv else model.dtype_name
    layout = derive_layout(loaded.shapes, dtype=kept, block_size=block_size)
    own = own_layout(layout, ranks.group)
    assembly = Assembly(
        model=model,
        facts=_facts(checkpoint, layout, model, longest, ranks.group),
        layout=layout,
        own=own,
        backend=choose_backend(attention, model, own, own_shapes),
        limits=limits,
        needs_masks=loaded.needs_masks,
        goes_first=cuda.goes_first,
        ranks=ranks,
    )
    report(Activity(stage=Stage.CHECKS))
    with _memory_errors(device):
        assembly.check(loaded.reference)
        engine = assembly.serving(assembly.sizing(blocks), allocate)
        prepare_draws(model.device, checkpoint.vocab_size)
        if cuda.graphs and model.device.type == "cuda":
            report(Activity(stage=Stage.RECORDS))
        if cuda.graphs:
            record_decode(engine, limits.max_running_requests)
        return engine


def _compiled(model: Model, limits: EngineLimits) -> Model:
    """Ready for decode steps of all sizes, of which each first one would take longer."""
    model = compile_model(model)
    for rows in sizes(limits.max_running_requests):
        model.prepare(rows, rows)
    return model


@contextmanager
def _memory_errors(device: str) -> Iterator[None]:
    """An allocation that fails becomes a ModelError that says what to lower."""
    try:
        yield
    except (RuntimeError, OSError) as error:
        text = str(error)
        out_of_memory = isinstance(error, torch.OutOfMemoryError | OSError)
        if not out_of_memory and "allocate memory" not in text:
            raise
        raise ModelError(
            f"the memory of {device} is too small ({' '.join(text.split())}): lower kv_memory, "
            "memory_fraction or prefill_chunk_tokens"
        ) from error


def _max_model_len(checkpoint: Checkpoint, limits: EngineLimits) -> int:
    own, asked = checkpoint.max_position_embeddings, limits.max_model_len
    if own is None and asked is None:
        raise ModelError(
            f"{checkpoint.path}/config.json names no context length: set max_model_len"
        )
    if own is not None and asked is not None and asked > own:
        raise ModelError(f"max_model_len is {asked}, but {checkpoint.name} ends at {own}: lower it")
    found = asked if asked is not None else own
    assert found is not None
    return found


def _facts(
    checkpoint: Checkpoint, layout: KvLayout, model: Model, limit: int, group: Group | None
) -> EngineFacts:
    return EngineFacts(
        architecture=checkpoint.architecture,
        vocab_size=checkpoint.vocab_size,
        max_model_len=limit,
        fingerprint=layout.logical_fingerprint(checkpoint.fingerprint_source),
        device=_device_name(model.device) + (f", {group.size} ranks" if group else ""),
        dtype=model.dtype_name,
    )


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return f"{device} ({torch.cuda.get_device_name(device)})"
    return str(device)
