"""Handoff messages to bytes and back, by protobuf: what the transport's `notify` carries."""

from __future__ import annotations

from collections.abc import Callable
from typing import assert_never

from google.protobuf.message import DecodeError

from kvpool.handoff import (
    EndMessage,
    LinkProbed,
    PeerHello,
    PeerMessage,
    PieceMessage,
    Ping,
    Pong,
    RenewLeases,
)
from kvpool.peer_wire.ends import decode_end, encode_end
from kvpool.peer_wire.hello import decode_hello, encode_hello
from kvpool.peer_wire.key import decode_key, encode_key
from kvpool.peer_wire.pieces import decode_piece, encode_piece
from kvpool.pull import PullMessage
from kvpool.pull_wire import decode_pull, encode_pull
from kvrelay.errors import PeerError
from kvrelay.v1 import peer_pb2 as pb


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
