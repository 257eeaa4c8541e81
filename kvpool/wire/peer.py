"""What workers say to each other of handoffs, links and pulled blocks, to bytes and back: what the
transport's `notify` carries. Pure.
"""

from __future__ import annotations

from math import inf

from google.protobuf.message import DecodeError

from kvpool.core.layout.layout import DTYPE_BYTES
from kvpool.core.transfer.codec_choice import CodecSpeed
from kvpool.core.transfer.messages import Commit, PeerMessage
from kvpool.core.transfer.pool_map import KvFacts
from kvrelay.codec import EnvelopeCodec, check
from kvrelay.errors import PeerError
from kvrelay.v1 import peer_pb2 as pb


def _check_facts(kv: KvFacts) -> None:
    if kv.dtype not in DTYPE_BYTES:
        raise ValueError(f"KV of dtype {kv.dtype!r}, which this version does not know")
    if kv.ranks < 1:
        raise ValueError("KV of no rank")


def _check_speed(speed: CodecSpeed) -> None:
    for per_s in (speed.encode_per_s, speed.decode_per_s):
        if not 0 < per_s < inf:
            raise ValueError(f"a codec's speed of {per_s:g} per second")


def _check_commit(commit: Commit) -> None:
    choices = len(commit.first_token_ids)
    if len(commit.resumed) not in (0, choices):
        raise ValueError(f"{len(commit.resumed)} choices are resumed of {choices}")


check(KvFacts, _check_facts)
check(CodecSpeed, _check_speed)
check(Commit, _check_commit)

PEER_CODEC: EnvelopeCodec[PeerMessage, pb.PeerMessage] = EnvelopeCodec(
    PeerMessage, pb.PeerMessage, "a peer"
)


def encode(message: PeerMessage) -> bytes:
    return PEER_CODEC.encode(message).SerializeToString()


def decode(payload: bytes) -> PeerMessage:
    """Raises PeerError on anything that is not a known message."""
    try:
        envelope = pb.PeerMessage.FromString(payload)
    except DecodeError as error:
        raise PeerError(f"a peer sent {len(payload)} bytes that are no message: {error}") from error
    return PEER_CODEC.decode(envelope)
