"""Pool messages to bytes and back, by protobuf: what the transport's `notify` carries.

A message may be longer than `notify` takes; it then travels in several parts, each behind one byte
that tells whether more follow.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import assert_never

from google.protobuf.message import DecodeError

from kvpool.core.layout.hashes import BlockHash, TenantBlocks
from kvpool.core.node.messages import (
    ChainBlock,
    FetchDone,
    Fetched,
    FetchWanted,
    LookedUp,
    LookupWanted,
    PoolFormat,
    PoolHello,
    PoolMessage,
    PoolRefused,
    PoolWelcome,
    StoreAbandoned,
    Stored,
    StoreGranted,
    StoreWanted,
)
from kvpool.core.node.tier_blocks import PoolPlace
from kvrelay.errors import PeerError
from kvrelay.types import Incarnation
from kvrelay.v1 import pool_node_pb2 as node_pb
from kvrelay.v1 import pool_pb2 as pb

MAX_PART_BYTES = 64 * 1024
_MAX_WHOLE_BYTES = 256 * 2**20
_HASH_BYTES = 32
_NO_PARENT = bytes(_HASH_BYTES)
_LAST, _MORE = b"\0", b"\1"


def encode(message: PoolMessage) -> list[bytes]:
    """Its parts, to be sent in this order with nothing of the same sender between them."""
    whole = _encode(message).SerializeToString()
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


def _encode(message: PoolMessage) -> pb.PoolMessage:
    match message:
        case PoolHello(format=format_):
            hello = pb.PoolHello(
                wire_version=message.wire_version,
                incarnation=message.incarnation,
                fingerprint=format_.fingerprint,
                physical_format=format_.physical_format,
                block_bytes=format_.block_bytes,
                looks_up=message.looks_up,
            )
            return pb.PoolMessage(hello=hello)
        case PoolWelcome():
            welcome = pb.PoolWelcome(
                wire_version=message.wire_version,
                incarnation=message.incarnation,
                region=message.region,
                lease_ttl_s=message.lease_ttl_s,
                addresses=message.addresses,
            )
            return pb.PoolMessage(welcome=welcome)
        case PoolRefused(reason=reason):
            return pb.PoolMessage(refused=pb.PoolRefused(reason=reason))
        case _:
            return _encode_numbered(message)


def _encode_numbered(
    message: StoreWanted
    | StoreGranted
    | Stored
    | StoreAbandoned
    | FetchWanted
    | Fetched
    | FetchDone
    | LookupWanted
    | LookedUp,
) -> pb.PoolMessage:
    no = message.request_no
    match message:
        case StoreWanted(blocks=blocks):
            hashes = _joined(block.hash for block in blocks)
            parents = b"".join(block.parent or _NO_PARENT for block in blocks)
            tenants = [block.tenant for block in blocks]
            wanted = pb.StoreWanted(
                request_no=no,
                hashes=hashes,
                parents=parents,
                tenants=tenants if any(tenants) else (),
            )
            return pb.PoolMessage(store_wanted=wanted)
        case StoreGranted(indices=indices, places=places):
            granted = pb.StoreGranted(request_no=no, indices=indices, places=places)
            return pb.PoolMessage(store_granted=granted)
        case Stored(checksums=checksums):
            return pb.PoolMessage(stored=pb.Stored(request_no=no, checksums=checksums))
        case StoreAbandoned():
            return pb.PoolMessage(store_abandoned=pb.StoreAbandoned(request_no=no))
        case FetchWanted(hashes=hashes, skip=skip):
            fetch = pb.FetchWanted(request_no=no, hashes=_joined(hashes), skip=skip)
            return pb.PoolMessage(fetch_wanted=fetch)
        case Fetched(places=places, checksums=checksums):
            fetched = pb.Fetched(request_no=no, places=places, checksums=checksums)
            return pb.PoolMessage(fetched=fetched)
        case FetchDone(damaged=damaged):
            done = pb.FetchDone(request_no=no, damaged=_joined(damaged))
            return pb.PoolMessage(fetch_done=done)
        case LookupWanted(hashes=hashes):
            lookup = pb.LookupWanted(request_no=no, hashes=_joined(hashes))
            return pb.PoolMessage(lookup_wanted=lookup)
        case LookedUp(host_blocks=host, disk_blocks=disk):
            found = pb.LookedUp(request_no=no, host_blocks=host, disk_blocks=disk)
            return pb.PoolMessage(looked_up=found)
        case _:
            assert_never(message)


def _decode(whole: bytes) -> PoolMessage:
    envelope = pb.PoolMessage()
    try:
        envelope.ParseFromString(whole)
    except DecodeError as error:
        raise PeerError(f"a peer sent {len(whole)} bytes that are no message: {error}") from error
    match envelope.WhichOneof("message"):
        case "hello":
            return _hello_of(envelope.hello)
        case "welcome":
            return PoolWelcome(
                wire_version=envelope.welcome.wire_version,
                incarnation=Incarnation(envelope.welcome.incarnation),
                region=envelope.welcome.region,
                lease_ttl_s=envelope.welcome.lease_ttl_s,
                addresses=tuple(envelope.welcome.addresses),
            )
        case "refused":
            return PoolRefused(reason=envelope.refused.reason)
        case _:
            return _decode_numbered(envelope)


def _decode_numbered(envelope: pb.PoolMessage) -> PoolMessage:
    match envelope.WhichOneof("message"):
        case "store_wanted":
            return _store_wanted_of(envelope.store_wanted)
        case "store_granted":
            granted = envelope.store_granted
            return StoreGranted(
                request_no=granted.request_no,
                indices=tuple(granted.indices),
                places=tuple(PoolPlace(place) for place in granted.places),
            )
        case "stored":
            stored = envelope.stored
            return Stored(request_no=stored.request_no, checksums=tuple(stored.checksums))
        case "store_abandoned":
            return StoreAbandoned(request_no=envelope.store_abandoned.request_no)
        case "fetch_wanted":
            fetch = envelope.fetch_wanted
            return FetchWanted(
                request_no=fetch.request_no, hashes=_hashes(fetch.hashes), skip=fetch.skip
            )
        case "fetched":
            fetched = envelope.fetched
            return Fetched(
                request_no=fetched.request_no,
                places=tuple(PoolPlace(place) for place in fetched.places),
                checksums=tuple(fetched.checksums),
            )
        case "fetch_done":
            done = envelope.fetch_done
            return FetchDone(request_no=done.request_no, damaged=_hashes(done.damaged))
        case "lookup_wanted":
            lookup = envelope.lookup_wanted
            return LookupWanted(request_no=lookup.request_no, hashes=_hashes(lookup.hashes))
        case "looked_up":
            found = envelope.looked_up
            return LookedUp(
                request_no=found.request_no,
                host_blocks=found.host_blocks,
                disk_blocks=found.disk_blocks,
            )
        case _:
            raise PeerError("a peer sent a pool message of a kind that this version does not know")


def _hello_of(hello: pb.PoolHello) -> PoolHello:
    return PoolHello(
        wire_version=hello.wire_version,
        incarnation=Incarnation(hello.incarnation),
        format=PoolFormat(
            fingerprint=hello.fingerprint,
            physical_format=hello.physical_format,
            block_bytes=hello.block_bytes,
        ),
        looks_up=hello.looks_up,
    )


def _store_wanted_of(wanted: pb.StoreWanted) -> StoreWanted:
    hashes, parents = _hashes(wanted.hashes), _hashes(wanted.parents)
    tenants = tuple(wanted.tenants) or ("",) * len(hashes)
    if not len(hashes) == len(parents) == len(tenants):
        raise PeerError(
            f"a peer sent {len(hashes)} blocks with {len(parents)} parents, {len(tenants)} tenants"
        )
    blocks = tuple(
        ChainBlock(block, None if parent == _NO_PARENT else parent, tenant)
        for block, parent, tenant in zip(hashes, parents, tenants, strict=True)
    )
    return StoreWanted(request_no=wanted.request_no, blocks=blocks)


def _joined(hashes: Iterable[BlockHash]) -> bytes:
    return b"".join(hashes)


def _hashes(joined: bytes) -> tuple[BlockHash, ...]:
    if len(joined) % _HASH_BYTES:
        raise PeerError(f"a peer sent hashes of {len(joined)} bytes together")
    return tuple(
        BlockHash(joined[at : at + _HASH_BYTES]) for at in range(0, len(joined), _HASH_BYTES)
    )


def cached_blocks(of: TenantBlocks) -> node_pb.CachedBlocks:
    return node_pb.CachedBlocks(**asdict(of))
