"""Reads a piece of a handoff straight out of a peer's pool, without a slab. Runs in the receiver,
the worker that owns the target's blocks. The peer's pool is one flat memory; ours may lie apart."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch

from kvpool.core.layout.layout import KvLayout
from kvpool.core.layout.shards import End, GroupSlice, PlaneSlice, reslice
from kvpool.core.transfer.piece import PairedRun, paired_runs
from kvpool.core.transfer.pool_map import KvFacts, PoolMap
from kvpool.core.transfer.write import Side, SlabSection, SlabWrite
from kvpool.memory.kv_memory import KvMemory
from kvpool.memory.views import row_index
from kvpool.transport.peer.base import Connection, Read, RegionName
from kvrelay.errors import ConfigError, PeerError


def fetch(
    memory: KvMemory,
    target: Side,
    connection: Connection,
    kv: KvFacts,
    source: Side,
    write: SlabWrite,
) -> None:
    """Every head is copied, from the peer's rank that holds it to ours. Copies within a device are
    done once the caller has waited (KvMemory.settle), others on return. Raises PeerError."""
    theirs = _map_of(memory.layout, kv.block_size, kv.blocks, kv.ranks)
    region = RegionName(kv.region)
    window = connection.window(region)
    if window is None:
        connection.read_many([*reads_of(memory, target, theirs, region, source, write)])
        return
    if window.numel() != theirs.nbytes:
        raise PeerError(f"the pool has {window.numel()} bytes, not {theirs.nbytes} as announced")
    _copy(memory, target, KvMemory.over(theirs, window), source, write)


@lru_cache(maxsize=64)
def _map_of(layout: KvLayout, block_size: int, blocks: int, ranks: int) -> PoolMap:
    """The map of a peer's pool. Raises PeerError."""
    found = PoolMap(layout=replace(layout, block_size=block_size), blocks=blocks, ranks=ranks)
    try:
        assert found.parts
    except ConfigError as error:
        raise PeerError(f"a pool of {ranks} ranks: {error}") from error
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shared:
    """The layers and heads that one rank of the peer and one of our ranks share."""

    theirs: int
    ours: int
    part: GroupSlice


def _shared(theirs: PoolMap, ours: PoolMap, section: SlabSection) -> Iterator[_Shared]:
    """Of the section's layers. A rank of the peer has all."""
    asked = section.part
    for shared in _shared_in_group(theirs, ours, asked.group):
        part = shared.part
        first = max(asked.source_layer, part.source_layer)
        end = min(asked.source_layer + asked.layers, part.source_layer + part.layers)
        if first < end:
            own = part.target_layer + first - part.source_layer
            part = replace(part, source_layer=first, target_layer=own, layers=end - first)
            yield replace(shared, part=part)


@lru_cache(maxsize=64)
def _shared_in_group(theirs: PoolMap, ours: PoolMap, group: int) -> tuple[_Shared, ...]:
    assert not theirs.stages, "a pool that lies apart is not read"
    found = []
    for source, their_shard in enumerate(theirs.shards):
        for target, our_shard in enumerate(ours.shards):
            parts = [p for p in reslice(their_shard, our_shard) if p.group == group]
            found += [_Shared(theirs=source, ours=target, part=p) for p in parts]
    return tuple(found)


def _copy(memory: KvMemory, target: Side, peer: KvMemory, source: Side, write: SlabWrite) -> None:
    on_device = memory.device.type == peer.device.type == "cuda"
    copy = _copy_at_once if on_device else _copy_runs
    for section in write.sections:
        copy(memory, target, peer, source, section)


def _copy_at_once(
    memory: KvMemory, target: Side, peer: KvMemory, source: Side, section: SlabSection
) -> None:
    """One launch per plane and pair of ranks; all use the same slots on the device."""
    from kvpool.memory.triton import copy_planes, send_slots

    group = section.part.group
    taken, placed = (
        row_index(side.tables[group], section, side.block_size) for side in (source, target)
    )
    slots = send_slots(taken, placed, memory.device)
    for shared in _shared(peer.map, memory.map, section):
        ours = _planes(memory.parts[shared.ours], shared.part, End.TARGET)
        theirs = _planes(peer.parts[shared.theirs], shared.part, End.SOURCE)
        copy_planes(theirs, ours, slots)


def _copy_runs(
    memory: KvMemory, target: Side, peer: KvMemory, source: Side, section: SlabSection
) -> None:
    """One strided copy per run, plane and pair of ranks covers all layers."""
    seen = _as_bytes if memory.device.type == peer.device.type == "cpu" else _as_is
    for shared in _shared(peer.map, memory.map, section):
        ours = _planes(memory.parts[shared.ours], shared.part, End.TARGET, seen)
        theirs = _planes(peer.parts[shared.theirs], shared.part, End.SOURCE, seen)
        for run in paired_runs(section, source, target):
            for into, out_of in zip(ours, theirs, strict=True):
                taken = out_of[:, run.source : run.source + run.tokens]
                into[:, run.target : run.target + run.tokens] = taken


def _as_bytes(plane: torch.Tensor) -> Any:
    """A view of host memory as bytes: numpy copies a row at a time by memcpy, torch an element at a
    time."""
    return plane.view(torch.uint8).numpy()


def _as_is(plane: torch.Tensor) -> Any:
    return plane


def _planes(
    memory: KvMemory,
    part: GroupSlice,
    end: End,
    seen: Callable[[torch.Tensor], Any] = _as_is,
) -> list[Any]:
    """# plane |-> the part that travels, `[layers, slots, heads, dim]` of one rank, `seen` as a
    tensor or an array"""
    layer = part.first_layer(end)
    planes, layers = memory.planes[part.group], slice(layer, layer + part.layers)
    found = []
    for plane in part.planes:
        first = plane.first_head(end)
        found.append(seen(planes[plane.plane])[layers, :, first : first + plane.heads])
    return found


def reads_of(
    memory: KvMemory,
    target: Side,
    theirs: PoolMap,
    region: RegionName,
    source: Side,
    write: SlabWrite,
) -> Iterator[Read]:
    """One descriptor per run, layer and plane; one per token if only some of a rank's heads belong
    to one of ours."""
    for section in write.sections:
        for shared in _shared(theirs, memory.map, section):
            ours = _planes(memory.parts[shared.ours], shared.part, End.TARGET)
            for plane, into in zip(shared.part.planes, ours, strict=True):
                for run in paired_runs(section, source, target):
                    yield from _reads_of_run(theirs, region, shared, plane, into, run)


def _reads_of_run(
    theirs: PoolMap,
    region: RegionName,
    shared: _Shared,
    plane: PlaneSlice,
    into: torch.Tensor,
    run: PairedRun,
) -> Iterator[Read]:
    group, peer = shared.part.group, theirs.parts[shared.theirs]
    held = peer.layout.groups[group].planes[plane.plane].heads
    whole = plane.heads == held and into[0, 0].numel() == into.stride(1)
    step = run.tokens if whole else 1
    within = plane.source_head * plane.dim * peer.layout.element_bytes
    offset = theirs.part_offset(shared.theirs) + within
    for i in range(shared.part.layers):
        for token in range(0, run.tokens, step):
            layer, slot = shared.part.source_layer + i, run.source + token
            rows = into[i, run.target + token : run.target + token + step]
            yield Read(region, offset + peer.row_offset(group, plane.plane, layer, slot), rows)
