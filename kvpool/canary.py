"""The KV canary: both ends of a handoff digest its KV where it lies, and compare. Pure.

    prefill worker                            decode worker
      all pieces are sent
      DigestBlocks -> BlocksDigested
      Commit(digest) --------------------->     all pieces have landed
                                                DigestBlocks -> BlocksDigested
                                                joins the batch, or fails with kv_mismatch

The checksum of a slab ends where the slab is scattered, and a piece that is read directly has none.
A digest covers what follows: a wrong block table, a wrong scatter or read, a block that somebody
else wrote meanwhile. It can't find KV that was computed wrong, nor wrong KV that comes from a pool.

A digest is linear in the KV: for each run of tokens of each plane, `SUMS` sums over all layers with
signs that depend on token, layer, head and dimension (AMS sketch: Alon, Matias, Szegedy 1996). So
ranks add up theirs, and an error that a codec may make changes a sum by little.
"""

from __future__ import annotations

from hashlib import blake2b
from math import inf, isfinite

from kvpool.codec_choice import wire_dtype
from kvpool.holder import Holder
from kvpool.layout import DTYPE_BYTES, KvLayout, Tables
from kvpool.write import TokenSpan
from kvrelay.values import value

SUMS = 4
"""One sum of noise misses a wrong block in 1 of 4 cases where a codec is allowed (`LOSSY`)."""
RUN_TOKENS = 16
MOST_RUNS = 2048
"""Of one digest, 20 bytes each: a message has at most 64 KiB."""

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
        """The largest difference of two sums, in norms of the run or of a run beside it: a codec
        has one scale for tokens of both."""
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
    """Digest the KV of `span` in the blocks of `tables`; answered by BlocksDigested."""

    holder: Holder
    span: TokenSpan
    tables: Tables


@value
class BlocksDigested:
    """`digests`: one for each copy of the heads, where ranks hold several."""

    holder: Holder
    digests: tuple[KvDigest, ...]


def is_chosen(request_id: str, every: int) -> bool:
    """One request in `every` (0: none), with all its tries: the rerun of one that failed its check
    is checked again."""
    if every == 0:
        return False
    digest = blake2b(request_id.encode(), digest_size=8, person=b"kvrelay-canary").digest()
    return int.from_bytes(digest, "little") % every == 0


def prompt_from(start: int, prompt_tokens: int) -> TokenSpan:
    """What is digested."""
    return TokenSpan(start=start, tokens=prompt_tokens - start, next_position=prompt_tokens)


def run_tokens(layout: KvLayout, tokens: int) -> int:
    """The tokens of one run."""
    planes = sum(len(group.planes) for group in layout.groups)
    return max(RUN_TOKENS, -(-tokens * planes // (MOST_RUNS - planes)))


def allowed_distance(sender_dtype: str, own_dtype: str, *, codecs: bool) -> float:
    """Of KV that is right; `codecs`: this worker allows some."""
    if codecs:
        return LOSSY
    if sender_dtype == own_dtype:
        return EXACT
    return LOSSY if DTYPE_BYTES[wire_dtype(sender_dtype, own_dtype)] == 1 else CONVERTED


def mismatch(sent: KvDigest, found: tuple[KvDigest, ...], allowed: float) -> str | None:
    """Why the KV that was `found` here can't be what was `sent`; None: it is."""
    distance = max(sent.distance(one) for one in found)
    if distance <= allowed:
        return None
    return f"the KV's digest differs by {distance:.2g} of its norm (allowed {allowed:.2g})"


def _beside(norms: tuple[float, ...]) -> tuple[list[float], list[float]]:
    """# run |-> the norm of the run before it, and behind it"""
    return [0.0, *norms][:-1], [*norms, 0.0][1:]


def _distance(difference: float, norm: float) -> float:
    if difference == 0.0 and isfinite(norm):
        return 0.0
    return abs(difference) / norm if isfinite(difference) and 0.0 < norm < inf else inf
