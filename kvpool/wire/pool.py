"""Pool messages to bytes and back, by protobuf: what the transport's `notify` carries.

A message may be longer than `notify` takes; it then travels in several parts, each behind one byte
that tells whether more follow.
"""

from __future__ import annotations

from google.protobuf.message import DecodeError

from kvpool.core.layout.hashes import TenantBlocks
from kvpool.core.node.messages import PoolMessage
from kvrelay.codec import EnvelopeCodec, MessageCodec
from kvrelay.errors import PeerError
from kvrelay.v1 import pool_node_pb2 as node_pb
from kvrelay.v1 import pool_pb2 as pb

MAX_PART_BYTES = 64 * 1024
_MAX_WHOLE_BYTES = 256 * 2**20
_LAST, _MORE = b"\0", b"\1"

_POOL: EnvelopeCodec[PoolMessage, pb.PoolMessage] = EnvelopeCodec(
    PoolMessage, pb.PoolMessage, "a peer"
)
cached_blocks = MessageCodec(TenantBlocks, node_pb.CachedBlocks, "a pool node").encode


def encode(message: PoolMessage) -> list[bytes]:
    """Its parts, to be sent in this order with nothing of the same sender between them."""
    whole = _POOL.encode(message).SerializeToString()
    size = MAX_PART_BYTES - 1
    parts = [whole[at : at + size] for at in range(0, len(whole), size)] or [b""]
    return [*(_MORE + part for part in parts[:-1]), _LAST + parts[-1]]


class Assembler:
    """Puts the parts of one sender's messages together again."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._bytes = 0

    def add(self, part: bytes) -> PoolMessage | None:
        """A message once it is whole. Raises PeerError on anything that is not one."""
        self._bytes += len(part)
        if part[:1] not in (_LAST, _MORE) or self._bytes > _MAX_WHOLE_BYTES:
            raise PeerError(f"a peer sent {len(part)} bytes that are no pool message")
        self._parts.append(part[1:])
        if part[:1] == _MORE:
            return None
        whole, self._parts, self._bytes = b"".join(self._parts), [], 0
        return _decode(whole)


def _decode(whole: bytes) -> PoolMessage:
    try:
        envelope = pb.PoolMessage.FromString(whole)
    except DecodeError as error:
        raise PeerError(f"a peer sent {len(whole)} bytes that are no message: {error}") from error
    return _POOL.decode(envelope)
