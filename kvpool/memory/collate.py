"""Moves one piece of a handoff between the paged pool and a slab with its header. Runs in the
worker that owns the blocks; the slab may be another process's, seen through a window.

Payloads that are gathered in host memory carry a checksum. Those of a device carry none: the
header's own checksum, with lease, piece and length, shows that the slab was filled and for which
piece.

A pool that lies on several devices is collated by rank 0, through one slab for each rank. Where it
is cut by layers alone and nothing is encoded, a rank's part of a slab is a slab too.

On a CUDA device the work is queued on the caller's current stream, the header of a slab too; the
caller waits for it. Headers are read on a stream of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch

from kvpool.core.layout.codec import Codec, WireFormat
from kvpool.core.layout.layout import KvLayout, Tables
from kvpool.core.layout.shards import End, GroupSlice, PlaneSlice
from kvpool.core.transfer.piece import Piece
from kvpool.core.transfer.pool_map import PoolMap
from kvpool.core.transfer.slabs import HEADER_BYTES, NO_CHECKSUM, SlabHeader, checksum
from kvpool.core.transfer.write import Side, SlabSection, SlabWrite, chunk_bytes
from kvpool.memory.codec import gather_changed, scatter_changed
from kvpool.memory.kv_memory import KvMemory
from kvpool.memory.rows import plane_rows, section_rows
from kvpool.memory.views import SlabViews, plane_views, row_index, slab_views
from kvrelay.errors import PeerError

Slab = torch.Tensor
"""uint8 `[bytes]`: a header and its payload, here or through a window."""
_Move = Callable[[KvMemory, SlabSection, torch.Tensor], None]
"""Moves data between the pool of one rank and a slab."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Share:
    """One rank's part of a plane: `section` is its own, `layers` and `heads` are counted in the
    whole section."""

    rank: int
    section: SlabSection
    layers: slice
    heads: slice


def move_parts(
    memory: KvMemory,
    section: SlabSection,
    wire: WireFormat,
    slab: torch.Tensor,
    end: End,
    move: _Move,
) -> None:
    """At the source moves out of the pool, at the target into all copies of the heads."""
    whole = slab_views(section, wire, slab)
    for plane, views in zip(section.part.planes, whole, strict=True):
        for share in _shares(memory.map, section, wire, plane, end):
            payload = torch.empty(share.section.nbytes, dtype=torch.uint8, device=slab.device)
            (own,) = slab_views(share.section, wire, payload)
            theirs = _narrow(views, share)
            if end is End.TARGET:
                _copy(theirs, own)
            move(memory.parts[share.rank], share.section, payload)
            if end is End.SOURCE:
                _copy(own, theirs)


def _shares(
    pool: PoolMap, section: SlabSection, wire: WireFormat, plane: PlaneSlice, end: End
) -> Iterator[_Share]:
    group, first = section.part.group, plane.first_head(end)
    asked, all_layers = range(first, first + plane.heads), _layers(section, end)
    copies = pool.copies(group, plane.plane) if end is End.TARGET else 1
    for copy in range(copies):
        for share in pool.shares(group, plane.plane, copy):
            heads, layers = _common(asked, share.heads), _common(all_layers, share.layers)
            if heads and layers:
                own = heads.start - share.heads.start
                cut = replace(plane, source_head=own, target_head=own, heads=len(heads))
                part = replace(_of_layers(section.part, layers, share.layers), planes=(cut,))
                yield _Share(
                    rank=share.rank,
                    section=replace(section, part=part).encoded(wire, 0),
                    layers=_within(layers, all_layers),
                    heads=_within(heads, asked),
                )


def _layers(section: SlabSection, end: End) -> range:
    """Indices in the group of this end's pool."""
    first = section.part.first_layer(end)
    return range(first, first + section.part.layers)


def _common(one: range, other: range) -> range:
    return range(max(one.start, other.start), min(one.stop, other.stop))


def _within(some: range, whole: range) -> slice:
    return slice(some.start - whole.start, some.stop - whole.start)


