"""Messages about pulled blocks to protobuf and back."""

from __future__ import annotations

from typing import assert_never

from kvpool.hashes import BlockHash
from kvpool.piece import PieceBlocks
from kvpool.pull import PullGranted, PullMessage, PullRead, PullSettled, PullWanted
from kvrelay.errors import PeerError
from kvrelay.v1 import peer_pb2

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
