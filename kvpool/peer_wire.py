"""Handoff messages to bytes and back, by protobuf: what the transport's `notify` carries."""

from __future__ import annotations

from dataclasses import asdict
from typing import assert_never

from google.protobuf.message import DecodeError

from kvpool.canary import LogitSketch
from kvpool.handoff import (
    CancelTransfer,
    Commit,
    Committed,
    LinkProbed,
    PeerHello,
    PeerMessage,
    PieceAhead,
    PieceAwaited,
    PieceComputed,
    PieceRead,
    Ping,
    Pong,
    RenewLeases,
    SlabFilled,
    SlabLent,
    TransferCancelled,
)
from kvpool.peer_wire_hello import CODECS, codec_of, decode_hello, encode_hello
from kvpool.piece import Piece
from kvpool.pull import PullGranted, PullRead, PullSettled, PullWanted
from kvpool.pull_wire import decode_blocks, decode_pull, encode_blocks, encode_pull
from kvpool.slabs import LeaseId, SlabId
from kvpool.transfer_plan import TokenSpan
from kvrelay.errors import PeerError
from kvrelay.types import RequestKey
from kvrelay.v1 import peer_pb2, worker_pb2


def _key(key: RequestKey) -> worker_pb2.Key:
    return worker_pb2.Key(request_id=key.request_id, attempt=key.attempt)


def _key_of(key: worker_pb2.Key) -> RequestKey:
    return RequestKey(key.request_id, key.attempt)


def _sketch(sketch: LogitSketch) -> peer_pb2.LogitSketch:
    return peer_pb2.LogitSketch(**asdict(sketch))


def _sketch_of(sketch: peer_pb2.LogitSketch) -> LogitSketch:
    return LogitSketch(
        token_ids=tuple(sketch.token_ids),
        logits=tuple(sketch.logits),
        log_sum_exp=sketch.log_sum_exp,
        spread=sketch.spread,
        bound=sketch.bound,
    )


def encode(message: PeerMessage) -> bytes:
    return _encode(message).SerializeToString()


def _encode(message: PeerMessage) -> peer_pb2.PeerMessage:
    pb = peer_pb2
    match message:
        case PeerHello():
            return pb.PeerMessage(hello=encode_hello(message))
        case PieceAhead():
            return pb.PeerMessage(piece_ahead=_piece_ahead(message))
        case SlabLent():
            lent = pb.SlabLent(
                key=_key(message.key),
                piece=message.piece,
                slab_id=message.slab_id,
                region=message.region,
                lease_id=message.lease_id,
                codec=CODECS[message.codec],
            )
            return pb.PeerMessage(slab_lent=lent)
        case SlabFilled():
            filled = pb.SlabFilled(
                key=_key(message.key),
                piece=message.piece,
                slab_id=message.slab_id,
                lease_id=message.lease_id,
            )
            return pb.PeerMessage(slab_filled=filled)
        case PieceAwaited(key=key, piece=piece):
            return pb.PeerMessage(piece_awaited=pb.PieceAwaited(key=_key(key), piece=piece))
        case PieceComputed(key=key, piece=piece):
            return pb.PeerMessage(piece_computed=pb.PieceComputed(key=_key(key), piece=piece))
        case PieceRead(key=key, piece=piece):
            return pb.PeerMessage(piece_read=pb.PieceRead(key=_key(key), piece=piece))
        case Commit():
            commit = pb.Commit(
                key=_key(message.key),
                pieces=message.pieces,
                first_token_ids=message.first_token_ids,
                finished_choices=message.finished_choices,
                sketch=None if message.sketch is None else _sketch(message.sketch),
            )
            return pb.PeerMessage(commit=commit)
        case Committed(key=key):
            return pb.PeerMessage(committed=pb.Committed(key=_key(key)))
        case CancelTransfer(key=key, reason=reason):
            return pb.PeerMessage(cancel_transfer=pb.CancelTransfer(key=_key(key), reason=reason))
        case TransferCancelled(key=key, reason=reason):
            return pb.PeerMessage(
                transfer_cancelled=pb.TransferCancelled(key=_key(key), reason=reason)
            )
        case RenewLeases(keys=keys):
            return pb.PeerMessage(renew_leases=pb.RenewLeases(keys=[_key(k) for k in keys]))
        case Ping():
            return pb.PeerMessage(ping=pb.Ping())
        case Pong():
            return pb.PeerMessage(pong=pb.Pong())
        case PullWanted() | PullGranted() | PullRead() | PullSettled():
            return encode_pull(message)
        case LinkProbed():
            return pb.PeerMessage(link_probed=pb.LinkProbed())
        case _:
            assert_never(message)


