"""Collation of a pool whose heads lie on several devices: each rank's through a slab of their own.
Runs in rank 0 of the worker that owns the blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch

from kvpool.codec import WireFormat
from kvpool.memory.kv_memory import KvMemory
from kvpool.memory.views import SlabViews, slab_views
from kvpool.pool.map import PoolMap
from kvpool.reslice import End, PlaneSlice
from kvpool.write import Section

Move = Callable[[KvMemory, Section, torch.Tensor], None]
"""Between the pool of one rank and a slab."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Share:
    """What one rank has of a plane: `section` is its own, `heads` are the whole section's."""

    rank: int
    section: Section
    heads: slice


def move_parts(
    memory: KvMemory, section: Section, wire: WireFormat, slab: torch.Tensor, end: End, move: Move
) -> None:
    """At the source out of the pool, at the target into all copies of the heads."""
    whole = slab_views(section, wire, slab)
    for plane, views in zip(section.part.planes, whole, strict=True):
        for share in _shares(memory.map, section, wire, plane, end):
            payload = torch.empty(share.section.nbytes, dtype=torch.uint8, device=slab.device)
            (own,) = slab_views(share.section, wire, payload)
            theirs = _narrow(views, share.heads)
            if end is End.TARGET:
                _copy(theirs, own)
            move(memory.parts[share.rank], share.section, payload)
            if end is End.SOURCE:
                _copy(own, theirs)


def _shares(
    pool: PoolMap, section: Section, wire: WireFormat, plane: PlaneSlice, end: End
) -> Iterator[_Share]:
    group, first = section.part.group, plane.first_head(end)
    copies = pool.copies(group, plane.plane) if end is End.TARGET else 1
    for copy in range(copies):
        for rank in pool.holders(group, plane.plane, copy):
            held = pool.held(group, plane.plane, rank)
            heads = range(max(first, held.start), min(first + plane.heads, held.stop))
            if heads:
                own = heads.start - held.start
                cut = replace(plane, source_head=own, target_head=own, heads=len(heads))
                part = replace(section.part, planes=(cut,))
                yield _Share(
                    rank=rank,
                    section=replace(section, part=part).encoded(wire, 0),
                    heads=slice(heads.start - first, heads.stop - first),
                )


def _narrow(views: SlabViews, heads: slice) -> SlabViews:
    scales = None if views.scales is None else views.scales[:, :, heads]
    return SlabViews(values=views.values[:, :, heads], scales=scales)


def _copy(source: SlabViews, target: SlabViews) -> None:
    target.values.copy_(source.values)
    if source.scales is not None and target.scales is not None:
        target.scales.copy_(source.scales)
