"""One piece of a handoff between the paged pool and one slab with its header. Runs in the worker
that owns the blocks; the slab may be another process's, seen through a window.

Payloads in a host's memory carry a checksum. Between devices of one host they carry none: there the
header's own, with lease, piece and length, shows that the slab was filled, and for what.
"""

from __future__ import annotations

import torch

from kvpool.layout import KvLayout, Tables
from kvpool.memory.kv_memory import KvMemory
from kvpool.memory.sections import gather_write, scatter_write
from kvpool.piece import Piece
from kvpool.plan import chunk_bytes
from kvpool.slab import HEADER_BYTES, SlabHeader, checksum
from kvpool.write import Side, Write
from kvrelay.errors import PeerError


def slab_bytes(layout: KvLayout, tokens: int) -> int:
    """A slab with room for `tokens` tokens and the header."""
    return HEADER_BYTES + chunk_bytes(layout, tokens)


def write_slab(
    memory: KvMemory,
    tables: Tables,
    piece: Piece,
    write: Write,
    *,
    fingerprint: str,
    lease_id: int,
    window: torch.Tensor,
) -> int:
    """Gather `write`, which is `piece`'s, into a lent slab and put the header before it.

    `window` is uint8; returns the bytes used. Raises PeerError when they are more than it has.
    """
    payload = window[HEADER_BYTES : HEADER_BYTES + write.nbytes]
    if payload.numel() < write.nbytes:
        raise PeerError(f"a slab of {window.numel()} bytes was lent for a piece of {write.nbytes}")
    gather_write(memory, _side(memory, tables), write, payload)
    memory.settle()
    header = SlabHeader(
        fingerprint=fingerprint,
        dtype=write.wire.dtype,
        codec=write.wire.codec,
        lease_id=lease_id,
        piece=piece,
        payload_bytes=write.nbytes,
        checksum=checksum(_buffer(payload)) if payload.is_cpu else 0,
    )
    _put(header.pack(), window[:HEADER_BYTES])
    return HEADER_BYTES + write.nbytes


def read_slab(
    memory: KvMemory,
    tables: Tables,
    piece: Piece,
    write: Write,
    *,
    fingerprint: str,
    lease_id: int,
    window: torch.Tensor,
) -> SlabHeader:
    """Check that a filled slab is `write`, the reader's own cut of `piece`, and scatter it.

    Raises PeerError, with no block touched, if it is not whole, or not of this model, dtype, codec,
    lease and piece.
    """
    header = SlabHeader.unpack(bytes(_buffer(window[:HEADER_BYTES])), fingerprint=fingerprint)
    _check(header, piece, write, lease_id)
    payload = window[HEADER_BYTES:]
    if payload.is_cpu:
        header.check_payload(_buffer(payload))
    scatter_write(memory, _side(memory, tables), write, payload[: write.nbytes])
    memory.settle()
    return header


def _check(header: SlabHeader, piece: Piece, write: Write, lease_id: int) -> None:
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
    else:
        target.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))


def _buffer(tensor: torch.Tensor) -> memoryview:
    return tensor.cpu().numpy().data
