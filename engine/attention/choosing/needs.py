"""The requirements of each attention backend: model, device, installed packages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec

import torch

from engine.attention.backend import GroupShape
from engine.attention.native.kernel import kernel_for
from kvpool.core.layout.layout import KvLayout

_HALF = ("bfloat16", "float16")
_FLASHINFER_DIMS = (64, 128, 256)
_FLASH_MOST_DIM = 256
_ONLY_TRITON = "only triton, on CUDA, serves engine.kv_dtype: fp8: use auto there"


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """The model to serve. `dtype` is the model's; the layout has that of its KV."""

    device: torch.device
    dtype: torch.dtype
    layout: KvLayout
    groups: tuple[GroupShape, ...]

    @property
    def has_own_kv_dtype(self) -> bool:
        return getattr(torch, self.layout.dtype) != self.dtype

    @property
    def on_cuda(self) -> bool:
        return self.device.type == "cuda"


def _native(wanted: Wanted) -> str | None:
    if wanted.device.type != "cpu":
        return f"it is for CPUs and this worker runs on {wanted.device}: use triton"
    if wanted.has_own_kv_dtype:
        return _ONLY_TRITON
    if kernel_for(wanted.layout, wanted.device) is None:
        return "the log says why it wasn't built, or it doesn't take these heads: use sdpa"
    return None


def _triton(wanted: Wanted) -> str | None:
    if find_spec("triton") is None:
        return "triton isn't installed: pip install triton"
    if not wanted.on_cuda and not _is_interpreted():
        return f"it needs a CUDA device and this worker runs on {wanted.device}: use sdpa"
    if not (wanted.on_cuda and wanted.has_own_kv_dtype):
        return None
    if torch.cuda.get_device_capability(wanted.device) < (8, 9):
        return "engine.kv_dtype: fp8 needs a device of compute capability 8.9: use auto there"
    return None


def _is_interpreted() -> bool:
    """TRITON_INTERPRET=1: kernels run on the CPU, for tests."""
    from triton import knobs

    return bool(knobs.runtime.interpret)


def _flashinfer(wanted: Wanted) -> str | None:
    reason = _half_on_cuda(wanted) or _installed("flashinfer", "pip install flashinfer-python")
    if reason is None and any(_is_odd(group) for group in wanted.groups):
        reason = f"it takes heads of {_FLASHINFER_DIMS} dims and no sinks: use triton"
    return reason


def _flash(wanted: Wanted) -> str | None:
    build = "build FlashAttention-3 (hopper/ of its repository)"
    reason = _half_on_cuda(wanted) or _installed("flash_attn_interface", build)
    if reason is not None:
        return reason
    if torch.cuda.get_device_capability(wanted.device)[0] != 9:
        return "FlashAttention-3 needs a Hopper device: use triton"
    if any(_exceeds_flash(group) for group in wanted.groups):
        return f"it takes heads of at most {_FLASH_MOST_DIM} dims and no sinks: use triton"
    return None


def _is_odd(group: GroupShape) -> bool:
    return group.has_sinks or group.dim not in _FLASHINFER_DIMS or group.dim != group.value_dim


def _exceeds_flash(group: GroupShape) -> bool:
    return group.has_sinks or group.dim != group.value_dim or group.dim > _FLASH_MOST_DIM


def _half_on_cuda(wanted: Wanted) -> str | None:
    if not wanted.on_cuda:
        return f"it needs a CUDA device and this worker runs on {wanted.device}: use sdpa"
    if wanted.layout.dtype not in _HALF:
        return f"it takes KV in {' or '.join(_HALF)}, not {wanted.layout.dtype}: use triton"
    return None


def _installed(module: str, how: str) -> str | None:
    return None if find_spec(module) is not None else f"{module} isn't installed: {how}"


def _sdpa(wanted: Wanted) -> str | None:
    return _ONLY_TRITON if wanted.has_own_kv_dtype else None


NEEDS: dict[str, Callable[[Wanted], str | None]] = {
    "native": _native,
    "triton": _triton,
    "flashinfer": _flashinfer,
    "flash": _flash,
    "sdpa": _sdpa,
}
"""# backend |-> why it can't serve, and what to do; None: it can serve"""
