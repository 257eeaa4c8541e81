"""Decode steps recorded once for some batch sizes, and replayed. The device gets all kernels of a
step at once, so Python's time per kernel doesn't matter.

The inputs of decode steps are always at the same place, because a recorded graph reads them there.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence

import numpy as np
import torch

from engine.attention.backend import Prepared
from engine.attention.inputs import Inputs, Named, StepPacking
from engine.attention.triton.backend import TritonBackend
from engine.attention.triton.work import most_pieces
from engine.core.step import SequenceSlice
from engine.model.model import Model

_NO_SLOT = -1
"""The slot of unused rows takes no KV, and no query tile includes them."""


class StaticDecode:
    """Steps of up to `rows` sequences with one token each, of up to `most_tokens` tokens."""

    def __init__(self, backend: TritonBackend, rows: int, most_tokens: int) -> None:
        self._backend, self._rows = backend, rows
        self._all_rows = np.arange(rows)
        slots = {f"{g}.slots": _NO_SLOT for g in range(len(backend.shapes))}
        self._filling = {"token_ids": 0, "positions": 0, **slots}
        self._tilings = {f"{g}.decode": backend.tiling(g, 1) for g in range(len(backend.shapes))}
        self._packing = StepPacking(self._shapes(most_tokens))
        elements, device = self._packing.elements, backend.memory.device
        self._buffer = torch.zeros(elements, dtype=torch.int32, device=device)
        self._inputs = Inputs(self._packing.views(self._buffer))

    def load(self, slices: Sequence[SequenceSlice], token_ids: torch.Tensor | None = None) -> None:
        """Loads the inputs of the next steps. `token_ids` `[slices]` replace the slices' own."""
        step = self._backend.step(slices)
        assert step.decodes == len(slices) <= self._rows, (step.decodes, self._rows)
        named, _ = self._backend.arrays(step)
        arrays = named.arrays | {"logit_rows": self._all_rows}
        host = self._packing.pack(arrays, pinned=self._buffer.is_cuda, filling=self._filling)
        self._buffer[: host.numel()].copy_(host, non_blocking=True)
        if token_ids is not None:
            self._inputs.views["token_ids"][: len(slices)].copy_(token_ids)

    def prepared(self, rows: int) -> Prepared:
        """Over the first `rows` rows; each has logits."""
        return self._backend.prepared(self._inputs, self._tilings, None, rows)

    def _shapes(self, most_tokens: int) -> dict[str, tuple[int, ...]]:
        """In the order in which the backend names its arrays."""
        backend, rows = self._backend, self._rows
        groups = range(len(backend.shapes))
        shapes: dict[str, tuple[int, ...]] = dict.fromkeys(Named.inputs(len(groups)), (rows,))
        for g in groups:
            programs = backend.programs(self._tilings[f"{g}.decode"])
            pieces = most_pieces(rows, backend.shapes[g].kv_heads, programs)
            shapes |= {
                f"{g}.decode.queries": (rows, 4),
                f"{g}.decode.pieces": (pieces, 5),
                f"{g}.decode.starts": (programs + 1,),
                f"{g}.decode.joins": (programs, 4),
            }
        blocks = backend.memory.layout.blocks_for(most_tokens)
        return {**shapes, "tables": (rows * blocks * len(groups),)}


Run = Callable[[], torch.Tensor]
_Record = Callable[[Run], Run]
"""Turns a run into one that does the same over the same memory, at once."""

_WARM = 2


def bucket_sizes(most: int) -> tuple[int, ...]:
    """Batch sizes to record: at most half of the rows are padding, from 16 on a third."""
    sizes, size = [], 1
    while size < most:
        sizes.append(size)
        between = size + size // 2
        if size >= 16 and between < most:
            sizes.append(between)
        size *= 2
    return (*sizes, most)


class DecodeGraphs:
    """`inputs` have room for `most` sequences."""

    def __init__(self, model: Model, inputs: StaticDecode, most: int, record: _Record) -> None:
        self._inputs = inputs
        self._sizes = bucket_sizes(most)
        self._replays: dict[int, Run] = {}
        for size in reversed(self._sizes):  # the largest first: the others fit into its memory
            self._replays[size] = record(self._forward(model, size))

    def has(self, slices: Sequence[SequenceSlice]) -> bool:
        fits = len(slices) <= self._sizes[-1]
        return fits and not any(len(s.token_ids) > 1 or s.scoring for s in slices)

    def logits(
        self, slices: Sequence[SequenceSlice], token_ids: torch.Tensor | None = None
    ) -> torch.Tensor:
        """See Replays."""
        self._inputs.load(slices, token_ids)
        rows = self.replay(len(slices))[: len(slices)]
        if all(s.samples for s in slices):
            return rows
        return rows[[i for i, s in enumerate(slices) if s.samples]]

    def replay(self, sequences: int) -> torch.Tensor:
        """The last loaded step, with this many sequences; logits `[rows, vocab]`, including
        padding."""
        return self._replays[self._sizes[bisect_left(self._sizes, sequences)]]()

    def _forward(self, model: Model, size: int) -> Run:
        def run() -> torch.Tensor:
            step = self._inputs.prepared(size)
            return model.forward(step.token_ids, step.positions, step.logit_rows, step.state)

        return run


class CudaRecorder:
    """Records CUDA graphs on `device`. They share memory, so only one of them runs at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._beside = torch.cuda.Stream(device)

    def __call__(self, run: Run) -> Run:
        with torch.cuda.device(self._device):
            self._warm_up(run)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(
                graph, pool=self._pool, stream=self._beside, capture_error_mode="thread_local"
            ):
                out = run()

        def replay() -> torch.Tensor:
            graph.replay()
            return out

        return replay

    def _warm_up(self, run: Run) -> None:
        usual = torch.cuda.current_stream(self._device)
        self._beside.wait_stream(usual)
        with torch.cuda.stream(self._beside):
            for _ in range(_WARM):
                run()
        usual.wait_stream(self._beside)
