"""Decode steps recorded once for each of some batch sizes, and replayed: the device gets all of a
step's kernels at once, so Python's time per kernel no longer shows."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence

import torch

from engine.backends.static_decode import StaticDecode
from engine.model import Model
from engine.step import SequenceSlice

Run = Callable[[], torch.Tensor]
Record = Callable[[Run], Run]
"""Makes of a run one that does the same over the same memory, at once."""

_WARM = 2


def bucket_sizes(most: int) -> tuple[int, ...]:
    """Batch sizes that are recorded: half of the rows at most are padding, from 16 on a third."""
    sizes, size = [], 1
    while size < most:
        sizes.append(size)
        between = size + size // 2
        if size >= 16 and between < most:
            sizes.append(between)
        size *= 2
    return (*sizes, most)


class DecodeGraphs:
    """`inputs` are large enough for `most` sequences."""

    def __init__(self, model: Model, inputs: StaticDecode, most: int, record: Record) -> None:
        self._inputs = inputs
        self._sizes = bucket_sizes(most)
        self._replays: dict[int, Run] = {}
        for size in reversed(self._sizes):  # the largest first: the others fit into its memory
            self._replays[size] = record(self._forward(model, size))

    def logits(
        self, slices: Sequence[SequenceSlice], token_ids: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        """Of the slices that sample; None where the step is none of those recorded. Overwritten by
        the next step. `token_ids`: see Replays."""
        if len(slices) > self._sizes[-1] or any(len(s.token_ids) > 1 or s.scoring for s in slices):
            return None
        self._inputs.load(slices, token_ids)
        rows = self.replay(len(slices))[: len(slices)]
        if all(s.samples for s in slices):
            return rows
        return rows[[i for i, s in enumerate(slices) if s.samples]]

    def replay(self, sequences: int) -> torch.Tensor:
        """The step loaded last, of so many; logits `[rows, vocab]`, of padding too."""
        return self._replays[self._sizes[bisect_left(self._sizes, sequences)]]()

    def _forward(self, model: Model, size: int) -> Run:
        def run() -> torch.Tensor:
            step = self._inputs.prepared(size)
            return model.forward(step.token_ids, step.positions, step.logit_rows, step.state)

        return run


class CudaRecorder:
    """Records CUDA graphs on `device`, which share their memory: only one of them runs at a
    time."""

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
