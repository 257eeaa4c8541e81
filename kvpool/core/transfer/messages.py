"""The messages by which a prefill worker hands a request to a decode worker, as values. Pure.

    prefill worker                          decode worker
      PeerHello  <----------------------->  PeerHello       once per connection
      PiecesAhead(pieces, blocks) -------->  chooses a way for each; collated:
                         <------------------  SlabLent(piece, codec), when a slab is free
      gathers, writes, SlabFilled  -------->  scatters into the blocks it reserved
                                             or direct:
                         <------------------  PiecesAwaited(pieces)
      PieceComputed(piece)  --------------->  reads it into the blocks it reserved
                         <------------------  PiecesRead(pieces), when none is left to read
      Commit(first tokens)  --------------->  joins the running batch
      frees its blocks   <------------------  Committed

Pieces are announced before they are computed. With `push` the decode worker holds its blocks from
the reservation on. With `pull` it takes them when the first piece is announced, or later when some
are free; until then pieces wait.

With `pool` there are no pieces. The prefill worker tells how much of the prompt it has stored by
then (PrefixStored), the decode worker fetches it from the pool, and Commit says that all is there.

Either side may end the handoff early, by CancelTransfer or, once no write is in flight,
TransferCancelled. The latter is the fence: a slab is reused only after it, or after the slab is
retired at the end of its lease.

Only its owner ever writes a block. A read of blocks that were freed in between finds other bytes,
but they are never used. Commit follows PiecesRead, so the owner still held every block when the
last one had been read, however late a message is. Without Commit no request joins. So the owner
may free its blocks at any time, and no clock is trusted.

The KV canary: both ends of a handoff digest its KV in their own blocks, and compare.

    prefill worker                            decode worker
      all pieces are sent
      DigestBlocks -> BlocksDigested
      Commit(digest) --------------------->     all pieces have landed
                                                DigestBlocks -> BlocksDigested
                                                joins the batch, or fails with kv_mismatch

The checksum of a slab ends where the slab is scattered, and a piece that is read directly has none.
A digest covers the rest: a wrong block table, a wrong scatter or read, a block that another request
overwrote. It can't find KV that was computed wrong, nor wrong KV that comes from a pool.

A digest is linear in the KV: for each run of tokens of each plane, `SUMS` sums over all layers with
signs that depend on token, layer, head and dimension (AMS sketch: Alon, Matias, Szegedy 1996). So
the digests of ranks add up, and the small error of a codec changes a sum by little.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from hashlib import blake2b
from math import inf, isfinite

from kvpool.core.blocks.holding import Holder
from kvpool.core.layout.codec import Codec
from kvpool.core.layout.layout import DTYPE_BYTES, KvLayout, Tables
from kvpool.core.transfer.codec_choice import wire_dtype
from kvpool.core.transfer.piece import Piece, PieceBlocks
from kvpool.core.transfer.pool_map import KvFacts
from kvpool.core.transfer.pull import PullMessage
from kvpool.core.transfer.slabs import LeaseId, SlabId
from kvpool.core.transfer.write import TokenSpan
from kvrelay.types import Incarnation, RequestKey, value

SUMS = 4
"""With one sum, noise would hide a wrong block in 1 of 4 cases where a codec is allowed
(`LOSSY`)."""
RUN_TOKENS = 16
MOST_RUNS = 2048
"""Runs of one digest, 20 bytes each: a message has at most 64 KiB."""

EXACT = 1e-3
"""Two orders of summation in float32 differ by about 1e-6."""
CONVERTED = 0.02
"""A rounding to bfloat16 changes each element by 2^-9 at most: a sum by 0.0012 (one sigma)."""
LOSSY = 0.5
"""An 8-bit codec changes a sum by 0.01 (one sigma), by 0.1 where one element outweighs the rest."""


@value
class PlaneDigest:
    """# run of tokens |-> its Euclidean norm, and `SUMS` sums"""

    norms: tuple[float, ...]
    sums: tuple[float, ...]

    def distance(self, other: PlaneDigest) -> float:
        """The largest difference of two sums, in norms of the run or of a neighbouring run: a codec
        has one scale for the tokens of both."""
        if len(self.sums) != len(other.sums) or len(self.sums) != SUMS * len(self.norms):
            return inf
        beside = [max(around) for around in zip(self.norms, *_beside(self.norms), strict=True)]
        sums = enumerate(zip(self.sums, other.sums, strict=True))
        return max((_distance(a - b, beside[i // SUMS]) for i, (a, b) in sums), default=0.0)


@value
class KvDigest:
    """Of the KV of tokens from `start` to the prompt's end, as far as the next query sees it.
    # plane, of one layer group after another |-> its digest"""

    start: int
    planes: tuple[PlaneDigest, ...]

    def distance(self, other: KvDigest) -> float:
        if len(self.planes) != len(other.planes) or self.start != other.start:
            return inf
        pairs = zip(self.planes, other.planes, strict=True)
        return max((mine.distance(theirs) for mine, theirs in pairs), default=0.0)


@value
class DigestBlocks:
    """Digest the KV of `span` in the blocks of `tables`; the answer is BlocksDigested."""

    holder: Holder
    span: TokenSpan
    tables: Tables


@value
class BlocksDigested:
    """`digests`: one for each copy of the heads, if ranks hold several copies."""

    holder: Holder
    digests: tuple[KvDigest, ...]


def is_chosen(request_id: str, every: int) -> bool:
    """One request in `every` (0: none), with all its attempts: if a check failed, the next attempt
    is checked again."""
    if every == 0:
        return False
    digest = blake2b(request_id.encode(), digest_size=8, person=b"kvrelay-canary").digest()
    return int.from_bytes(digest, "little") % every == 0


def prompt_from(start: int, prompt_tokens: int) -> TokenSpan:
    """The span of tokens to digest."""
    return TokenSpan(start=start, tokens=prompt_tokens - start, next_position=prompt_tokens)


def run_tokens(layout: KvLayout, tokens: int) -> int:
    """The number of tokens in one run."""
    planes = sum(len(group.planes) for group in layout.groups)
    return max(RUN_TOKENS, -(-tokens * planes // (MOST_RUNS - planes)))


def allowed_distance(sender_dtype: str, own_dtype: str, *, codecs: bool) -> float:
    """The distance allowed for right KV; `codecs`: this worker allows some."""
    if codecs:
        return LOSSY
    if sender_dtype == own_dtype:
        return EXACT
    return LOSSY if DTYPE_BYTES[wire_dtype(sender_dtype, own_dtype)] == 1 else CONVERTED


def mismatch(sent: KvDigest, found: tuple[KvDigest, ...], allowed: float) -> str | None:
    """Why the KV that was `found` here can't be the KV that was `sent`; None: it can."""
    distance = max(sent.distance(one) for one in found)
    if distance <= allowed:
        return None
    return f"the KV's digest differs by {distance:.2g} of its norm (allowed {allowed:.2g})"


def _beside(norms: tuple[float, ...]) -> tuple[list[float], list[float]]:
    """# run |-> norms of the runs before and behind it"""
    return [0.0, *norms][:-1], [*norms, 0.0][1:]


def _distance(difference: float, norm: float) -> float:
    if difference == 0.0 and isfinite(norm):
        return 0.0
    return abs(difference) / norm if isfinite(difference) and 0.0 < norm < inf else inf


class HandoffMode(StrEnum):
    """`push`: pieces leave as they are computed, into blocks leased before. `pull`: the same, once
    the decode worker has room. `pool`: through the host's pool node."""

    PUSH = "push"
    PULL = "pull"
    POOL = "pool"


@value
class PeerHello:
    wire_version: int
    incarnation: Incarnation
    fingerprint: str
    kv: KvFacts
    name: str = ""
    probe_region: str = ""


@value
class PiecesAhead:
    """`count` pieces of one span, from `piece` on; `number` counts the request's pieces and is that
    of the first one here. `held` are the sender's blocks of all these pieces, fixed until the
    end."""

    key: RequestKey
    number: int
    piece: Piece
    held: tuple[PieceBlocks, ...]
    count: int = 1

    def numbered(self) -> Iterator[tuple[int, Piece]]:
        """# number, piece"""
        for i in range(self.count):
            yield self.number + i, Piece(span=self.piece.span, index=self.piece.index + i)


@value
class SlabLent:
    key: RequestKey
    piece: int
    slab_id: SlabId
    region: str
    lease_id: LeaseId
    codec: Codec = Codec.NONE


@value
class SlabFilled:
    key: RequestKey
    piece: int
    slab_id: SlabId
    lease_id: LeaseId


@value
class PiecesAwaited:
    """These pieces need no slab: announce each one when it is computed, then it is read where it
    lies."""

    key: RequestKey
    pieces: tuple[int, ...]


@value
class PieceComputed:
    key: RequestKey
    piece: int


@value
class PiecesRead:
    key: RequestKey
    pieces: tuple[int, ...]


@value
class PrefixStored:
    """The pool has the KV of the first `tokens` tokens; the rest is still being computed."""

    key: RequestKey
    tokens: int


@value
class Commit:
    """The next token of each choice; `finished_choices` ended with it and need no decoding. With a
    `digest` the KV is checked before it is used. The choices of a request that was moved here have
    emitted `resumed` since this worker was asked: empty, or an entry for each."""

    key: RequestKey
    pieces: int
    first_token_ids: tuple[int, ...]
    finished_choices: tuple[int, ...] = ()
    resumed: tuple[tuple[int, ...], ...] = ()
    digest: KvDigest | None = None


@value
class Committed:
    key: RequestKey


@value
class CancelTransfer:
    key: RequestKey
    reason: str


@value
class TransferCancelled:
    key: RequestKey
    reason: str


@value
class RenewLeases:
    """The requests of `keys` make progress: they wait for their turn or are computed, or some of
    their KV moves. Those that are `waiting` wait for the decode worker, which may know better."""

    keys: tuple[RequestKey, ...]
    waiting: tuple[RequestKey, ...] = ()


@value
class Ping:
    """Measures the time of a message; links answer it themselves."""


@value
class Pong:
    pass


@value
class LinkProbed:
    """The accepting side has measured the link, so the other side may start."""


PieceMessage = PiecesAhead | SlabLent | SlabFilled | PiecesAwaited | PieceComputed | PiecesRead
EndMessage = Commit | Committed | CancelTransfer | TransferCancelled


@value
class LinkStalled:
    """A copy took too long: this connection ends, and its transport is the last to be tried for the
    next one. Links hear it themselves."""


LinkMessage = PeerHello | RenewLeases | Ping | Pong | LinkProbed | LinkStalled
PeerMessage = PieceMessage | PrefixStored | EndMessage | LinkMessage | PullMessage

TO_PREFILL = (SlabLent, PiecesAwaited, PiecesRead, Committed, CancelTransfer)
"""Messages of a decode worker; all others are the prefill worker's, and the hello is sent by
both."""
