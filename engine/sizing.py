"""How many KV blocks a device takes. Pure arithmetic; what is measured comes from `profile`."""

from __future__ import annotations

from dataclasses import dataclass

from kvpool.layout import KvLayout
from kvrelay.errors import ModelError

_USEFUL_TOKENS = 64
"""Fewer than this for the longest sequence (unless the model asks for fewer) is no service."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimits:
    """What the configuration asks for. `max_model_len` None: what the model can do.

    `share` workers divide the device's memory; `kv_memory_bytes` replaces what would be computed.
    `staging_slabs` slabs of together `staging_bytes` (None: of a chunk each) are lent to peers, and
    `sending_slabs` more hold what is sent over links that can't map the peer's memory.
    """

    max_model_len: int | None
    prefill_chunk_tokens: int
    max_running_requests: int
    memory_fraction: float = 0.9
    kv_memory_bytes: int | None = None
    share: int = 1
    staging_slabs: int = 0
    staging_bytes: int | None = None
    sending_slabs: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryProfile:
    """`total_bytes` may be divided among workers; the others are this worker's own needs."""

    total_bytes: int
    weight_bytes: int
    activation_bytes: int
    staging_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class KvSizing:
    """The device tier's size and the longest sequence served. `reason` is a line for the log."""

    blocks: int
    tokens: int
    max_model_len: int
    kv_bytes: int
    reason: str


def kv_budget_bytes(profile: MemoryProfile, limits: EngineLimits) -> int:
    """What is left for KV on the device."""
    if limits.kv_memory_bytes is not None:
        return limits.kv_memory_bytes
    share = int(limits.memory_fraction * profile.total_bytes / limits.share)
    used = profile.weight_bytes + profile.activation_bytes + profile.staging_bytes
    return max(0, share - used)


def size_kv(
    layout: KvLayout,
    limits: EngineLimits,
    profile: MemoryProfile,
    *,
    max_model_len: int,
    blocks: int | None = None,
) -> KvSizing:
    """As many blocks as fit, up to what `max_running_requests` sequences of `max_model_len` need.

    Where one such sequence doesn't fit, `max_model_len` is lowered. `blocks` fixes the count.
    Raises ModelError when nothing useful fits.
    """
    budget = kv_budget_bytes(profile, limits)
    fitting = budget // layout.bytes_per_block
    needed = limits.max_running_requests * layout.blocks_for(max_model_len)
    count = blocks if blocks is not None else min(fitting, needed)
    tokens = count * layout.block_size
    if tokens < min(max_model_len, _USEFUL_TOKENS):
        raise ModelError(
            f"only {tokens} tokens of KV fit: {_account(layout, limits, profile)}; raise "
            "memory_fraction, use a smaller dtype or lower prefill_chunk_tokens"
        )
    if blocks is not None:
        why = "as configured"
    elif needed <= fitting:
        why = f"all that {limits.max_running_requests} requests can need"
    else:
        why = _account(layout, limits, profile)
    served = min(max_model_len, tokens)
    return KvSizing(
        blocks=count,
        tokens=tokens,
        max_model_len=served,
        kv_bytes=count * layout.bytes_per_block,
        reason=_sentence(layout, count, why, served, max_model_len),
    )


def _sentence(layout: KvLayout, blocks: int, why: str, served: int, wanted: int) -> str:
    size = _human(blocks * layout.bytes_per_block)
    text = f"{blocks * layout.block_size} tokens of KV fit ({blocks} blocks, {size}): {why}"
    if served < wanted:
        text += f"; max_model_len is lowered from {wanted} to {served}"
    return text


def _account(layout: KvLayout, limits: EngineLimits, profile: MemoryProfile) -> str:
    per_token = _human(layout.bytes_per_token)
    if limits.kv_memory_bytes is not None:
        return f"kv_memory_bytes is {_human(limits.kv_memory_bytes)} at {per_token} per token"
    share = f" / {limits.share} workers" if limits.share > 1 else ""
    return (
        f"{limits.memory_fraction:g} x {_human(profile.total_bytes)}{share}"
        f" - weights {_human(profile.weight_bytes)}"
        f" - activations {_human(profile.activation_bytes)}"
        f" - staging {_human(profile.staging_bytes)}, at {per_token} per token"
    )


def _human(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} GiB"
