"""Attention by PyTorch's FlexAttention. It has no ragged block tables, so each layer's visible
blocks are copied side by side first: for models or devices that the others don't serve."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from engine.attention.backend import GroupShape, Prepared
from engine.attention.inputs import (
    Inputs,
    Ints,
    KvWriter,
    Named,
    StepArrays,
    TableCache,
    Visible,
    starts_of,
    step_arrays,
    visible,
)
from engine.core.step import SequenceSlice
from engine.device.layer_marks import LayerMarks
from engine.model.interface import Scores
from kvpool.memory.kv_memory import KvMemory

_TILE = 128
_Mod = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class FlexBackend:
    def __init__(
        self,
        memory: KvMemory,
        shapes: tuple[GroupShape, ...],
        places: Mapping[int, tuple[int, int]],
    ) -> None:
        self._memory, self._places = memory, places
        self._tables = TableCache()
        on_cuda = memory.device.type == "cuda"
        self._run: Callable[..., Any] = flex_attention
        if on_cuda:
            self._run = torch.compile(flex_attention, dynamic=True)

    def prepare(self, slices: Sequence[SequenceSlice], marks: LayerMarks | None = None) -> Prepared:
        layout = self._memory.layout
        step = step_arrays(layout, slices, self._tables)
        named = Named.of(step)
        named.arrays["owners"] = np.repeat(np.arange(len(step.counts)), step.counts)
        for group in range(len(layout.groups)):
            seen = visible(layout, group, step)
            size = layout.block_size
            named.arrays |= {f"{group}.{n}": a for n, a in _keys(step, seen, size).items()}
            blocks = sparse_blocks(step.counts, seen.counts * size)
            named.arrays |= {f"{group}.met": blocks[0], f"{group}.counts": blocks[1]}
        inputs = named.send(self._memory.device)
        masks = [self._mask(inputs, group) for group in range(len(layout.groups))]
        writer = KvWriter(self._memory, self._places, inputs.slots, marks, _store)
        return inputs.prepared(_State(writer, self._run, inputs, masks))

    def _mask(self, inputs: Inputs, group: int) -> BlockMask:
        views = inputs.views
        window = self._memory.layout.groups[group].window
        mod = _mask_mod(
            views["owners"],
            views["positions"],
            views[f"{group}.owners"],
            views[f"{group}.positions"],
            window,
        )
        lengths = (views["positions"].shape[0], views[f"{group}.positions"].shape[0])
        return BlockMask.from_kv_blocks(
            views[f"{group}.counts"][None, None],
            views[f"{group}.met"][None, None],
            BLOCK_SIZE=_TILE,
            mask_mod=mod,
            seq_lengths=lengths,
            compute_q_blocks=False,
        )


def sparse_blocks(query_counts: Ints, key_counts: Ints) -> tuple[Ints, Ints]:
    """The tiles of keys that each tile of queries meets, `[query tiles, most]`, and their number.
    Queries and keys of the slices have the same order."""
    queries, keys = starts_of(query_counts), starts_of(key_counts)
    begins = np.arange(0, queries[-1], _TILE)
    ends = np.minimum(begins + _TILE, queries[-1])
    first = keys[np.searchsorted(queries, begins, side="right") - 1] // _TILE
    last = -(-keys[np.searchsorted(queries, ends, side="left")] // _TILE)
    counts = last - first
    met = np.minimum(first[:, None] + np.arange(int(counts.max())), last.max() - 1)
    return met, counts


def _keys(step: StepArrays, seen: Visible, size: int) -> dict[str, Ints]:
    """The owner of each gathered slot, -1 behind the last token, and its position."""
    counts = seen.counts * size
    owner = np.repeat(np.arange(len(counts)), counts)
    within = np.arange(len(owner)) - starts_of(counts)[owner]
    first = step.starts + step.counts - seen.tokens
    return {
        "blocks": seen.blocks,
        "owners": np.where(within < seen.tokens[owner], owner, -1),
        "positions": first[owner] + within,
    }


def _mask_mod(
    owners: torch.Tensor,
    positions: torch.Tensor,
    key_owners: torch.Tensor,
    key_positions: torch.Tensor,
    window: int | None,
) -> _Mod:
    def seen(_b: torch.Tensor, _h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        near, far = positions[q], key_positions[k]
        found = (owners[q] == key_owners[k]) & (far <= near)
        return found if window is None else found & (far > near - window)

    return seen


@dataclass(frozen=True, slots=True)
class _State:
    writer: KvWriter
    run: Callable[..., Any]
    inputs: Inputs
    masks: list[BlockMask]

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scores: Scores,
    ) -> torch.Tensor:
        held = self.writer.write(layer, key, value)
        keys, values = (self._gather(plane, held.group) for plane in held.blocks)
        out, aux = self.run(
            query,
            keys,
            values,
            score_mod=None if scores.softcap is None else _cap(scores.softcap),
            block_mask=self.masks[held.group],
            scale=scores.scaling,
            enable_gqa=True,
            return_aux=AuxRequest(lse=True),
        )
        if scores.sinks is not None:
            out = out * _kept(aux.lse, scores.sinks)[..., None].to(out.dtype)
        joined: torch.Tensor = out.transpose(1, 2)
        return joined

    def _gather(self, blocks: torch.Tensor, group: int) -> torch.Tensor:
        """`[1, heads, slots, dim]`"""
        picked = blocks.index_select(0, self.inputs.views[f"{group}.blocks"])
        return picked.flatten(0, 1).transpose(0, 1)[None]


def _store(
    key: torch.Tensor,
    value: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    """Without Triton."""
    for plane, fresh in ((keys, key), (values, value)):
        plane.index_copy_(0, slots.long(), fresh.transpose(0, 1))


def _kept(lse: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """The share of the weight that sinks leave, `[1, heads, tokens]`."""
    return torch.sigmoid(lse.float() - sinks.float()[None, :, None])


def _cap(softcap: float) -> Callable[..., torch.Tensor]:
    def capped(score: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        return softcap * torch.tanh(score / softcap)

    return capped
