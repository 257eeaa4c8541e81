"""How much memory a worker stages transfers in. Pure.

Each transfer in flight has a slab: by default for the largest piece that is ever sent, the KV of a
prefill chunk, with its header. On a CPU pieces are no larger than what stays in its cache from
gathering to scattering, and a chunk goes in several.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvpool.layout import KvLayout
from kvpool.slab import HEADER_BYTES
from kvrelay.errors import ConfigError

_MIB = 2**20
CACHED_BYTES = 4 * _MIB
"""A piece on a CPU: written twice as fast as one of 64 MiB, and a tenth faster than one of 8. Of
smaller ones, what each costs besides its copies takes a share that counts (measured)."""


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
    """`total_bytes` None: a chunk for each, `on_cpu` at most CACHED_BYTES of it. Raises ConfigError
    when a slab holds not one token."""
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
            f"transfer.staging_bytes {total_bytes} holds no token for each of {slabs} "
            f"transfers; at least {least} bytes are needed"
        )
    return tokens
