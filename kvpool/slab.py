"""What stands at the head of a slab, so that a foreign, stale or damaged one is never scattered.

[0, 128)                      header, little endian, padded with zeros
[128, 128 + payload_bytes)    the sections of a write one after another, each as kvpool.codec says
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import xxhash

from kvpool.codec import Codec
from kvpool.piece import Piece
from kvpool.write import TokenSpan
from kvrelay.errors import PeerError
from kvrelay.types import WIRE_VERSION

HEADER_BYTES = 128
_MAGIC = b"KVRSLAB\0"
# magic, version, dtype, codec, fingerprint, lease; start, tokens and next position of the span,
# index of the write; payload bytes, payload checksum
_FIELDS = struct.Struct("<8sHHH16sQQQQIQQ")
_CHECKSUM = struct.Struct("<Q")  # of all that stands before it
_PADDING = bytes(HEADER_BYTES - _FIELDS.size - _CHECKSUM.size)
_DTYPES = ("float32", "bfloat16", "float16")
_CODECS = (Codec.NONE, Codec.FP8, Codec.INT8)


@dataclass(frozen=True, slots=True, kw_only=True)
class SlabHeader:
    """Which piece of a sequence the payload is, and under which lease it was written.

    `fingerprint` is the layout's logical fingerprint (32 hex digits), `checksum` the xxh3_64 of
    the payload. `dtype` is that of the elements under codec none.
    """

    fingerprint: str
    dtype: str
    codec: Codec
    lease_id: int
    piece: Piece
    payload_bytes: int
    checksum: int

    def pack(self) -> bytes:
        fields = _FIELDS.pack(
            _MAGIC,
            WIRE_VERSION,
            _DTYPES.index(self.dtype),
            _CODECS.index(self.codec),
            bytes.fromhex(self.fingerprint),
            self.lease_id,
            self.piece.span.start,
            self.piece.span.tokens,
            self.piece.span.next_position,
            self.piece.index,
            self.payload_bytes,
            self.checksum,
        )
        return _sealed(fields + _PADDING)

    @classmethod
    def unpack(cls, data: bytes, *, fingerprint: str) -> SlabHeader:
        """Raises PeerError, saying what is wrong, unless it is a whole header for this model."""
        if len(data) < HEADER_BYTES:
            raise PeerError(f"slab header of {len(data)} bytes; it must have {HEADER_BYTES}")
        magic, version, dtype, codec, theirs, lease_id, *place, payload_bytes, digest = (
            _FIELDS.unpack_from(data)
        )
        start, tokens, next_position, index = place
        if magic != _MAGIC:
            raise PeerError(f"not a slab: magic {magic!r}")
        if version != WIRE_VERSION:
            raise PeerError(f"slab of wire version {version}; this worker speaks {WIRE_VERSION}")
        if _sealed(data[: HEADER_BYTES - _CHECKSUM.size]) != data[:HEADER_BYTES]:
            raise PeerError("slab header is damaged: wrong header checksum")
        if theirs.hex() != fingerprint:
            raise PeerError(f"slab of another model: fingerprint {theirs.hex()}, not {fingerprint}")
        if dtype >= len(_DTYPES):
            raise PeerError(f"slab of unknown dtype code {dtype}")
        if codec >= len(_CODECS):
            raise PeerError(f"slab of unknown codec {codec}")
        return cls(
            fingerprint=fingerprint,
            dtype=_DTYPES[dtype],
            codec=_CODECS[codec],
            lease_id=lease_id,
            piece=Piece(
                span=TokenSpan(start=start, tokens=tokens, next_position=next_position),
                index=index,
            ),
            payload_bytes=payload_bytes,
            checksum=digest,
        )

    def check_payload(self, payload: memoryview) -> None:
        """`payload` is all that follows the header. Raises PeerError."""
        if self.payload_bytes > payload.nbytes:
            raise PeerError(
                f"slab length {self.payload_bytes} is more than the {payload.nbytes} bytes there"
            )
        if checksum(payload[: self.payload_bytes]) != self.checksum:
            raise PeerError("slab payload is damaged: wrong checksum")


def checksum(payload: memoryview) -> int:
    return int(xxhash.xxh3_64_intdigest(payload))


def _sealed(data: bytes) -> bytes:
    return data + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(data))
