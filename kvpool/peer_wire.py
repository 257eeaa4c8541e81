"""Handoff messages to bytes and back, by protobuf: what the transport's `notify` carries."""

from __future__ import annotations

from typing import assert_never

from google.protobuf.message import DecodeError

from kvpool.handoff import (
    CancelTransfer,
    Commit,
    Committed,
    PeerHello,
    PeerMessage,
    RenewLeases,
    SlabFilled,
    SlabLent,
    SlabWanted,
    TransferCancelled,
)
from kvpool.slabs import LeaseId, SlabId
from kvrelay.errors import PeerError
from kvrelay.types import Incarnation, RequestKey
from kvrelay.v1 import peer_pb2, worker_pb2


def _key(key: RequestKey) -> worker_pb2.Key:
    return worker_pb2.Key(request_id=key.request_id, attempt=key.attempt)


def _key_of(key: worker_pb2.Key) -> RequestKey:
    return RequestKey(key.request_id, key.attempt)


def encode(message: PeerMessage) -> bytes:
    return _encode(message).SerializeToString()


def _encode(message: PeerMessage) -> peer_pb2.PeerMessage:
    pb = peer_pb2
    match message:
        case PeerHello():
            hello = pb.PeerHello(
                wire_version=message.wire_version,
                incarnation=message.incarnation,
                fingerprint=message.fingerprint,
                physical_format=message.physical_format,
            )
            return pb.PeerMessage(hello=hello)
        case SlabWanted(key=key, piece=piece, bytes=size):
            return pb.PeerMessage(slab_wanted=pb.SlabWanted(key=_key(key), piece=piece, bytes=size))
        case SlabLent():
            lent = pb.SlabLent(
                key=_key(message.key),
                piece=message.piece,
                slab_id=message.slab_id,
                region=message.region,
                lease_id=message.lease_id,
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
        case Commit():
            commit = pb.Commit(
                key=_key(message.key),
                pieces=message.pieces,
                first_token_ids=message.first_token_ids,
                finished_choices=message.finished_choices,
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
            hello = envelope.hello
            return PeerHello(
                wire_version=hello.wire_version,
                incarnation=Incarnation(hello.incarnation),
                fingerprint=hello.fingerprint,
                physical_format=hello.physical_format,
            )
        case "slab_wanted":
            wanted = envelope.slab_wanted
            return SlabWanted(key=_key_of(wanted.key), piece=wanted.piece, bytes=wanted.bytes)
        case "slab_lent":
            lent = envelope.slab_lent
            return SlabLent(
                key=_key_of(lent.key),
                piece=lent.piece,
                slab_id=SlabId(lent.slab_id),
                region=lent.region,
                lease_id=LeaseId(lent.lease_id),
            )
        case "slab_filled":
            filled = envelope.slab_filled
            return SlabFilled(
                key=_key_of(filled.key),
                piece=filled.piece,
                slab_id=SlabId(filled.slab_id),
                lease_id=LeaseId(filled.lease_id),
            )
        case "commit":
            commit = envelope.commit
            return Commit(
                key=_key_of(commit.key),
                pieces=commit.pieces,
                first_token_ids=tuple(commit.first_token_ids),
                finished_choices=tuple(commit.finished_choices),
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
        case _:
            raise PeerError("a peer sent a message of a kind that this version does not know")
