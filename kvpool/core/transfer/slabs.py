"""Staging slabs: which peer may write into which one, their headers and sizes. Pure; runs in the
worker that owns the slabs.

A lease is current from `try_lend` until its slab is free or retired; events of an older lease
change nothing.

    free --try_lend--> lent --mark_filled--> filled --release--> free
                       lent --begin_fence--> fencing --fence_acknowledged--> free
                       lent ------------------------ fence_acknowledged ---> free  (not needed)
                       lent, fencing --expire, holder_lost--> retired --replaced--> free

A retired slab's region is deregistered and a new one registered in its place, because its writer
fell silent and may still write.

A slab begins with a header, so that a foreign, stale or damaged one is never scattered:

[0, 128)                      header, little endian, padded with zeros
[128, 128 + payload_bytes)    the sections of a write one after another, each in the format of
                              kvpool.core.layout.codec

Each transfer in flight has a slab. By default it has room for the largest piece, the KV of a
prefill chunk, with its header. On a CPU a piece is small enough to stay in the cache from gathering
to scattering, and a chunk is sent in several pieces.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NewType

import xxhash

from kvpool.core.layout.codec import Codec
from kvpool.core.layout.layout import KvLayout
from kvpool.core.transfer.piece import Piece
from kvpool.core.transfer.write import TokenSpan
from kvrelay.errors import ConfigError, PeerError
from kvrelay.types import WIRE_VERSION

SlabId = NewType("SlabId", int)
LeaseId = NewType("LeaseId", int)


class SlabState(StrEnum):
    FREE = "free"
    LENT = "lent"
    FILLED = "filled"
    FENCING = "fencing"
    RETIRED = "retired"


@dataclass(frozen=True, slots=True, kw_only=True)
class Lent:
    slab_id: SlabId
    lease_id: LeaseId


@dataclass(frozen=True, slots=True, kw_only=True)
class Expired:
    """The slab is retired: replace its region, then call `replaced`."""

    slab_id: SlabId
    lease_id: LeaseId
    holder: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldSlab:
    slab_id: SlabId
    state: SlabState
    holder: str
    age_s: float


@dataclass(slots=True)
class _Lease:
    lease_id: LeaseId
    holder: str
    state: SlabState
    since_s: float
    deadline_s: float


@dataclass(slots=True)
class SlabPool:
    """`count` slabs of `slab_bytes` bytes, ids 0 to `count - 1`."""

    slab_bytes: int
    count: int
    _free: list[SlabId] = field(init=False)
    _leases: dict[SlabId, _Lease] = field(init=False, default_factory=dict)
    _next_lease: int = field(init=False, default=1)

    def __post_init__(self) -> None:
        self._free = [SlabId(i) for i in reversed(range(self.count))]

    @property
    def free(self) -> int:
        return len(self._free)

    def try_lend(self, holder: str, nbytes: int, now_s: float, ttl_s: float) -> Lent | None:
        """A slab for `nbytes` bytes, or None when all are in use: the writer waits."""
        assert 0 <= nbytes <= self.slab_bytes, (nbytes, self.slab_bytes)
        if not self._free:
            return None
        slab_id, lease_id = self._free.pop(), LeaseId(self._next_lease)
        self._next_lease += 1
        self._leases[slab_id] = _Lease(
            lease_id=lease_id,
            holder=holder,
            state=SlabState.LENT,
            since_s=now_s,
            deadline_s=now_s + ttl_s,
        )
        return Lent(slab_id=slab_id, lease_id=lease_id)

    def mark_filled(self, slab_id: SlabId, lease_id: LeaseId) -> bool:
        """The writer is done. False and nothing changed unless it holds the slab."""
        lease = self._current(slab_id, lease_id, SlabState.LENT)
        if lease is None:
            return False
        lease.state = SlabState.FILLED
        return True

    def release(self, slab_id: SlabId, lease_id: LeaseId) -> None:
        """The owner has scattered or dropped a filled slab."""
        lease = self._current(slab_id, lease_id, SlabState.FILLED)
        assert lease is not None, f"slab {slab_id} is not filled under lease {lease_id}"
        self._set_free(slab_id)

    def begin_fence(self, slab_id: SlabId, lease_id: LeaseId) -> bool:
        """The transfer is cancelled, but its writer may still write until it acknowledges. The
        lease is the old one: a silent writer keeps the slab no longer than without the fence.

        False and nothing changed unless the slab is lent; a filled one is simply released.
        """
        lease = self._current(slab_id, lease_id, SlabState.LENT)
        if lease is None:
            return False
        lease.state = SlabState.FENCING
        return True

    def fence_acknowledged(self, slab_id: SlabId, lease_id: LeaseId) -> bool:
        """The writer will not write any more: the slab is free. False when the lease is not
        current."""
        if self._current(slab_id, lease_id, SlabState.LENT, SlabState.FENCING) is None:
            return False
        self._set_free(slab_id)
        return True

    def renew(self, lease_id: LeaseId, now_s: float, ttl_s: float) -> bool:
        """Its writer lives, and keeps a lent slab; False when it is not lent."""
        for lease in self._leases.values():
            if lease.lease_id == lease_id and lease.state is SlabState.LENT:
                lease.deadline_s = now_s + ttl_s
                return True
        return False

    def expire(self, now_s: float) -> tuple[Expired, ...]:
        """Retires slabs that are lent or fencing past their deadline."""
        return self._retire(s for s, lease in self._leases.items() if lease.deadline_s <= now_s)

    def holder_lost(self, holder: str) -> tuple[Expired, ...]:
        """Retires slabs to which this holder may still write; slabs that it has filled stay
        good."""
        return self._retire(s for s, lease in self._leases.items() if lease.holder == holder)

    def replaced(self, slab_id: SlabId) -> None:
        """The retired slab has a new region."""
        state = self._leases[slab_id].state
        assert state is SlabState.RETIRED, f"slab {slab_id} is {state}"
        self._set_free(slab_id)

    def held(self, now_s: float) -> tuple[HeldSlab, ...]:
        """All slabs that are not free, with their age since they were lent."""
        return tuple(
            HeldSlab(
                slab_id=slab_id,
                state=lease.state,
                holder=lease.holder,
                age_s=now_s - lease.since_s,
            )
            for slab_id, lease in self._leases.items()
        )

    def counts(self) -> dict[SlabState, int]:
        """# state |-> slabs; they always add up to `count`"""
        counts = dict.fromkeys(SlabState, 0)
        counts[SlabState.FREE] = len(self._free)
        for lease in self._leases.values():
            counts[lease.state] += 1
        return counts

    def validate(self) -> None:
        """The conservation law: each slab exactly once free or held, each lease once."""
        free = set(self._free)
        assert len(free) == len(self._free), "a slab is free twice"
        assert not free & self._leases.keys(), free & self._leases.keys()
        assert free | self._leases.keys() == set(range(self.count)), "a slab is lost"
        lease_ids = [lease.lease_id for lease in self._leases.values()]
        assert len(set(lease_ids)) == len(lease_ids), "a lease holds two slabs"
        assert all(lease_id < self._next_lease for lease_id in lease_ids)
        assert all(lease.state is not SlabState.FREE for lease in self._leases.values())

    def _current(self, slab_id: SlabId, lease_id: LeaseId, *states: SlabState) -> _Lease | None:
        lease = self._leases.get(slab_id)
        if lease is None or lease.lease_id != lease_id or lease.state not in states:
            return None
        return lease

    def _retire(self, slab_ids: Iterable[SlabId]) -> tuple[Expired, ...]:
        writable = (SlabState.LENT, SlabState.FENCING)
        chosen = [s for s in slab_ids if self._leases[s].state in writable]
        for slab_id in chosen:
            self._leases[slab_id].state = SlabState.RETIRED
        return tuple(
            Expired(slab_id=s, lease_id=self._leases[s].lease_id, holder=self._leases[s].holder)
            for s in chosen
        )

    def _set_free(self, slab_id: SlabId) -> None:
        del self._leases[slab_id]
        self._free.append(slab_id)


