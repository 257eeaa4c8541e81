"""Messages about pieces and their slabs to protobuf and back."""

from __future__ import annotations

from typing import assert_never

from kvpool.handoff import (
    PieceComputed,
    PieceMessage,
    PiecesAhead,
    PiecesAwaited,
    PiecesRead,
    SlabFilled,
    SlabLent,
)
from kvpool.peer_wire.hello import CODECS, codec_of
from kvpool.peer_wire.key import decode_key, encode_key
from kvpool.piece import Piece
from kvpool.pull_wire import decode_blocks, encode_blocks
from kvpool.slabs import LeaseId, SlabId
from kvpool.write import TokenSpan
from kvrelay.errors import PeerError
from kvrelay.v1 import peer_pb2 as pb


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
