"""Whether this host's RDMA devices reach the memory of its GPUs (GPUDirect RDMA)."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

MODULES = Path("/sys/module")
_PEER_MEMORY = ("nvidia_peermem", "nv_peer_mem")
_DMA_BUF_SUPPORTED = 124  # CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED, from cuda.h


def no_gpudirect(
    device: str, modules: Path = MODULES, exports: Callable[[int], bool] | None = None
) -> str | None:
    """Why KV of the CUDA device (PyTorch's name) passes through host memory, or None. `exports`:
    whether the driver can hand out that device's memory as a DMA-BUF."""
    if any((modules / name).exists() for name in _PEER_MEMORY):
        return None
    number = int(device.partition(":")[2] or 0)
    if (exports or _exports_dma_buf)(number):
        return None
    return "no nvidia-peermem module is loaded, and the GPU's driver exports no DMA-BUF"


def _exports_dma_buf(number: int) -> bool:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    handle, found = ctypes.c_int(), ctypes.c_int()
    failed = (
        driver.cuInit(0)
        or driver.cuDeviceGet(ctypes.byref(handle), number)
        or driver.cuDeviceGetAttribute(ctypes.byref(found), _DMA_BUF_SUPPORTED, handle)
    )
    return not failed and bool(found.value)
