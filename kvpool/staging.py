"""How much memory a worker stages transfers in. Pure.

Each transfer in flight has a slab: by default for the largest piece that is ever sent, the KV of a
prefill chunk, with its header.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvpool.layout import KvLayout
from kvpool.slab import HEADER_BYTES
from kvrelay.errors import ConfigError

_MIB = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Staging:
    """`slabs` buffers of `slab_tokens` tokens each. `reason` is a line for the log."""

    slabs: int
    slab_tokens: int
    slab_bytes: int  # header included
    reason: str

    @property
    def payload_bytes(self) -> int:
        return self.slab_bytes - HEADER_BYTES

    @property
    def total_bytes(self) -> int:
        return self.slabs * self.slab_bytes


def plan_staging(
    layout: KvLayout, *, slabs: int, chunk_tokens: int, total_bytes: int | None
) -> Staging:
    """`total_bytes` None: a chunk for each. Raises ConfigError when a slab holds not one token."""
    tokens = chunk_tokens
    if total_bytes is not None:
        tokens = (total_bytes // slabs - HEADER_BYTES) // layout.bytes_per_token
        if tokens < 1:
            least = slabs * (layout.bytes_per_token + HEADER_BYTES)
            raise ConfigError(
                f"transfer.staging_bytes {total_bytes} holds no token for each of {slabs} "
                f"transfers; at least {least} bytes are needed"
            )
    size = HEADER_BYTES + tokens * layout.bytes_per_token
    return Staging(
        slabs=slabs,
        slab_tokens=tokens,
        slab_bytes=size,
        reason=(
            f"staging of {slabs * size / _MIB:.1f} MiB: {slabs} transfers in flight x {tokens} "
            f"tokens{' (a prefill chunk)' if total_bytes is None else ''} x "
            f"{layout.bytes_per_token} B"
        ),
    )