def _of_layers(part: GroupSlice, layers: range, held: range) -> GroupSlice:
    """These layers of it, on a rank that holds `held`."""
    own = layers.start - held.start
    return replace(part, source_layer=own, target_layer=own, layers=len(layers))


def _narrow(views: SlabViews, share: _Share) -> SlabViews:
    at = (share.layers, slice(None), share.heads)
    return SlabViews(
        values=views.values[at], scales=None if views.scales is None else views.scales[at]
    )


def _copy(source: SlabViews, target: SlabViews) -> None:
    target.values.copy_(source.values)
    if source.scales is not None and target.scales is not None:
        target.scales.copy_(source.scales)


def gather_write(memory: KvMemory, side: Side, write: SlabWrite, out: torch.Tensor) -> None:
    """Copies the source's blocks into `out`, uint8 `[write.nbytes]`, in the write's format."""
    slab = out if out.device == _device(memory) else torch.empty_like(out, device=_device(memory))
    for section in write.sections:
        _move(memory, side, section, write.wire, slab, End.SOURCE)
    if slab is not out:
        out.copy_(slab)


def scatter_write(memory: KvMemory, side: Side, write: SlabWrite, payload: torch.Tensor) -> None:
    """Copies `payload`, uint8 `[write.nbytes]`, into the target's blocks. Only their owner calls
    it."""
    slab = payload.to(_device(memory))
    for section in write.sections:
        _move(memory, side, section, write.wire, slab, End.TARGET)


def _device(memory: KvMemory) -> torch.device:
    """The device with its number, which `memory.device` may lack."""
    return memory.parts[0].flat.device


def _move(
    memory: KvMemory,
    side: Side,
    section: SlabSection,
    wire: WireFormat,
    slab: torch.Tensor,
    end: End,
) -> None:
    """At the source moves out of the pool, at the target into it."""
    if memory.map.stages and memory.map.ranks == 1 and wire.codec is Codec.NONE:
        for rank, own in _stage_sections(memory.map, section, wire, end):
            _move(memory.parts[rank], side, own, wire, slab, end)
    elif memory.lies_apart or (slab.is_cuda and memory.map.ranks > 1):

        def move(part: KvMemory, own: SlabSection, payload: torch.Tensor) -> None:
            _move(part, side, own, wire, payload, end)

        move_parts(memory, section, wire, slab, end, move)
    elif slab.is_cuda:
        _move_planes(memory, side, section, wire, slab, end)
    elif _is_verbatim(memory, wire):
        payload = slab[section.offset_bytes : section.offset_bytes + section.nbytes]
        rows = section_rows(memory, section, side, end)
        (rows.gather if end is End.SOURCE else rows.scatter)(payload)
    else:
        change = gather_changed if end is End.SOURCE else scatter_changed
        dtype = getattr(torch, memory.layout.dtype)
        views = slab_views(section, wire, slab)
        for plane, seen in zip(section.part.planes, views, strict=True):
            change(seen, plane_rows(memory, section, side, end, plane), dtype, wire.codec)


def _stage_sections(
    pool: PoolMap, section: SlabSection, wire: WireFormat, end: End
) -> Iterator[tuple[int, SlabSection]]:
    """(rank, its layers of the section) in the same slab; stages have one rank each."""
    whole = _layers(section, end)
    layer_bytes = section.nbytes // len(whole)
    for share in pool.shares(section.part.group, 0, 0):
        layers = _common(whole, share.layers)
        if layers:
            part = _of_layers(section.part, layers, share.layers)
            offset_bytes = section.offset_bytes + (layers.start - whole.start) * layer_bytes
            yield share.rank, replace(section, part=part).encoded(wire, offset_bytes)


def _move_planes(
    memory: KvMemory,
    side: Side,
    section: SlabSection,
    wire: WireFormat,
    slab: torch.Tensor,
    end: End,
) -> None:
    from kvpool.memory.triton import gather_planes, scatter_planes

    views = plane_views(memory, section, wire, slab, end)
    slots = row_index(side.tables[section.part.group], section, side.block_size)
    (gather_planes if end is End.SOURCE else scatter_planes)(views, slots, wire)


