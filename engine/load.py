"""Puts an engine together: load, probe, check, profile, size, allocate.

Draft engines check and measure the loaded model; then one engine serves. Its decode steps are
recorded as CUDA graphs if its backend and its model allow it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch

from engine.assembly import Assembly
from engine.attention.choosing.choice import choose_backends
from engine.checks.self_check import Loaded
from engine.compiled.build import Expected, compile_model, expected_logits
from engine.compiled.fp8 import check_fp8, in_fp8
from engine.compiled.merging import linears
from engine.core.activity import ReportActivity, Stage, StartActivity, unheard
from engine.core.options import DEFAULT_OPTIONS, CudaOptions
from engine.core.sizing import (
    EngineLimits,
)
from engine.kept_start import KeptStart, Start, kept_start, written
from engine.model.checkpoint import Checkpoint, eos_token_ids
from engine.model.kv_layout import derive_layout
from engine.model.model import Model
from engine.model.packed_linear import sizes
from engine.parallel.opening import OwnRank
from engine.parallel.ranks import (
    ALONE,
    Ranks,
    own_layout,
)
from engine.recording import record_decode
from engine.runner import Engine, EngineFacts
from engine.sampling.grammars import Grammars, open_grammars
from engine.sampling.sampler import prepare_draws
from kvpool.core.layout.layout import KvLayout
from kvpool.memory.kv_memory import Allocate
from kvrelay.errors import ModelError
from kvrelay.gc_pauses import paused

_FP32_ANGLES = (5, 19)


def set_matmul_precision(*, tf32: bool) -> None:
    """Of fp32 on CUDA. Raises ModelError where that would blur rotary angles: in older versions of
    transformers they are products of matrices."""
    if tf32:
        _check_angles()
    torch.set_float32_matmul_precision("high" if tf32 else "highest")


def _check_angles() -> None:
    import transformers  # takes a second, which other starts can do without

    found = transformers.__version__
    if tuple(map(int, found.split(".")[:2])) < _FP32_ANGLES:
        raise ModelError(
            f"engine.matmul_precision: high needs transformers {_FP32_ANGLES[0]}.{_FP32_ANGLES[1]} "
            f"or later, and this is {found}, which would blur rotary angles: upgrade it, or use "
            "highest"
        )


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
    report: ReportActivity = unheard,
    reuses_starts: bool = False,
) -> Engine:
    """`dtype` "auto" is the checkpoint's own; `blocks` None fills the memory that `limits` give.
    `allocate` gives the KV pool's memory, on `device`; None takes plain memory. `attention` is a
    backend of `engine.attention` or "auto". `compiled`: take seconds to make steps faster. All of
    `ranks` call this, for an engine with their share of the model; only rank 0's is used directly.
    `report` is called with each stage. `reuses_starts`: what an earlier start kept is used, where
    that is possible; the engine's model may then have no code of its own.

    Raises ModelError when the family, the files or the memory don't allow serving.
    """
    if cuda.fp8_products:
        check_fp8(torch.device(device))
    if torch.device(device).type == "cuda":
        set_matmul_precision(tf32=cuda.tf32)
    order = _Order(
        checkpoint=checkpoint,
        device=device,
        dtype=dtype,
        block_size=block_size,
        longest=_max_model_len(checkpoint, limits),
        limits=limits,
        attention=attention,
        cuda=cuda,
        compiled=compiled,
        ranks=ranks,
        report=report,
    )
    report(StartActivity(stage=Stage.LOADS))
    place = order.kept_start() if reuses_starts else None
    assembly = None if place is None else order.as_kept(place)
    assembly = assembly or order.by_transformers(place)
    with _memory_errors(device):
        engine = assembly.serving(assembly.sizing(blocks), allocate)
        prepare_draws(assembly.model.device, checkpoint.vocab_size)
        engine.grammars = _grammars(checkpoint)
        if cuda.graphs and assembly.model.device.type == "cuda":
            report(StartActivity(stage=Stage.RECORDS))
        if cuda.graphs:
            record_decode(engine, limits.max_running_requests)
        return engine


@dataclass(frozen=True, slots=True, kw_only=True)
class _Order:
    """What is to be loaded, and how. `longest`: tokens of the longest sequence."""

    checkpoint: Checkpoint
    device: str
    dtype: str
    block_size: int
    longest: int
    limits: EngineLimits
    attention: str
    cuda: CudaOptions
    compiled: bool
    ranks: Ranks
    report: ReportActivity

    def kept_start(self) -> KeptStart | None:
        """None: this start needs transformers' code whatever earlier ones kept."""
        device = torch.device(self.device)
        if not self.compiled or device.type != "cpu" or self.ranks.own is not None:
            return None
        return kept_start(self.checkpoint, device, self.dtype, self.longest)

    def as_kept(self, place: KeptStart) -> Assembly | None:
        """None: nothing is kept, or its logits are not those of this checkpoint."""
        start = place.read()
        try:
            return None if start is None else self._checked(start.loaded, start.expected)
        except (ModelError, RuntimeError) as error:
            place.drop(error)
            return None

    def by_transformers(self, place: KeptStart | None) -> Assembly:
        """Keeps what it learns in `place`. Raises ModelError."""
        with paused():
            from engine.family.read_weights import plain_sources
            from engine.family.share import check_share, load_share

        own = self.ranks.own
        load = partial(load_share, self.checkpoint, device=self.device, dtype=self.dtype, own=own)
        with _memory_errors(self.device):
            loaded = check_share(self.ranks.together(load), self.longest, own)
        if place is None:
            return self._checked(loaded, None)
        start = Start(loaded=loaded, expected=expected_logits(loaded.model))
        sources = plain_sources(loaded.model.module, self.checkpoint.weights)
        layers = (found.module for found in linears(loaded.model.module))
        content = None if sources is None else written(start, layers, sources)
        del layers  # packing frees each layer's weights, which nothing else may hold
        assembly = self._checked(loaded, start.expected)
        if content is not None and assembly.model.flat is not None:
            place.keep(content)
        return assembly

    def _checked(self, loaded: Loaded, expected: Expected | None) -> Assembly:
        """Raises ModelError if its logits are not those that are expected."""
        if self.compiled:
            self.report(StartActivity(stage=Stage.COMPILES))
        model = self._made_fast(loaded.model, expected)
        kept = "float8_e4m3fn" if self.cuda.fp8_kv else model.dtype_name
        layout = derive_layout(loaded.shapes, dtype=kept, block_size=self.block_size)
        own_rank = self.ranks.own
        own = own_layout(layout, own_rank, None if model.stage is None else model.layers)
        first, *others = choose_backends(self.attention, model, own, loaded.own)
        assembly = Assembly(
            model=model,
            facts=_facts(self.checkpoint, layout, model, self.longest, own_rank),
            layout=layout,
            own=own,
            backend=first,
            limits=self.limits,
            needs_masks=loaded.needs_masks,
            goes_first=self.cuda.goes_first,
            records=self.cuda.graphs,
            ranks=self.ranks,
        )
        self.report(StartActivity(stage=Stage.CHECKS))
        with _memory_errors(self.device):
            assembly.check(loaded.reference)
            return assembly.fastest_of(others, loaded.reference)

    def _made_fast(self, model: Model, expected: Expected | None) -> Model:
        """Prepares decode steps of all sizes, the first of which would take longer otherwise."""
        fp8 = self.cuda.fp8_products
        if not self.compiled:
            return in_fp8(model) if fp8 else model
        model = compile_model(model, fp8=fp8, expected=expected)
        for rows in sizes(self.limits.max_running_requests):
            model.prepare(rows, rows)
        return model


def _grammars(checkpoint: Checkpoint) -> Grammars:
    eos_ids = eos_token_ids(checkpoint.path)
    return open_grammars(checkpoint.path, checkpoint.vocab_size, eos_ids)


@contextmanager
def _memory_errors(device: str) -> Iterator[None]:
    """An allocation that fails becomes a ModelError that says which setting to lower."""
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
    checkpoint: Checkpoint, layout: KvLayout, model: Model, limit: int, own: OwnRank | None
) -> EngineFacts:
    return EngineFacts(
        architecture=checkpoint.architecture,
        vocab_size=checkpoint.vocab_size,
        max_model_len=limit,
        fingerprint=layout.logical_fingerprint(checkpoint.fingerprint_source),
        device=_device_name(model.device) + (f", {own.grid}" if own else ""),
        dtype=model.dtype_name,
    )


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return f"{device} ({torch.cuda.get_device_name(device)})"
    return str(device)
