"""Collation: a sequence's KV between the paged pool and one slab. Runs in the worker that owns the
blocks; the slab may be another process's, seen through a window.

One strided copy per (run of adjacent blocks, plane) covers all layers of a group.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from kvpool.layout import KvLayout
from kvpool.memory import KvMemory
from kvpool.plan import chunk_bytes, token_runs
from kvpool.slab import HEADER_BYTES, SlabHeader, checksum
from kvpool.tables import Tables
from kvrelay.errors import PeerError


def gather(memory: KvMemory, tables: Tables, start: int, tokens: int, out: torch.Tensor) -> None:
    """Tokens `[start, start + tokens)` into `out`, uint8 `[chunk_bytes(layout, tokens)]`."""
    if out.device != memory.device:
        staging = torch.empty_like(out, device=memory.device)
        gather(memory, tables, start, tokens, staging)
        out.copy_(staging)
        return
    for in_pool, in_slab in _pairs(memory, tables, start, tokens, out):
        in_slab.copy_(in_pool)


def scatter(
    memory: KvMemory, tables: Tables, start: int, tokens: int, source: torch.Tensor
) -> None:
    """The inverse of `gather`. Only the owner of the blocks calls it."""
    source = source.to(memory.device)
    for in_pool, in_slab in _pairs(memory, tables, start, tokens, source):
        in_pool.copy_(in_slab)


def slab_bytes(layout: KvLayout, tokens: int) -> int:
    """A slab with room for `tokens` tokens and the header."""
    return HEADER_BYTES + chunk_bytes(layout, tokens)


def new_staging(nbytes: int) -> torch.Tensor:
    """Local memory for a slab whose region can't be mapped: uint8 `[nbytes]`."""
    return torch.empty(nbytes, dtype=torch.uint8)


def write_slab(
    memory: KvMemory,
    tables: Tables,
    start: int,
    tokens: int,
    *,
    fingerprint: str,
    lease_id: int,
    chunk: int,
    window: torch.Tensor,
) -> int:
    """Gather into a lent slab and put the header before it; returns the bytes used.

    `window` is CPU uint8, at least `slab_bytes(layout, tokens)` long.
    """
    nbytes = chunk_bytes(memory.layout, tokens)
    payload = window[HEADER_BYTES : HEADER_BYTES + nbytes]
    assert payload.numel() == nbytes, (window.numel(), nbytes)
    gather(memory, tables, start, tokens, payload)
    header = SlabHeader(
        fingerprint=fingerprint,
        dtype=memory.layout.dtype,
        lease_id=lease_id,
        chunk=chunk,
        start=start,
        tokens=tokens,
        payload_bytes=nbytes,
        checksum=checksum(_buffer(payload)),
    )
    window[:HEADER_BYTES] = torch.frombuffer(bytearray(header.pack()), dtype=torch.uint8)
    return HEADER_BYTES + nbytes


def read_slab(
    memory: KvMemory, tables: Tables, *, fingerprint: str, lease_id: int, window: torch.Tensor
) -> SlabHeader:
    """Check a filled slab and scatter it. Raises PeerError, with no block touched, if it is not
    whole, or not of this model, layout and lease."""
    header = SlabHeader.unpack(bytes(_buffer(window[:HEADER_BYTES])), fingerprint=fingerprint)
    _check_fits(header, memory.layout, tables, lease_id)
    payload = window[HEADER_BYTES:]
    header.check_payload(_buffer(payload))
    scatter(memory, tables, header.start, header.tokens, payload[: header.payload_bytes])
    return header


def _check_fits(header: SlabHeader, layout: KvLayout, tables: Tables, lease_id: int) -> None:
    if header.lease_id != lease_id:
        raise PeerError(f"slab of lease {header.lease_id}, but {lease_id} is current")
    if header.dtype != layout.dtype:
        raise PeerError(f"slab of {header.dtype}, but the pool holds {layout.dtype}")
    if header.payload_bytes != chunk_bytes(layout, header.tokens):
        raise PeerError(
            f"slab length {header.payload_bytes} for {header.tokens} tokens; expected "
            f"{chunk_bytes(layout, header.tokens)} bytes"
        )
    capacity = min(len(table) for table in tables) * layout.block_size
    if header.start + header.tokens > capacity:
        raise PeerError(
            f"slab of tokens [{header.start}, {header.start + header.tokens}), but the request "
            f"holds blocks for {capacity}"
        )


def _pairs(
    memory: KvMemory, tables: Tables, start: int, tokens: int, slab: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """(in the pool, in the slab) of each copy, both `[layers, tokens of the run, heads, dim]`."""
    layout = memory.layout
    assert slab.numel() == chunk_bytes(layout, tokens), (slab.numel(), tokens)
    views = _slab_planes(layout, tokens, slab)
    for planes, slab_planes, table in zip(memory.planes, views, tables, strict=True):
        for run in token_runs(table, start, tokens, layout.block_size):
            for plane, in_slab in zip(planes, slab_planes, strict=True):
                yield (
                    plane[:, run.slot : run.slot + run.tokens],
                    in_slab[:, run.position : run.position + run.tokens],
                )


def _slab_planes(layout: KvLayout, tokens: int, slab: torch.Tensor) -> list[list[torch.Tensor]]:
    """# layer group |-> plane |-> `[layers, tokens, heads, dim]`, a strided view of the slab"""
    rest = slab.view(getattr(torch, layout.dtype))
    groups: list[list[torch.Tensor]] = []
    for group in layout.groups:
        layer_elements = tokens * sum(plane.elements for plane in group.planes)
        planes, at = [], 0
        for plane in group.planes:
            shape = (len(group.layers), tokens, plane.heads, plane.dim)
            strides = (layer_elements, plane.elements, plane.dim, 1)
            planes.append(rest.as_strided(shape, strides, rest.storage_offset() + at))
            at += tokens * plane.elements
        groups.append(planes)
        rest = rest[layer_elements * len(group.layers) :]
    return groups


def _buffer(tensor: torch.Tensor) -> memoryview:
    return tensor.numpy().data
