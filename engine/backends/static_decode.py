"""The inputs of decode steps always at the same place, as a recorded graph reads them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from engine.backends.backend import Prepared
from engine.backends.inputs import Inputs, Named
from engine.backends.packing import Packing
from engine.backends.step_arrays import Ints
from engine.backends.triton import TritonBackend
from engine.backends.work import most_pieces
from engine.step import SequenceSlice

_PADDING = {"token_ids": 0, "positions": 0, "slots": -1}
"""What rows hold that are no sequence's: a slot of -1 takes no KV, and no query tile has them."""


class StaticDecode:
    """Steps of up to `rows` sequences of a token each, of up to `most_tokens` tokens."""

    def __init__(self, backend: TritonBackend, rows: int, most_tokens: int) -> None:
        self._backend, self._rows = backend, rows
        self._tilings = {f"{g}.decode": backend.tiling(g, 1) for g in range(len(backend.shapes))}
        self._packing = Packing(self._shapes(most_tokens))
        elements, device = self._packing.elements, backend.memory.device
        self._buffer = torch.zeros(elements, dtype=torch.int32, device=device)
        self._inputs = Inputs(self._packing.views(self._buffer))

    def load(self, slices: Sequence[SequenceSlice], token_ids: torch.Tensor | None = None) -> None:
        """For the steps that are run next. `token_ids` `[slices]`: instead of the slices' own."""
        step = self._backend.step(slices)
        assert step.decodes == len(slices) <= self._rows, (step.decodes, self._rows)
        named, _ = self._backend.arrays(step)
        padded = {name: self._padded(name, array) for name, array in named.arrays.items()}
        host = self._packing.pack(padded, pinned=self._buffer.is_cuda)
        self._buffer[: host.numel()].copy_(host, non_blocking=True)
        if token_ids is not None:
            self._inputs.views["token_ids"][: len(slices)].copy_(token_ids)

    def prepared(self, rows: int) -> Prepared:
        """Over the first `rows` rows; the logits are those of each."""
        return self._backend.prepared(self._inputs, self._tilings, None, rows)

    def _padded(self, name: str, array: Ints) -> Ints:
        if name == "logit_rows":
            return np.arange(self._rows)
        filling = _PADDING.get(name.rpartition(".")[2])
        if filling is None:
            return array
        return np.concatenate([array, np.full(self._rows - len(array), filling)])

    def _shapes(self, most_tokens: int) -> dict[str, tuple[int, ...]]:
        """In the order that the backend names arrays in."""
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
