"""What only the cuda_ipc transport promises. The contract itself needs a device (`gpu`)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from kvpool.transport.mapped import cuda_ipc
from kvpool.transport.mapped import cuda_ipc as cuda_handle
from kvpool.transport.mapped.cuda_ipc import CudaHandle
from kvpool.transport.registry import schemes
from kvrelay.errors import ConfigError, PeerError
from tests.contract.transport_kit import Side, until

_HANDLE = CudaHandle(
    handle=b"\x01" * 66,
    storage_bytes=2**40,
    storage_offset=2**33 + 512,
    counter_handle=b"/torch_1_2_3",
    counter_offset=17,
    event_handle=b"\x02" * 64,
    event_counts=True,
    offset=2**39,
    nbytes=2**39,
)


def test_the_registry_has_it() -> None:
    assert "cuda_ipc" in schemes()


def test_a_handle_travels_whole() -> None:
    assert CudaHandle.unpack(_HANDLE.pack()) == _HANDLE


@pytest.mark.parametrize("cut", [0, 1, 30, -1])
def test_a_handle_that_was_cut_is_refused(cut: int) -> None:
    with pytest.raises(PeerError, match="granted CUDA memory"):
        CudaHandle.unpack(_HANDLE.pack()[:cut])


def test_a_region_beyond_its_storage_is_refused() -> None:
    with pytest.raises(PeerError, match="does not fit"):
        CudaHandle.unpack(replace(_HANDLE, offset=_HANDLE.offset + 1).pack())


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a device")
def test_without_a_device_it_is_refused() -> None:
    with pytest.raises(ConfigError, match="needs a CUDA device, and PyTorch sees none"):
        Side("cuda_ipc")


def test_memory_that_cuda_cannot_share_is_refused_with_the_setting() -> None:
    """Memory of the CPU stands in for an allocator that cannot."""
    with pytest.raises(ConfigError, match="Unset expandable_segments in PYTORCH_CUDA_ALLOC_CONF"):
        cuda_handle.share(torch.zeros(10, dtype=torch.uint8))


def test_a_process_that_only_stopped_is_not_gone() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        watched = os.pidfd_open(process.pid)
        process.send_signal(signal.SIGSTOP)
        assert not cuda_ipc._is_gone(watched)
        process.kill()
        until(lambda: cuda_ipc._is_gone(watched))
        os.close(watched)


@pytest.mark.gpu
def test_only_memory_of_the_device_is_shared() -> None:
    with Side("cuda_ipc") as owner:
        handle = cuda_handle.share(owner.region(1 << 20).memory)
        assert handle.nbytes == 1 << 20
        cuda_handle.release(handle)
        with pytest.raises(ConfigError, match="only, not cpu"):
            owner.endpoint.adopt(torch.zeros(10, dtype=torch.uint8))
