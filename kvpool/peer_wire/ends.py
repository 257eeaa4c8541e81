"""How a handoff ends, to protobuf and back."""

from __future__ import annotations

from typing import assert_never

from kvpool.canary import KvDigest, PlaneDigest
from kvpool.handoff import CancelTransfer, Commit, Committed, EndMessage, TransferCancelled
from kvpool.peer_wire.key import decode_key, encode_key
from kvrelay.errors import PeerError
from kvrelay.v1 import peer_pb2 as pb


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
