"""Attention by our own Triton kernels: steps are prepared on the CPU and sent in one copy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from engine.attention.backend import GroupShape, Prepared
from engine.attention.inputs import (
    Inputs,
    Ints,
    KvWriter,
    LayerKv,
    Named,
    StepArrays,
    TableCache,
    step_arrays,
)
from engine.attention.triton.launch import (
    DeviceWork,
    Parts,
    attend,
    part_elements,
    rotate_and_store,
    store,
)
from engine.attention.triton.work import (
    CHUNK,
    DECODE,
    Tiling,
    chunk_tiling,
    decode_tiling,
    divide,
    most_parts,
    query_tiles,
)
from engine.core.step import SequenceSlice
from engine.device.layer_marks import LayerMarks
from engine.model.interface import Scores
from kvpool.memory.kv_memory import KvMemory


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """Query tiles of one kind: decode rows or chunks."""

    work: DeviceWork
    tiling: Tiling
    joined_rows: int


@dataclass(frozen=True, slots=True)
class TritonState:
    """One step's attention. `launches` are those of the layer groups. `is_padded`: some rows belong
    to no query tile. Implements AttentionState and Rotates."""

    writer: KvWriter
    launches: Sequence[Sequence[Launch]]
    parts: Parts
    is_padded: bool = False
    _zeros: dict[tuple[int, ...], torch.Tensor] = field(default_factory=dict)

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scores: Scores,
    ) -> torch.Tensor:
        held = self.writer.write(layer, key, value)
        return self._attended(query[0].transpose(0, 1), held, scores)

    def attend_rotating(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        scores: Scores,
    ) -> torch.Tensor:
        held = self.writer.planes(layer)
        slots = self.writer.slots[held.group]
        new = (query[0], key[0], value[0])
        asked = rotate_and_store(*new, cos, sin, held.keys, held.values, slots)
        self.writer.wrote(layer)
        return self._attended(asked, held, scores)

    def _attended(self, asked: torch.Tensor, held: LayerKv, scores: Scores) -> torch.Tensor:
        """`asked` `[tokens, heads, dim]`."""
        out = self._out(asked, (1, *asked.shape[:2], held.values.shape[2]))
        for launch in self.launches[held.group]:
            attend(
                asked,
                held.keys,
                held.values,
                out[0],
                launch.work,
                self.parts,
                scores,
                launch.tiling,
                block_size=held.block_size,
                joined_rows=launch.joined_rows,
            )
        return out

    def _out(self, like: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        """Padded rows stay zero, and one tensor serves all layers: the stream reads what a layer
        wrote before the next one writes."""
        if not self.is_padded:
            return like.new_empty(shape)
        if shape not in self._zeros:
            self._zeros[shape] = like.new_zeros(shape)
        return self._zeros[shape]


_LEAST_KEYS = 256
"""A program gets at least this many keys: finer cuts cost more in joins than they gain."""
_INTERPRETED_PROCESSORS = 4


class TritonBackend:
    """`places` is layer |-> (layer group, index in it), `shapes` are the layer groups'."""

    def __init__(
        self,
        memory: KvMemory,
        shapes: tuple[GroupShape, ...],
        places: Mapping[int, tuple[int, int]],
        *,
        decode: Tiling = DECODE,
        chunk: Tiling = CHUNK,
    ) -> None:
        self.memory, self.shapes, self.places = memory, shapes, places
        self._decode, self._chunk = decode, chunk
        self._processors = _processors(memory.device)
        self._tables = TableCache()
        self._decodes = [self._decode_tiling(g) for g in range(len(shapes))]
        self.parts = self._new_parts()

    def prepare(self, slices: Sequence[SequenceSlice], marks: LayerMarks | None = None) -> Prepared:
        named, tilings = self.arrays(self.step(slices))
        return self.prepared(named.send(self.memory.device), tilings, marks)

    def step(self, slices: Sequence[SequenceSlice]) -> StepArrays:
        return step_arrays(self.memory.layout, slices, self._tables)

    def arrays(self, step: StepArrays) -> tuple[Named, dict[str, Tiling]]:
        """All arrays for the device, the block tables last; and # launch |-> tiling"""
        named, tilings, begin = Named.of(step), {}, 0
        for g, group in enumerate(step.groups):
            for kind, chosen in _kinds(step):
                tiling = self.tiling(g, int(step.counts[chosen].max()))
                tilings[f"{g}.{kind}"] = tiling
                work = self._work(g, step, chosen, group.table_starts + begin, tiling)
                named.arrays |= {f"{g}.{kind}.{name}": array for name, array in work.items()}
            begin += len(group.tables)
        tables = [group.tables for group in step.groups]
        named.arrays["tables"] = tables[0] if len(tables) == 1 else np.concatenate(tables)
        return named, tilings

    def programs(self, tiling: Tiling) -> int:
        return self._processors * tiling.per_processor

    def prepared(
        self,
        inputs: Inputs,
        tilings: Mapping[str, Tiling],
        marks: LayerMarks | None,
        rows: int | None = None,
    ) -> Prepared:
        """`rows`: use this many rows, some of which may be padding."""
        slots = [group[:rows] for group in inputs.slots]
        writer = KvWriter(self.memory, self.places, slots, marks, store)
        launches = [
            [
                self._launch(g, name, inputs.views, tiling)
                for name, tiling in tilings.items()
                if name.startswith(f"{g}.")
            ]
            for g in range(len(self.shapes))
        ]
        state = TritonState(writer, launches, self.parts, is_padded=rows is not None)
        return inputs.prepared(state, rows)

    def tiling(self, group: int, tokens: int) -> Tiling:
        if tokens == 1:
            return self._decodes[group]
        return chunk_tiling(tokens, *self._sizes(group), self._chunk)

    def _decode_tiling(self, group: int) -> Tiling:
        return decode_tiling(*self._sizes(group), self._decode)

    def _sizes(self, group: int) -> tuple[int, int, int]:
        shape = self.shapes[group]
        return shape.group, max(shape.dim, shape.value_dim), self.memory.layout.element_bytes

    def _work(
        self, group: int, step: StepArrays, chosen: slice, table_starts: Ints, tiling: Tiling
    ) -> dict[str, Ints]:
        shape = self.shapes[group]
        tiles = query_tiles(
            rows=step.rows[chosen],
            counts=step.counts[chosen],
            positions=step.starts[chosen],
            tables=table_starts[chosen],
            tile_tokens=tiling.rows // shape.group,
            window=shape.window,
        )
        work = divide(
            tiles,
            kv_heads=shape.kv_heads,
            programs=self.programs(tiling),
            key_tile=tiling.keys,
            least_tiles=_LEAST_KEYS // tiling.keys,
        )
        return {
            "queries": tiles.rows,
            "pieces": work.pieces,
            "starts": work.starts,
            "joins": work.joins,
        }

    def _launch(
        self, group: int, name: str, views: Mapping[str, torch.Tensor], tiling: Tiling
    ) -> Launch:
        parts = ("queries", "pieces", "starts", "joins")
        work = DeviceWork(tables=views["tables"], **{p: views[f"{name}.{p}"] for p in parts})
        is_decode = name.endswith(".decode")
        rows = self.shapes[group].group if is_decode else tiling.rows
        return Launch(work=work, tiling=tiling, joined_rows=rows)

    def _new_parts(self) -> Parts:
        """Large enough for any launch."""
        values, sizes = 0, 0
        for group, shape in enumerate(self.shapes):
            for tokens in (1, self._chunk.rows):
                tiling = self.tiling(group, tokens)
                slots = most_parts(self.programs(tiling))
                found = part_elements(tiling.rows, shape.value_dim, slots)
                values, sizes = max(values, found[0]), max(sizes, found[1])
        device = self.memory.device
        return Parts(
            values=torch.empty(values, dtype=torch.float32, device=device),
            sizes=torch.empty(sizes, dtype=torch.float32, device=device),
        )


def _kinds(step: StepArrays) -> list[tuple[str, slice]]:
    kinds = [("decode", slice(0, step.decodes)), ("chunk", slice(step.decodes, None))]
    return [(name, chosen) for name, chosen in kinds if len(step.counts[chosen])]


def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        return _INTERPRETED_PROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
