"""A quick test whether this machine can have a GPU, without importing PyTorch, which takes
seconds."""

from __future__ import annotations

from pathlib import Path

NO_GPU = "this machine has no GPU"
DEVICE_FILES = ("nvidia[0-9]*", "kfd", "dxg")
"""Device files in /dev: of NVIDIA's driver, AMD's, and Windows' for Linux."""


def has_gpu_files(folder: Path = Path("/dev")) -> bool:
    return any(any(folder.glob(pattern)) for pattern in DEVICE_FILES)
