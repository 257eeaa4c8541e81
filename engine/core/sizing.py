"""The number of KV blocks that fit on a device. Pure arithmetic; `engine.memory_profile`
measures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from kvpool.core.layout.layout import KvLayout
from kvpool.core.transfer.slabs import plan_staging
from kvrelay.errors import ModelError
from kvrelay.types import size_text

MOST_CONTEXT_BYTES = 3 << 29
"""A process alone on its device is charged what it takes outside torch's allocator. Where others
are on the device too, it is at most this. Measured on H100 elsewhere (vLLM's logs in
llm-d-benchmark, config_explorer): 0.61 GiB before the weights, up to 0.55 more with NCCL."""

STEP_BYTES = 2 << 20
"""torch's allocator takes large pieces from the driver in multiples of this (its
CUDACachingAllocator: kRoundLarge)."""

_GPU_COPIES = 2
"""Slabs on the host are copied: one gathered and one received at a time."""

_USEFUL_TOKENS = 64
"""A longest sequence of fewer tokens is useless (unless the model is that short)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimits:
    """Limits from the configuration. `max_model_len` None: the model's own.

    `share` workers divide the device's memory; `kv_memory_bytes` replaces the computed size.
    `staging_slabs` slabs of `staging_bytes` together (None: a chunk each) are lent to peers.
    `sending_slabs` more hold pieces that are sent over links which can't map the peer's memory.
    `slabs_on_device`: a GPU's slabs lie on it, not on the host.
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
    slabs_on_device: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryProfile:
    """`total_bytes` may be divided among workers; the others are this worker's own needs.

    Of CUDA only: `context_bytes` lie outside torch's allocator, `kept_bytes` in it beside the
    weights (workspaces, tables, rounding), `graph_bytes` are those of recorded decode steps.
    `free_bytes` were free on the device, whoever uses the rest, when all of this was there but a
    step's activations and staging.
    """

    total_bytes: int
    weight_bytes: int
    activation_bytes: int
    staging_bytes: int = 0
    context_bytes: int = 0
    kept_bytes: int = 0
    graph_bytes: int = 0
    free_bytes: int | None = None

    @property
    def needs(self) -> dict[str, int]:
        """# what for |-> bytes"""
        cuda = {
            "context": self.context_bytes,
            "workspaces": self.kept_bytes,
            "CUDA graphs": self.graph_bytes,
        }
        return {
            "weights": self.weight_bytes,
            "activations": self.activation_bytes,
            "staging": self.staging_bytes,
            **{name: nbytes for name, nbytes in cuda.items() if nbytes},
        }

    @property
    def left_bytes(self) -> int | None:
        """For KV, on a device that others may use too; None: unknown."""
        if self.free_bytes is None:
            return None
        return max(0, self.free_bytes - self.activation_bytes - self.staging_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class KvSizing:
    """The device tier's size and the longest sequence served. `reason` is a line for the log.
    `account`: # what for |-> bytes, of all ranks together."""

    blocks: int
    tokens: int
    max_model_len: int
    kv_bytes: int
    reason: str
    account: Mapping[str, int] = field(default_factory=dict)


def in_steps(nbytes: int) -> int:
    return -(-nbytes // STEP_BYTES) * STEP_BYTES


def staging_bytes(layout: KvLayout, limits: EngineLimits, *, on_cpu: bool) -> int:
    """On a CPU all slabs take memory from the KV. On a GPU those do which a link reaches there;
    slabs on the host are copied."""
    if not limits.staging_slabs:
        return 0
    staging = plan_staging(
        layout,
        slabs=limits.staging_slabs,
        chunk_tokens=limits.prefill_chunk_tokens,
        total_bytes=limits.staging_bytes,
        on_cpu=on_cpu,
    )
    slabs = limits.staging_slabs + limits.sending_slabs
    if on_cpu:
        return staging.slab_bytes * slabs
    on_device = slabs if limits.slabs_on_device else 0
    return in_steps(staging.slab_bytes) * (on_device + _GPU_COPIES)


def kv_budget_bytes(profile: MemoryProfile, limits: EngineLimits) -> int:
    """The memory left for KV on the device."""
    if limits.kv_memory_bytes is not None:
        return limits.kv_memory_bytes
    share = int(limits.memory_fraction * profile.total_bytes / limits.share)
    rest = max(0, share - sum(profile.needs.values()))
    return rest if profile.left_bytes is None else min(rest, profile.left_bytes)


def size_kv(
    layout: KvLayout,
    limits: EngineLimits,
    profile: MemoryProfile,
    *,
    max_model_len: int,
    blocks: int | None = None,
    block_bytes: int | None = None,
) -> KvSizing:
    """As many blocks as fit, up to the need of `max_running_requests` sequences of `max_model_len`.

    If one such sequence doesn't fit, `max_model_len` is lowered. `blocks` fixes the count.
    `block_bytes`: the size of a block if ranks keep heads twice. Raises ModelError when nothing
    useful fits.
    """
    budget = kv_budget_bytes(profile, limits)
    block_bytes = block_bytes or layout.bytes_per_block
    fitting = budget // block_bytes
    needed = limits.max_running_requests * layout.blocks_for(max_model_len)
    count = blocks if blocks is not None else min(fitting, needed)
    tokens, token_bytes = count * layout.block_size, block_bytes / layout.block_size
    if tokens < min(max_model_len, _USEFUL_TOKENS):
        raise ModelError(
            f"only {tokens} tokens of KV fit: {_account(token_bytes, limits, profile)}; raise "
            "memory_fraction, use a smaller dtype or lower prefill_chunk_tokens"
        )
    _check_left(count * block_bytes, profile)
    if blocks is not None:
        why = "as configured"
    elif needed <= fitting:
        enough = f"all that {limits.max_running_requests} requests can need"
        why = f"{enough}, of {_account(token_bytes, limits, profile)}"
    else:
        why = _account(token_bytes, limits, profile)
    served = min(max_model_len, tokens)
    return KvSizing(
        blocks=count,
        tokens=tokens,
        max_model_len=served,
        kv_bytes=count * block_bytes,
        reason=_sentence(tokens, count, token_bytes, why) + _lowered(served, max_model_len),
        account={**profile.needs, "KV": count * block_bytes},
    )


def of_one_host(profiles: Sequence[MemoryProfile]) -> MemoryProfile:
    """`profiles` are those of ranks on CPUs, which share the host's memory and rank 0's slabs. The
    host's memory is as rank 0 found it, with the weights of all loaded: it ends a step last."""
    first, *others = profiles
    weights = sum(one.weight_bytes for one in others)
    return replace(
        first,
        total_bytes=first.total_bytes + weights,
        weight_bytes=first.weight_bytes + weights,
        activation_bytes=sum(one.activation_bytes for one in profiles),
    )


def size_ranks(
    layout: KvLayout,
    limits: EngineLimits,
    profiles: Sequence[MemoryProfile],
    *,
    max_model_len: int,
    block_bytes: Sequence[int],
) -> KvSizing:
    """As many blocks as all ranks have room for. Each has a device of its own; `block_bytes` are
    its part of a block. Raises ModelError, which names the rank that has no room."""
    ranks, whole = len(profiles), sum(block_bytes)
    sizings = []
    for rank, (profile, part) in enumerate(zip(profiles, block_bytes, strict=True)):
        with _named(f"rank {rank} of {ranks}, with {part / whole:.3g} of the KV: ") as name:
            own = _part_of(limits, part, whole)
            one = size_kv(layout, own, profile, max_model_len=max_model_len, block_bytes=part)
        sizings.append(replace(one, reason=name + one.reason))
    least = min(sizings, key=lambda one: one.blocks)
    kv_bytes, needs = least.blocks * whole, Counter[str]()
    for profile in profiles:
        needs.update(profile.needs)
    return replace(least, kv_bytes=kv_bytes, account={**needs, "KV": kv_bytes})


def _part_of(limits: EngineLimits, part: int, whole: int) -> EngineLimits:
    if limits.kv_memory_bytes is None:
        return limits
    return replace(limits, kv_memory_bytes=limits.kv_memory_bytes * part // whole)


@contextmanager
def _named(name: str) -> Iterator[str]:
    try:
        yield name
    except ModelError as error:
        raise ModelError(name + str(error)) from error


def _sentence(tokens: int, blocks: int, token_bytes: float, why: str) -> str:
    size = size_text(tokens * token_bytes)
    return f"{tokens} tokens of KV fit ({blocks} blocks, {size}): {why}"


def _lowered(served: int, wanted: int) -> str:
    return f"; max_model_len is lowered from {wanted} to {served}" if served < wanted else ""


def _check_left(kv_bytes: int, profile: MemoryProfile) -> None:
    """Only a configured size can be too large."""
    if profile.left_bytes is not None and kv_bytes > profile.left_bytes:
        raise ModelError(
            f"kv_memory takes {size_text(kv_bytes)} and the device has "
            f"{size_text(profile.left_bytes)} left for it: {size_text(profile.total_bytes)}"
            f"{_needs(profile)}, less what other processes use; lower kv_memory"
        )


def _account(token_bytes: float, limits: EngineLimits, profile: MemoryProfile) -> str:
    per_token = size_text(token_bytes)
    if limits.kv_memory_bytes is not None:
        return f"kv_memory_bytes is {size_text(limits.kv_memory_bytes)} at {per_token} per token"
    share = f" / {limits.share} workers" if limits.share > 1 else ""
    whole = f"{limits.memory_fraction:g} x {size_text(profile.total_bytes)}{share}"
    return f"{whole}{_needs(profile)}{_taken(limits, profile)}, at {per_token} per token"


def _needs(profile: MemoryProfile) -> str:
    return "".join(f" - {name} {size_text(nbytes)}" for name, nbytes in profile.needs.items())


def _taken(limits: EngineLimits, profile: MemoryProfile) -> str:
    """Where other processes leave less than this worker's part."""
    budget = kv_budget_bytes(profile, limits)
    if profile.left_bytes is None or budget < profile.left_bytes:
        return ""
    return f" (the device has only {size_text(profile.left_bytes)} left for KV)"