def _is_verbatim(memory: KvMemory, wire: WireFormat) -> bool:
    """True if the slab holds the pool's own bits."""
    return wire.codec is Codec.NONE and wire.dtype == memory.layout.dtype


def slab_bytes(layout: KvLayout, tokens: int) -> int:
    """Size of a slab with room for `tokens` tokens and the header."""
    return HEADER_BYTES + chunk_bytes(layout, tokens)


def write_slab(
    memory: KvMemory,
    tables: Tables,
    piece: Piece,
    write: SlabWrite,
    *,
    fingerprint: str,
    lease_id: int,
    window: torch.Tensor,
) -> int:
    """Gathers `write`, which belongs to `piece`, into a lent slab and puts the header before it.

    `window` is uint8; returns the bytes used. On a device they are there once the caller has waited
    (KvMemory.mark). Raises PeerError if they don't fit.
    """
    payload = window[HEADER_BYTES : HEADER_BYTES + write.nbytes]
    if payload.numel() < write.nbytes:
        raise PeerError(f"a slab of {window.numel()} bytes was lent for a piece of {write.nbytes}")
    gather_write(memory, _side(memory, tables), write, payload)
    if payload.is_cpu:
        memory.settle()
    header = SlabHeader(
        fingerprint=fingerprint,
        dtype=write.wire.dtype,
        codec=write.wire.codec,
        lease_id=lease_id,
        piece=piece,
        payload_bytes=write.nbytes,
        checksum=checksum(_buffer(payload)) if payload.is_cpu else NO_CHECKSUM,
    )
    _put(header.pack(), window[:HEADER_BYTES])
    return HEADER_BYTES + write.nbytes


def read_slab(
    memory: KvMemory,
    tables: Tables,
    piece: Piece,
    write: SlabWrite,
    *,
    fingerprint: str,
    lease_id: int,
    window: torch.Tensor,
) -> SlabHeader:
    """Checks that a filled slab is `write`, the reader's own cut of `piece`, and scatters it. On a
    device that is done, and the slab read, once the caller has waited (KvMemory.settle). The writer
    has waited before this is called.

    Raises PeerError, with no block touched, if it is incomplete or of another model, dtype, codec,
    lease or piece.
    """
    with memory.reading():  # while scatters run
        told = bytes(_buffer(window[:HEADER_BYTES]))
    header = SlabHeader.unpack(told, fingerprint=fingerprint)
    _check(header, piece, write, lease_id)
    payload = window[HEADER_BYTES:]
    if payload.is_cpu:
        header.check_payload(_buffer(payload))
    scatter_write(memory, _side(memory, tables), write, payload[: write.nbytes])
    return header


def _check(header: SlabHeader, piece: Piece, write: SlabWrite, lease_id: int) -> None:
    if header.lease_id != lease_id:
        raise PeerError(f"slab of lease {header.lease_id}, but {lease_id} is current")
    if (header.dtype, header.codec) != (write.wire.dtype, write.wire.codec):
        raise PeerError(
            f"slab of {header.dtype} with codec {header.codec}, but {write.wire.dtype} with codec "
            f"{write.wire.codec} was agreed"
        )
    if header.piece != piece:
        raise PeerError(f"slab of {_named(header.piece)}, but {_named(piece)} was announced")
    if header.payload_bytes != write.nbytes:
        raise PeerError(
            f"slab length {header.payload_bytes} for {_named(piece)}; its cut has "
            f"{write.nbytes} bytes"
        )


def _named(piece: Piece) -> str:
    span = piece.span
    tokens = f"[{span.start}, {span.start + span.tokens}) of {span.next_position}"
    return f"write {piece.index} of tokens {tokens}"


def _side(memory: KvMemory, tables: Tables) -> Side:
    return Side(tables=tables, block_size=memory.layout.block_size)


def _put(data: bytes, target: torch.Tensor) -> None:
    if target.is_cpu:
        target.numpy().data[:] = data
    else:  # copies of memory that isn't pinned would wait for the gather
        source = torch.frombuffer(bytearray(data), dtype=torch.uint8).pin_memory()
        target.copy_(source, non_blocking=True)


def _buffer(tensor: torch.Tensor) -> memoryview:
    return tensor.cpu().numpy().data
