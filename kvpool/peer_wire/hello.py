"""What a worker says of itself to its peers, to protobuf and back."""

from __future__ import annotations

from math import inf

from kvpool.codec import Codec
from kvpool.codec_choice import CodecOffer, CodecSpeed
from kvpool.handoff import PeerHello
from kvpool.layout import DTYPE_BYTES
from kvpool.pool.map import KvFacts
from kvrelay.errors import PeerError
from kvrelay.types import Incarnation
from kvrelay.v1 import peer_pb2

CODECS = {
    Codec.NONE: peer_pb2.CODEC_NONE,
    Codec.FP8: peer_pb2.CODEC_FP8,
    Codec.INT8: peer_pb2.CODEC_INT8,
}
_CODEC_OF = {int(number): codec for codec, number in CODECS.items()}


def encode_hello(message: PeerHello) -> peer_pb2.PeerHello:
    return peer_pb2.PeerHello(
        wire_version=message.wire_version,
        incarnation=message.incarnation,
        fingerprint=message.fingerprint,
        kv=_facts(message.kv),
        name=message.name,
        probe_region=message.probe_region,
    )


def decode_hello(hello: peer_pb2.PeerHello) -> PeerHello:
    """Raises PeerError."""
    return PeerHello(
        wire_version=hello.wire_version,
        incarnation=Incarnation(hello.incarnation),
        fingerprint=hello.fingerprint,
        kv=_facts_of(hello.kv),
        name=hello.name,
        probe_region=hello.probe_region,
    )


def _facts(kv: KvFacts) -> peer_pb2.KvFacts:
    return peer_pb2.KvFacts(
        dtype=kv.dtype,
        block_size=kv.block_size,
        blocks=kv.blocks,
        slab_bytes=kv.slab_bytes,
        region=kv.region,
        codecs=[
            peer_pb2.CodecSpeed(
                codec=CODECS[speed.codec],
                encode_per_s=speed.encode_per_s,
                decode_per_s=speed.decode_per_s,
            )
            for speed in kv.offer.speeds
        ],
        codecs_only_if_faster=kv.offer.only_if_faster,
        mixed_precision=kv.mixed_precision,
        ranks=kv.ranks,
    )


def _facts_of(kv: peer_pb2.KvFacts) -> KvFacts:
    """Raises PeerError."""
    if kv.dtype not in DTYPE_BYTES:
        raise PeerError(f"a peer sent KV of dtype {kv.dtype!r}, which this version does not know")
    if kv.ranks < 1:
        raise PeerError("a peer sent KV of no rank")
    return KvFacts(
        dtype=kv.dtype,
        block_size=kv.block_size,
        blocks=kv.blocks,
        slab_bytes=kv.slab_bytes,
        region=kv.region,
        offer=CodecOffer(
            speeds=tuple(
                CodecSpeed(
                    codec=codec_of(speed.codec),
                    encode_per_s=_speed_of(speed.encode_per_s),
                    decode_per_s=_speed_of(speed.decode_per_s),
                )
                for speed in kv.codecs
            ),
            only_if_faster=kv.codecs_only_if_faster,
        ),
        mixed_precision=kv.mixed_precision,
        ranks=kv.ranks,
    )


def codec_of(number: int) -> Codec:
    """Raises PeerError."""
    if (codec := _CODEC_OF.get(number)) is None:
        raise PeerError(f"a peer sent codec {number}, which this version does not know")
    return codec


def _speed_of(per_s: float) -> float:
    """Raises PeerError."""
    if not 0 < per_s < inf:
        raise PeerError(f"a peer sent a codec's speed of {per_s:g} per second")
    return per_s
