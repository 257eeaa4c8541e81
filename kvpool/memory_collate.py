"""Collation of a chunk of tokens, all layers and heads: between the paged pool and one slab with
its header. Runs in the worker that owns the blocks.
"""

from __future__ import annotations

import torch

from kvpool.layout import KvLayout, Tables
from kvpool.memory import KvMemory
from kvpool.memory_sections import gather_write, scatter_write
from kvpool.plan import chunk_bytes
from kvpool.slab import HEADER_BYTES, SlabHeader, checksum
from kvpool.transfer_plan import Side, whole_write
from kvrelay.errors import PeerError


def gather(memory: KvMemory, tables: Tables, start: int, tokens: int, out: torch.Tensor) -> None:
    """Tokens `[start, start + tokens)` into `out`, uint8 `[chunk_bytes(layout, tokens)]`."""
    assert out.numel() == chunk_bytes(memory.layout, tokens), (out.numel(), tokens)
    gather_write(memory, _side(memory, tables), whole_write(memory.layout, start, tokens), out)


def scatter(
    memory: KvMemory, tables: Tables, start: int, tokens: int, source: torch.Tensor
) -> None:
    """The inverse of `gather`. Only the owner of the blocks calls it."""
    assert source.numel() == chunk_bytes(memory.layout, tokens), (source.numel(), tokens)
    scatter_write(memory, _side(memory, tables), whole_write(memory.layout, start, tokens), source)


def slab_bytes(layout: KvLayout, tokens: int) -> int:
    """A slab with room for `tokens` tokens and the header."""
    return HEADER_BYTES + chunk_bytes(layout, tokens)


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


def _side(memory: KvMemory, tables: Tables) -> Side:
    return Side(tables=tables, block_size=memory.layout.block_size)


def _buffer(tensor: torch.Tensor) -> memoryview:
    return tensor.numpy().data
