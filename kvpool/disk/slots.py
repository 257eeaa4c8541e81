"""The headers of a segment file and of its slots. Pure.

    [0, 4096)                     file header: magic, version, format of the blocks
    then for each slot:           slot header (512 bytes), then one block's bytes

A header ends with the xxh3_64 of its other bytes. A slot names its block, so that the index can be
rebuilt from the headers alone. The block's own checksum is compared at every read.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import xxhash

from kvpool.core.layout.hashes import BlockHash
from kvpool.core.node.messages import PoolFormat

FILE_HEADER_BYTES = 4096
SLOT_HEADER_BYTES = 512
_VERSION = 1
_FILE_MAGIC, _SLOT_MAGIC = b"KVRSEGM\0", b"KVRSLOT\0"
_FILE = struct.Struct("<8sHQ64s64s")  # magic, version, block bytes, fingerprint, physical format
_SLOT = struct.Struct("<8sHB32s32sQQQ")
# magic, version, has a parent, hash, parent, when written, length, checksum
_SUM = struct.Struct("<Q")


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotHeader:
    """`written` orders the writes, also over restarts; `checksum` is the xxh3_64 of the `length`
    bytes that follow."""

    hash: BlockHash
    parent: BlockHash | None
    written: int
    length: int
    checksum: int

    def pack(self) -> bytes:
        fields = _SLOT.pack(
            _SLOT_MAGIC,
            _VERSION,
            self.parent is not None,
            self.hash,
            self.parent or b"",
            self.written,
            self.length,
            self.checksum,
        )
        return _sealed(fields, SLOT_HEADER_BYTES)

    @classmethod
    def unpack(cls, data: bytes) -> SlotHeader | None:
        """None unless it is a whole header of this version."""
        if not _is_sealed(data, SLOT_HEADER_BYTES):
            return None
        magic, version, has_parent, block_hash, parent, written, length, checksum = (
            _SLOT.unpack_from(data)
        )
        if (magic, version) != (_SLOT_MAGIC, _VERSION):
            return None
        return cls(
            hash=BlockHash(block_hash),
            parent=BlockHash(parent) if has_parent else None,
            written=written,
            length=length,
            checksum=checksum,
        )


def pack_file_header(format_: PoolFormat) -> bytes:
    fields = _FILE.pack(
        _FILE_MAGIC,
        _VERSION,
        format_.block_bytes,
        format_.fingerprint.encode(),
        format_.physical_format.encode(),
    )
    return _sealed(fields, FILE_HEADER_BYTES)


def unpack_file_header(data: bytes) -> PoolFormat | None:
    """None unless it is a whole header of this version."""
    if not _is_sealed(data, FILE_HEADER_BYTES):
        return None
    magic, version, block_bytes, fingerprint, physical = _FILE.unpack_from(data)
    if (magic, version) != (_FILE_MAGIC, _VERSION):
        return None
    return PoolFormat(
        fingerprint=fingerprint.rstrip(b"\0").decode(),
        physical_format=physical.rstrip(b"\0").decode(),
        block_bytes=block_bytes,
    )


def _sealed(fields: bytes, size: int) -> bytes:
    padded = fields.ljust(size - _SUM.size, b"\0")
    assert len(padded) + _SUM.size == size, len(fields)
    return padded + _SUM.pack(xxhash.xxh3_64_intdigest(padded))


def _is_sealed(data: bytes, size: int) -> bool:
    if len(data) != size:
        return False
    return bool(_SUM.pack(xxhash.xxh3_64_intdigest(data[: -_SUM.size])) == data[-_SUM.size :])