HEADER_BYTES = 128
_MAGIC = b"KVRSLAB\0"
# magic, version, dtype, codec, fingerprint, lease; start, tokens and next position of the span,
# index of the write; payload bytes, payload checksum
_FIELDS = struct.Struct("<8sHHH16sQQQQIQQ")
_CHECKSUM = struct.Struct("<Q")  # of all that stands before it
_PADDING = bytes(HEADER_BYTES - _FIELDS.size - _CHECKSUM.size)
NO_CHECKSUM = 0
_DTYPES = ("float32", "bfloat16", "float16", "float8_e4m3fn")
_CODECS = (Codec.NONE, Codec.FP8, Codec.INT8)


@dataclass(frozen=True, slots=True, kw_only=True)
class SlabHeader:
    """Names the piece of a sequence in the payload, and the lease under which it was written.

    `fingerprint` is the layout's logical fingerprint (32 hex digits), `checksum` the xxh3_64 of the
    payload, or NO_CHECKSUM where a device has gathered it. `dtype` is that of the elements under
    codec none.
    """

    fingerprint: str
    dtype: str
    codec: Codec
    lease_id: int
    piece: Piece
    payload_bytes: int
    checksum: int

    def pack(self) -> bytes:
        fields = _FIELDS.pack(
            _MAGIC,
            WIRE_VERSION,
            _DTYPES.index(self.dtype),
            _CODECS.index(self.codec),
            bytes.fromhex(self.fingerprint),
            self.lease_id,
            self.piece.span.start,
            self.piece.span.tokens,
            self.piece.span.next_position,
            self.piece.index,
            self.payload_bytes,
            self.checksum,
        )
        return _sealed(fields + _PADDING)

    @classmethod
    def unpack(cls, data: bytes, *, fingerprint: str) -> SlabHeader:
        """Raises PeerError that says what is wrong, unless it is a whole header for this model."""
        if len(data) < HEADER_BYTES:
            raise PeerError(f"slab header of {len(data)} bytes; it must have {HEADER_BYTES}")
        magic, version, dtype, codec, theirs, lease_id, *place, payload_bytes, digest = (
            _FIELDS.unpack_from(data)
        )
        start, tokens, next_position, index = place
        if magic != _MAGIC:
            raise PeerError(f"not a slab: magic {magic!r}")
        if version != WIRE_VERSION:
            raise PeerError(f"slab of wire version {version}; this worker speaks {WIRE_VERSION}")
        if _sealed(data[: HEADER_BYTES - _CHECKSUM.size]) != data[:HEADER_BYTES]:
            raise PeerError("slab header is damaged: wrong header checksum")
        if theirs.hex() != fingerprint:
            raise PeerError(f"slab of another model: fingerprint {theirs.hex()}, not {fingerprint}")
        if dtype >= len(_DTYPES):
            raise PeerError(f"slab of unknown dtype code {dtype}")
        if codec >= len(_CODECS):
            raise PeerError(f"slab of unknown codec {codec}")
        return cls(
            fingerprint=fingerprint,
            dtype=_DTYPES[dtype],
            codec=_CODECS[codec],
            lease_id=lease_id,
            piece=Piece(
                span=TokenSpan(start=start, tokens=tokens, next_position=next_position),
                index=index,
            ),
            payload_bytes=payload_bytes,
            checksum=digest,
        )

    def check_payload(self, payload: memoryview) -> None:
        """`payload` is everything behind the header. Raises PeerError."""
        if self.payload_bytes > payload.nbytes:
            raise PeerError(
                f"slab length {self.payload_bytes} is more than the {payload.nbytes} bytes there"
            )
        if self.checksum == NO_CHECKSUM:
            return
        if checksum(payload[: self.payload_bytes]) != self.checksum:
            raise PeerError("slab payload is damaged: wrong checksum")


