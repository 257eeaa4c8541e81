"""Slabs and pools in a device's memory over nixl and ucx. Between two processes of one device UCX
moves them by CUDA IPC, as it would by RDMA between hosts."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
import torch

from kvpool.transport import gpudirect, link_kind
from kvpool.transport.endpoints import EndpointOptions, Endpoints
from kvpool.transport.peer.base import Callbacks, Read, RegionWrite
from kvrelay.types import Incarnation
from tests.contract.transport_kit import ON_GPU, SECRET, Side, load, pair

pytestmark = pytest.mark.gpu
_BYTES = 32 << 20
_QUIET = Callbacks(on_connect=lambda _: None, on_message=lambda *_: None, on_lost=lambda _: None)


@pytest.fixture(params=[*ON_GPU])
def scheme(request: pytest.FixtureRequest) -> str:
    load(ON_GPU[request.param])
    return str(request.param)


def test_bytes_that_a_kernel_still_writes_arrive(scheme: str) -> None:
    """And none of them passes through a buffer of the transport's on the host."""
    with ExitStack() as stack:
        owner, writer, connection = pair(lambda: stack.enter_context(Side(scheme)))
        there, here = owner.region(_BYTES), writer.region(_BYTES)
        assert there.memory.is_cuda
        large = torch.ones(8192, 8192, device="cuda")
        for number in (1, 2, 3):
            product = large @ large  # keeps the stream busy
            here.memory.fill_(number).add_((product[0, 0] * 0).to(torch.uint8))
            connection.write(there.name, 0, here.memory)
            assert bool((there.memory == number).all())
        there.memory.random_()
        connection.read(there.name, 0, here.memory)
        assert torch.equal(there.memory, here.memory)
        assert writer.endpoint.staging_bytes == 0


def test_one_batch_of_both_memories(scheme: str) -> None:
    """Registered memory of the device, and memory of the host that is not."""
    with ExitStack() as stack:
        owner, writer, connection = pair(lambda: stack.enter_context(Side(scheme)))
        there, here = owner.region(3000), writer.region(1000)
        here.memory.fill_(1)
        host = torch.full((1000,), 2, dtype=torch.uint8)
        loose = torch.full((1000,), 3, dtype=torch.uint8, device="cuda")
        data = (here.memory, host, loose)
        connection.write_many(
            [RegionWrite(there.name, 1000 * i, one) for i, one in enumerate(data)]
        )
        assert there.memory.tolist() == [1] * 1000 + [2] * 1000 + [3] * 1000
        got = [torch.zeros_like(one) for one in data]
        connection.read_many([Read(there.name, 1000 * i, one) for i, one in enumerate(got)])
        assert all(torch.equal(one, wanted) for one, wanted in zip(got, data, strict=True))


def test_a_slab_is_shared_by_all_links_that_reach_it(
    monkeypatch: pytest.MonkeyPatch, scheme: str
) -> None:
    monkeypatch.setattr(link_kind, "rdma_obstacle", lambda scheme, ucx: None)
    monkeypatch.setattr(gpudirect, "no_gpudirect", lambda device: None)
    far = ON_GPU[scheme]
    options = EndpointOptions(secret=SECRET, device="cuda")
    both = Endpoints(["cuda_ipc", "shm", far], Incarnation("both"), _QUIET, options=options)
    try:
        slab, pool = both.register(1000), both.adopt(torch.zeros(9, dtype=torch.uint8).cuda())
        near, host, there = (slab.memory_on(name) for name in ("cuda_ipc", "shm", far))
        assert near.data_ptr() == there.data_ptr()
        assert host.is_cpu
        assert pool.over.keys() == {"cuda_ipc", far}
        assert both.label(both.addresses[-1]) == f"{far}-gpu"
    finally:
        both.close()


def test_without_gpudirect_slabs_are_shared_memory_that_is_pinned(
    monkeypatch: pytest.MonkeyPatch, scheme: str
) -> None:
    """As long as it lives. Afterwards CUDA has no error of it."""
    monkeypatch.setattr(link_kind, "rdma_obstacle", lambda scheme, ucx: "no RDMA device")
    far, options = ON_GPU[scheme], EndpointOptions(secret=SECRET, device="cuda")
    both = Endpoints(["cuda_ipc", "shm", far], Incarnation("both"), _QUIET, options=options)
    try:
        for number in (1, 2, 3):
            slab = both.register(_BYTES)
            near, host, there = (slab.memory_on(name) for name in ("cuda_ipc", "shm", far))
            assert near.is_cuda
            assert host.data_ptr() == there.data_ptr() and there.is_pinned()
            near.fill_(number)
            there.copy_(near, non_blocking=True)
            torch.cuda.synchronize()
            assert bool((host == number).all())
            both.deregister(slab)
            del slab, host, there
        torch.zeros(1, device="cuda").add_(1).item()
        assert both.label(both.addresses[-1]) == f"{far}-host"
    finally:
        both.close()
