"""Handoff messages to bytes and back, by protobuf: what the transport's `notify` carries.

What a worker says of itself to its peers, to protobuf and back.

Request keys to protobuf and back, as peers write them.

How a handoff ends, to protobuf and back.

Messages about pulled blocks to protobuf and back.

Messages about pieces and their slabs to protobuf and back.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import assert_never

from google.protobuf.message import DecodeError

from kvpool.core.layout.codec import Codec
from kvpool.core.layout.hashes import BlockHash
from kvpool.core.layout.layout import DTYPE_BYTES
from kvpool.core.transfer.codec_choice import CodecOffer, CodecSpeed
from kvpool.core.transfer.messages import (
    CancelTransfer,
    Commit,
    Committed,
    EndMessage,
    KvDigest,
    LinkProbed,
    PeerHello,
    PeerMessage,
    PieceComputed,
    PieceMessage,
    PiecesAhead,
    PiecesAwaited,
    PiecesRead,
    Ping,
    PlaneDigest,
    Pong,
    RenewLeases,
    SlabFilled,
    SlabLent,
    TransferCancelled,
)
from kvpool.core.transfer.piece import Piece, PieceBlocks
from kvpool.core.transfer.pool_map import KvFacts
from kvpool.core.transfer.pull import PullGranted, PullMessage, PullRead, PullSettled, PullWanted
from kvpool.core.transfer.slabs import LeaseId, SlabId
from kvpool.core.transfer.write import TokenSpan
from kvrelay.errors import PeerError
from kvrelay.types import Incarnation, RequestKey
from kvrelay.v1 import peer_pb2, worker_pb2
from kvrelay.v1 import peer_pb2 as pb

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


def encode_key(key: RequestKey) -> worker_pb2.Key:
    return worker_pb2.Key(request_id=key.request_id, attempt=key.attempt)


def decode_key(key: worker_pb2.Key) -> RequestKey:
    return RequestKey(key.request_id, key.attempt)


def encode_end(message: EndMessage) -> pb.PeerMessage:
    key = encode_key(message.key)
    match message:
        case Commit():
            return pb.PeerMessage(commit=_commit(message))
        case Committed():
            return pb.PeerMessage(committed=pb.Committed(key=key))
        case CancelTransfer(reason=reason):
            return pb.PeerMessage(cancel_transfer=pb.CancelTransfer(key=key, reason=reason))
        case TransferCancelled(reason=reason):
            cancelled = pb.TransferCancelled(key=key, reason=reason)
            return pb.PeerMessage(transfer_cancelled=cancelled)
        case _:
            assert_never(message)


def decode_end(envelope: pb.PeerMessage) -> EndMessage:
    """Raises PeerError."""
    match envelope.WhichOneof("message"):
        case "commit":
            return _commit_of(envelope.commit)
        case "committed":
            return Committed(key=decode_key(envelope.committed.key))
        case "cancel_transfer":
            cancel = envelope.cancel_transfer
            return CancelTransfer(key=decode_key(cancel.key), reason=cancel.reason)
        case "transfer_cancelled":
            cancelled = envelope.transfer_cancelled
            return TransferCancelled(key=decode_key(cancelled.key), reason=cancelled.reason)
        case other:
            raise PeerError(f"{other} is no end of a handoff")


def _commit(message: Commit) -> pb.Commit:
    return pb.Commit(
        key=encode_key(message.key),
        pieces=message.pieces,
        first_token_ids=message.first_token_ids,
        resumed_ids=message.resumed_ids,
        finished_choices=message.finished_choices,
        digest=None if message.digest is None else _digest(message.digest),
    )


def _commit_of(commit: pb.Commit) -> Commit:
    return Commit(
        key=decode_key(commit.key),
        pieces=commit.pieces,
        first_token_ids=tuple(commit.first_token_ids),
        resumed_ids=tuple(commit.resumed_ids),
        finished_choices=tuple(commit.finished_choices),
        digest=_digest_of(commit.digest) if commit.HasField("digest") else None,
    )


def _digest(digest: KvDigest) -> pb.KvDigest:
    planes = (pb.PlaneDigest(norms=plane.norms, sums=plane.sums) for plane in digest.planes)
    return pb.KvDigest(start=digest.start, planes=planes)


def _digest_of(digest: pb.KvDigest) -> KvDigest:
    planes = (PlaneDigest(norms=tuple(p.norms), sums=tuple(p.sums)) for p in digest.planes)
    return KvDigest(start=digest.start, planes=tuple(planes))


_HASH_BYTES = 32


def encode_pull(message: PullMessage) -> peer_pb2.PeerMessage:
    pb = peer_pb2
    match message:
        case PullWanted(pull=pull, hashes=hashes, skip=skip):
            wanted = pb.PullWanted(pull=pull, hashes=b"".join(hashes), skip=skip)
            return pb.PeerMessage(pull_wanted=wanted)
        case PullGranted(pull=pull, blocks=blocks, held=held):
            granted = pb.PullGranted(pull=pull, blocks=blocks, held=map(encode_blocks, held))
            return pb.PeerMessage(pull_granted=granted)
        case PullRead(pull=pull):
            return pb.PeerMessage(pull_read=pb.PullRead(pull=pull))
        case PullSettled(pull=pull, held=all_held):
            return pb.PeerMessage(pull_settled=pb.PullSettled(pull=pull, held=all_held))
        case _:
            assert_never(message)


def decode_pull(envelope: peer_pb2.PeerMessage) -> PullMessage:
    """Raises PeerError."""
    match envelope.WhichOneof("message"):
        case "pull_wanted":
            return _wanted_of(envelope.pull_wanted)
        case "pull_granted":
            granted = envelope.pull_granted
            held = tuple(map(decode_blocks, granted.held))
            return PullGranted(pull=granted.pull, blocks=granted.blocks, held=held)
        case "pull_read":
            return PullRead(pull=envelope.pull_read.pull)
        case "pull_settled":
            settled = envelope.pull_settled
            return PullSettled(pull=settled.pull, held=settled.held)
        case other:
            raise PeerError(f"{other} is no message about a pull")


def _wanted_of(wanted: peer_pb2.PullWanted) -> PullWanted:
    joined = wanted.hashes
    if len(joined) % _HASH_BYTES:
        raise PeerError(f"{len(joined)} bytes are no hashes of {_HASH_BYTES} bytes each")
    hashes = (joined[at : at + _HASH_BYTES] for at in range(0, len(joined), _HASH_BYTES))
    return PullWanted(pull=wanted.pull, hashes=tuple(map(BlockHash, hashes)), skip=wanted.skip)


def encode_blocks(held: PieceBlocks) -> peer_pb2.PieceBlocks:
    return peer_pb2.PieceBlocks(
        group=held.group,
        first=held.first,
        starts=[start for start, _ in held.runs],
        counts=[count for _, count in held.runs],
    )


def decode_blocks(held: peer_pb2.PieceBlocks) -> PieceBlocks:
    """Raises PeerError."""
    if len(held.starts) != len(held.counts):
        raise PeerError(f"{len(held.starts)} runs of blocks with {len(held.counts)} lengths")
    runs = tuple(zip(held.starts, held.counts, strict=True))
    return PieceBlocks(group=held.group, first=held.first, runs=runs)


def encode_piece(message: PieceMessage) -> pb.PeerMessage:
    key = encode_key(message.key)
    match message:
        case PiecesAhead():
            return pb.PeerMessage(pieces_ahead=_ahead(message))
        case SlabLent():
            return pb.PeerMessage(slab_lent=_lent(message))
        case SlabFilled():
            return pb.PeerMessage(slab_filled=_filled(message))
        case PiecesAwaited():
            return pb.PeerMessage(pieces_awaited=pb.PiecesAwaited(key=key, pieces=message.pieces))
        case PieceComputed():
            return pb.PeerMessage(piece_computed=pb.PieceComputed(key=key, piece=message.piece))
        case PiecesRead():
            return pb.PeerMessage(pieces_read=pb.PiecesRead(key=key, pieces=message.pieces))
        case _:
            assert_never(message)


def decode_piece(envelope: pb.PeerMessage) -> PieceMessage:
    """Raises PeerError."""
    match envelope.WhichOneof("message"):
        case "pieces_ahead":
            return _ahead_of(envelope.pieces_ahead)
        case "slab_lent":
            return _lent_of(envelope.slab_lent)
        case "slab_filled":
            return _filled_of(envelope.slab_filled)
        case "pieces_awaited":
            awaited = envelope.pieces_awaited
            return PiecesAwaited(key=decode_key(awaited.key), pieces=tuple(awaited.pieces))
        case "piece_computed":
            computed = envelope.piece_computed
            return PieceComputed(key=decode_key(computed.key), piece=computed.piece)
        case "pieces_read":
            read = envelope.pieces_read
            return PiecesRead(key=decode_key(read.key), pieces=tuple(read.pieces))
        case other:
            raise PeerError(f"{other} is no message about a piece")


def _ahead(message: PiecesAhead) -> pb.PiecesAhead:
    span = message.piece.span
    return pb.PiecesAhead(
        key=encode_key(message.key),
        number=message.number,
        start=span.start,
        tokens=span.tokens,
        next_position=span.next_position,
        index=message.piece.index,
        held=map(encode_blocks, message.held),
        count=message.count,
    )


def _ahead_of(message: pb.PiecesAhead) -> PiecesAhead:
    span = TokenSpan(
        start=message.start, tokens=message.tokens, next_position=message.next_position
    )
    return PiecesAhead(
        key=decode_key(message.key),
        number=message.number,
        piece=Piece(span=span, index=message.index),
        held=tuple(map(decode_blocks, message.held)),
        count=message.count,
    )


def _lent(message: SlabLent) -> pb.SlabLent:
    return pb.SlabLent(
        key=encode_key(message.key),
        piece=message.piece,
        slab_id=message.slab_id,
        region=message.region,
        lease_id=message.lease_id,
        codec=CODECS[message.codec],
    )


def _lent_of(lent: pb.SlabLent) -> SlabLent:
    return SlabLent(
        key=decode_key(lent.key),
        piece=lent.piece,
        slab_id=SlabId(lent.slab_id),
        region=lent.region,
        lease_id=LeaseId(lent.lease_id),
        codec=codec_of(lent.codec),
    )


def _filled(message: SlabFilled) -> pb.SlabFilled:
    return pb.SlabFilled(
        key=encode_key(message.key),
        piece=message.piece,
        slab_id=message.slab_id,
        lease_id=message.lease_id,
    )


def _filled_of(filled: pb.SlabFilled) -> SlabFilled:
    return SlabFilled(
        key=decode_key(filled.key),
        piece=filled.piece,
        slab_id=SlabId(filled.slab_id),
        lease_id=LeaseId(filled.lease_id),
    )


def encode(message: PeerMessage) -> bytes:
    return _encode(message).SerializeToString()


def _encode(message: PeerMessage) -> pb.PeerMessage:
    if isinstance(message, PieceMessage):
        return encode_piece(message)
    if isinstance(message, EndMessage):
        return encode_end(message)
    if isinstance(message, PullMessage):
        return encode_pull(message)
    match message:
        case PeerHello():
            return pb.PeerMessage(hello=encode_hello(message))
        case RenewLeases(keys=keys):
            return pb.PeerMessage(renew_leases=pb.RenewLeases(keys=map(encode_key, keys)))
        case Ping():
            return pb.PeerMessage(ping=pb.Ping())
        case Pong():
            return pb.PeerMessage(pong=pb.Pong())
        case LinkProbed():
            return pb.PeerMessage(link_probed=pb.LinkProbed())
        case _:
            assert_never(message)


def decode(payload: bytes) -> PeerMessage:
    """Raises PeerError on anything that is not a known message."""
    envelope = pb.PeerMessage()
    try:
        envelope.ParseFromString(payload)
    except DecodeError as error:
        raise PeerError(f"a peer sent {len(payload)} bytes that are no message: {error}") from error
    decoder = _DECODERS.get(envelope.WhichOneof("message") or "")
    if decoder is None:
        raise PeerError("a peer sent a message of a kind that this version does not know")
    return decoder(envelope)


_DECODERS: dict[str, Callable[[pb.PeerMessage], PeerMessage]] = {
    "hello": lambda envelope: decode_hello(envelope.hello),
    "renew_leases": lambda envelope: RenewLeases(
        keys=tuple(map(decode_key, envelope.renew_leases.keys))
    ),
    "ping": lambda _: Ping(),
    "pong": lambda _: Pong(),
    "link_probed": lambda _: LinkProbed(),
    **dict.fromkeys(("pieces_ahead", "slab_lent", "slab_filled"), decode_piece),
    **dict.fromkeys(("pieces_awaited", "piece_computed", "pieces_read"), decode_piece),
    **dict.fromkeys(("commit", "committed"), decode_end),
    **dict.fromkeys(("cancel_transfer", "transfer_cancelled"), decode_end),
    **dict.fromkeys(("pull_wanted", "pull_granted", "pull_read", "pull_settled"), decode_pull),
}