def checksum(payload: memoryview) -> int:
    return int(xxhash.xxh3_64_intdigest(payload))


def _sealed(data: bytes) -> bytes:
    return data + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(data))


_MIB = 2**20
CACHED_BYTES = 4 * _MIB
"""Largest piece on a CPU: written twice as fast as one of 64 MiB, and a tenth faster than one of 8
MiB. For smaller ones the fixed costs matter (measured)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Staging:
    """`slabs` buffers. `reason` is a line for the log."""

    slabs: int
    slab_bytes: int  # header included
    reason: str

    @property
    def payload_bytes(self) -> int:
        return self.slab_bytes - HEADER_BYTES

    @property
    def total_bytes(self) -> int:
        return self.slabs * self.slab_bytes


def plan_staging(
    layout: KvLayout, *, slabs: int, chunk_tokens: int, total_bytes: int | None, on_cpu: bool
) -> Staging:
    """`total_bytes` None: each slab holds a chunk, `on_cpu` at most CACHED_BYTES of it. Raises
    ConfigError when a slab can't hold one token."""
    if total_bytes is None:
        payload_bytes = chunk_tokens * layout.bytes_per_token
        what = f"{chunk_tokens} tokens (a prefill chunk) x {layout.bytes_per_token} B"
        if on_cpu and payload_bytes > CACHED_BYTES:
            payload_bytes = max(CACHED_BYTES, layout.bytes_per_token)
            what = f"{payload_bytes / _MIB:.1f} MiB (as much as stays in cache)"
    else:
        tokens = _tokens_of(layout, slabs, total_bytes)
        payload_bytes = tokens * layout.bytes_per_token
        what = f"{tokens} tokens x {layout.bytes_per_token} B"
    size = HEADER_BYTES + payload_bytes
    mib = slabs * size / _MIB
    reason = f"staging of {mib:.1f} MiB: {slabs} transfers in flight x {what}"
    return Staging(slabs=slabs, slab_bytes=size, reason=reason)


def _tokens_of(layout: KvLayout, slabs: int, total_bytes: int) -> int:
    tokens = (total_bytes // slabs - HEADER_BYTES) // layout.bytes_per_token
    if tokens < 1:
        least = slabs * (layout.bytes_per_token + HEADER_BYTES)
        raise ConfigError(
            f"transfer.staging_bytes {total_bytes} can't hold a token for each of {slabs} "
            f"transfers; at least {least} bytes are needed"
        )
    return tokens
