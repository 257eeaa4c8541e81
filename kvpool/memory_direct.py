"""A piece of a handoff read by its receiver straight out of a peer's pool, without a slab. Runs in
the worker that owns the target's blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from kvpool.memory import KvMemory
from kvpool.piece import paired_runs
from kvpool.pool_map import KvFacts, PoolMap
from kvpool.transport.base import Connection, Read, RegionName
from kvpool.write import Section, Side, Write
from kvrelay.errors import PeerError


def fetch(
    memory: KvMemory,
    target: Side,
    connection: Connection,
    kv: KvFacts,
    source: Side,
    write: Write,
) -> None:
    """Done when it returns. Every head travels: both sides hold whole models. Raises PeerError."""
    theirs = PoolMap(layout=replace(memory.layout, block_size=kv.block_size), blocks=kv.blocks)
    region = RegionName(kv.region)
    window = connection.window(region)
    if window is None:
        connection.read_many([*_reads(memory, target, theirs, region, source, write)])
        return
    if window.numel() != theirs.nbytes:
        raise PeerError(f"a pool of {window.numel()} bytes where {theirs.nbytes} were told")
    _copy(memory, target, KvMemory.over(theirs.layout, theirs.blocks, window), source, write)
    memory.settle()


def _copy(memory: KvMemory, target: Side, peer: KvMemory, source: Side, write: Write) -> None:
    """One strided copy per run and plane covers all layers of a section."""
    for section in write.sections:
        ours, theirs = _planes(memory, section), _planes(peer, section)
        for run in paired_runs(section, source, target):
            for into, out_of in zip(ours, theirs, strict=True):
                taken = out_of.narrow(1, run.source, run.tokens)
                into.narrow(1, run.target, run.tokens).copy_(taken)


def _planes(memory: KvMemory, section: Section) -> list[torch.Tensor]:
    """# plane of the section |-> `[layers, slots, heads, dim]`; the layer is the same for both"""
    part = section.part
    return [
        memory.planes[part.group][plane.plane].narrow(0, part.source_layer, part.layers)
        for plane in part.planes
    ]


def _reads(
    memory: KvMemory,
    target: Side,
    theirs: PoolMap,
    region: RegionName,
    source: Side,
    write: Write,
) -> Iterator[Read]:
    """One descriptor per run, layer and plane."""
    for section in write.sections:
        part = section.part
        for run in paired_runs(section, source, target):
            for plane, into in zip(part.planes, _planes(memory, section), strict=True):
                for i in range(part.layers):
                    layer = part.source_layer + i
                    offset = theirs.row_offset(part.group, plane.plane, layer, run.source)
                    rows = into[i, run.target : run.target + run.tokens]
                    yield Read(region, offset, rows)
