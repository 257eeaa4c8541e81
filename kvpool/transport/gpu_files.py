"""Whether this machine can have a GPU at all, without the seconds that PyTorch's import takes."""

from __future__ import annotations

from pathlib import Path

NO_GPU = "this machine has no GPU"
DEVICE_FILES = ("nvidia[0-9]*", "kfd", "dxg")
"""Of NVIDIA's driver, AMD's, and of Windows' for Linux, in /dev."""


def has_gpu_files(folder: Path = Path("/dev")) -> bool:
    return any(any(folder.glob(pattern)) for pattern in DEVICE_FILES)