def decode(payload: bytes) -> PeerMessage:
    """Raises PeerError on anything that is not a known message."""
    envelope = peer_pb2.PeerMessage()
    try:
        envelope.ParseFromString(payload)
    except DecodeError as error:
        raise PeerError(f"a peer sent {len(payload)} bytes that are no message: {error}") from error
    return _decode(envelope)


def _decode(envelope: peer_pb2.PeerMessage) -> PeerMessage:
    match envelope.WhichOneof("message"):
        case "hello":
            return decode_hello(envelope.hello)
        case "piece_ahead":
            return _piece_ahead_of(envelope.piece_ahead)
        case "slab_lent":
            lent = envelope.slab_lent
            return SlabLent(
                key=_key_of(lent.key),
                piece=lent.piece,
                slab_id=SlabId(lent.slab_id),
                region=lent.region,
                lease_id=LeaseId(lent.lease_id),
                codec=codec_of(lent.codec),
            )
        case "slab_filled":
            filled = envelope.slab_filled
            return SlabFilled(
                key=_key_of(filled.key),
                piece=filled.piece,
                slab_id=SlabId(filled.slab_id),
                lease_id=LeaseId(filled.lease_id),
            )
        case "piece_awaited":
            awaited = envelope.piece_awaited
            return PieceAwaited(key=_key_of(awaited.key), piece=awaited.piece)
        case "piece_computed":
            computed = envelope.piece_computed
            return PieceComputed(key=_key_of(computed.key), piece=computed.piece)
        case "piece_read":
            read = envelope.piece_read
            return PieceRead(key=_key_of(read.key), piece=read.piece)
        case "commit":
            commit = envelope.commit
            return Commit(
                key=_key_of(commit.key),
                pieces=commit.pieces,
                first_token_ids=tuple(commit.first_token_ids),
                finished_choices=tuple(commit.finished_choices),
                sketch=_sketch_of(commit.sketch) if commit.HasField("sketch") else None,
            )
        case "committed":
            return Committed(key=_key_of(envelope.committed.key))
        case "cancel_transfer":
            cancel = envelope.cancel_transfer
            return CancelTransfer(key=_key_of(cancel.key), reason=cancel.reason)
        case "transfer_cancelled":
            cancelled = envelope.transfer_cancelled
            return TransferCancelled(key=_key_of(cancelled.key), reason=cancelled.reason)
        case "renew_leases":
            return RenewLeases(keys=tuple(_key_of(key) for key in envelope.renew_leases.keys))
        case "ping":
            return Ping()
        case "pong":
            return Pong()
        case "pull_wanted" | "pull_granted" | "pull_read" | "pull_settled":
            return decode_pull(envelope)
        case "link_probed":
            return LinkProbed()
        case _:
            raise PeerError("a peer sent a message of a kind that this version does not know")


def _piece_ahead(message: PieceAhead) -> peer_pb2.PieceAhead:
    span = message.piece.span
    return peer_pb2.PieceAhead(
        key=_key(message.key),
        number=message.number,
        start=span.start,
        tokens=span.tokens,
        next_position=span.next_position,
        index=message.piece.index,
        held=map(encode_blocks, message.held),
    )


def _piece_ahead_of(message: peer_pb2.PieceAhead) -> PieceAhead:
    span = TokenSpan(
        start=message.start, tokens=message.tokens, next_position=message.next_position
    )
    return PieceAhead(
        key=_key_of(message.key),
        number=message.number,
        piece=Piece(span=span, index=message.index),
        held=tuple(map(decode_blocks, message.held)),
    )
