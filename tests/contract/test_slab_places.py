"""Where the slabs of a GPU's worker lie, over each transport: on the device or on the host. The
device, its network and CUDA's own calls are fakes."""

from __future__ import annotations

import gc
import itertools
import logging
import queue
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from uuid import uuid4

import pytest
import torch

from cluster.worker.peers import PeerLinks
from kvpool.core.transfer.commands import LinkMeasured, SendPeer
from kvpool.core.transfer.link_cost import Sample, TimedStep
from kvpool.core.transfer.messages import PeerHello, RenewLeases
from kvpool.core.transfer.pool_map import KvFacts
from kvpool.transport import gpudirect, registry
from kvpool.transport.endpoints import EndpointOptions, Endpoints
from kvpool.transport.link_kind import LinkKind
from kvpool.transport.mapped import memfd
from kvpool.transport.peer.base import Callbacks, Endpoint, RegionName
from kvpool.transport.peer.rendezvous import SameHost
from kvpool.transport.rdma.one_sided import OneSidedExposure
from kvpool.transport.rdma.slab_memory import SlabMemory, SlabPlace
from kvrelay.errors import ConfigError
from kvrelay.types import WIRE_VERSION, Incarnation, RequestKey
from tests.contract.fake_device import FakeAgent, FakeDevice, install_network, reaches_devices
from tests.contract.transport_kit import SECRET, until

OPTIONS = EndpointOptions(secret=SECRET, device="cuda:3")
NO_MODULE = "no module is loaded"
FAR = ("nixl", "ucx")
COPIES = {
    "cpu": (
        Sample(step=TimedStep.PREPARE, pieces=100, seconds=1e-3),
        Sample(step=TimedStep.GATHER, nbytes=2**20, pieces=4, seconds=1e-3),
        Sample(step=TimedStep.SCATTER, nbytes=2**20, pieces=4, seconds=1e-3),
    )
}
"""The fake device's tensors say so of themselves."""
RENEW = RenewLeases(keys=(RequestKey("r", 0),))
QUIET = Callbacks(on_connect=lambda _: None, on_message=lambda *_: None, on_lost=lambda _: None)


@dataclass(slots=True)
class FakeCuda:
    """Remembers what is pinned. `refuses`: the error that the next calls return."""

    device: FakeDevice = field(default_factory=FakeDevice)
    own: list[torch.Tensor] = field(default_factory=list)  # allocated as pinned memory
    pinned: dict[int, int] = field(default_factory=dict)  # address |-> bytes, pinned in place
    refuses: int = 0

    def cudaHostRegister(self, start: int, nbytes: int, flags: int) -> int:  # noqa: N802
        assert start not in self.pinned and flags == 1
        if not self.refuses:
            self.pinned[start] = nbytes
        return self.refuses

    def cudaHostUnregister(self, start: int) -> int:  # noqa: N802
        assert _is_mapped(start), "it comes too late: these pages may be another's"
        del self.pinned[start]
        return 0

    def is_pinned(self, memory: torch.Tensor) -> bool:
        at, behind = memory.data_ptr(), memory.data_ptr() + memory.numel()
        spans = [*self.pinned.items(), *((one.data_ptr(), one.numel()) for one in self.own)]
        return any(start <= at and behind <= start + nbytes for start, nbytes in spans)

    def allocate(self, slabs: SlabMemory, nbytes: int) -> torch.Tensor:
        if slabs.place is SlabPlace.DEVICE:
            return self.device.allocate(nbytes)
        memory = torch.zeros(nbytes, dtype=torch.uint8)
        if slabs.place is SlabPlace.PINNED:
            self.own.append(memory)
        return memory


def _is_mapped(address: int) -> bool:
    lines = Path("/proc/self/maps").read_text().splitlines()
    spans = [[int(end, 16) for end in line.split()[0].split("-")] for line in lines]
    return any(start <= address < behind for start, behind in spans)


class FakeIpc(OneSidedExposure):
    def expose(self, name: RegionName, memory: torch.Tensor) -> None:
        if not memory.is_cuda:
            raise ConfigError("memory of the device only")
        super().expose(name, memory)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake, put = FakeCuda(), monkeypatch.setattr

    def open_ipc(options: registry._Options) -> Endpoint:
        exposure = FakeIpc(FakeAgent(fake.device), options.slabs)
        return registry._endpoint(options, exposure, SameHost("cuda_ipc", options.incarnation))

    install_network(fake.device, put)
    monkeypatch.setitem(registry._OPENERS, "cuda_ipc", open_ipc)
    put(torch.cuda, "cudart", lambda: fake)
    put(torch.Tensor, "is_pinned", lambda memory: fake.is_pinned(memory))
    put(SlabMemory, "check", lambda slabs: None)
    put(SlabMemory, "allocate", lambda slabs, nbytes: fake.allocate(slabs, nbytes))
    return fake


@pytest.fixture(params=[True, False], ids=["gpudirect", "no gpudirect"])
def direct(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    reaches_devices(monkeypatch.setattr, no_module=None if request.param else NO_MODULE)
    return bool(request.param)


@contextmanager
def opened(*schemes: str) -> Iterator[Endpoints]:
    endpoints = Endpoints(schemes, Incarnation(uuid4().hex), QUIET, options=OPTIONS)
    try:
        yield endpoints
    finally:
        endpoints.close()


ORDERS = [
    order
    for count in (1, 2, 3, 4)
    for order in itertools.permutations(("cuda_ipc", "shm", "nixl", "ucx"), count)
]


def test_slabs_lie_where_each_transport_needs_them(cuda: FakeCuda, direct: bool) -> None:
    """In whatever order the transports are named. No two have memory of their own where one would
    do, and what is charged to the device is there."""
    for order in ORDERS:
        with opened(*order) as endpoints:
            slab = endpoints.register(1000)
            lies = {scheme: slab.memory_on(scheme) for scheme in order}
            for scheme, memory in lies.items():
                on_device = scheme == "cuda_ipc" or (scheme in FAR and direct)
                assert memory.is_cuda is on_device, (order, scheme)
                assert on_device or scheme == "shm" or cuda.is_pinned(memory), (order, scheme)
            places = {memory.data_ptr() for memory in lies.values()}
            assert len(places) == len({memory.is_cuda for memory in lies.values()}), order
            charged = OPTIONS.on_device(order)
            assert charged is any(memory.is_cuda for memory in lies.values()), order


def test_the_name_of_a_link_says_where_slabs_lie(cuda: FakeCuda, direct: bool) -> None:
    for order in (("shm", "nixl"), ("nixl", "cuda_ipc", "shm"), ("ucx",), ("cuda_ipc", "shm")):
        with opened(*order) as endpoints:
            slab = endpoints.register(1000)
            for scheme in order:
                names = [endpoints.label(f"{scheme}:h:1/{peer}") for peer in ("gpu/a", "a")]
                on_gpu = slab.memory_on(scheme).is_cuda
                where = ["-gpu", "-gpu-host"] if on_gpu else ["-gpu-host", "-host"]
                assert names == [scheme + (one if scheme in FAR else "") for one in where]


def test_the_log_says_once_what_passes_through_host_memory(
    cuda: FakeCuda, direct: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING), opened("cuda_ipc", "shm", "nixl") as endpoints:
        endpoints.register(1000)
        endpoints.label("nixl:h:1/a")
    told = f"nixl moves the KV of cuda:3 through host memory: {NO_MODULE}"
    assert [one.getMessage() for one in caplog.records] == ([] if direct else [told])


@pytest.mark.parametrize("direct", [True], indirect=True)
@pytest.mark.parametrize("scheme", FAR)
def test_where_the_network_takes_none_of_the_device_slabs_lie_on_the_host(
    cuda: FakeCuda, direct: bool, scheme: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Though the module is loaded. It is tried once, and all who ask hear the same."""
    cuda.device.refusal = "out of BAR space"
    why = f"memory can't be registered: {cuda.device.refusal}"
    assert not OPTIONS.on_device([scheme]), "nothing is charged to the device"
    with caplog.at_level(logging.WARNING), opened(scheme) as endpoints:
        assert cuda.is_pinned(endpoints.register(1000).memory_on(scheme))
        assert endpoints.label(endpoints.addresses[0]) == f"{scheme}-host"
    told = f"{scheme} moves the KV of cuda:3 through host memory: {why}"
    assert [one.getMessage() for one in caplog.records] == [told]
    assert len(cuda.device.seen) == 1
    with pytest.raises(ConfigError, match=rf"\[gpudirect\] and {scheme} is rdma \({why}\)"):
        Endpoints([scheme], Incarnation("a"), QUIET, options=OPTIONS, require=[LinkKind.GPUDIRECT])


def test_a_worker_on_a_cpu_has_neither(caplog: pytest.LogCaptureFixture) -> None:
    options = replace(OPTIONS, device="cpu")
    with caplog.at_level(logging.WARNING):
        endpoints = Endpoints(["nixl"], Incarnation(uuid4().hex), QUIET, options=options)
        endpoints.close()
    assert endpoints.label("nixl:h:1/a") == "nixl"
    assert endpoints.label("nixl:h:1/gpu/a") == "nixl-gpu-host", "the peer's are on a GPU"
    assert not caplog.records


def test_links_are_told_by_that_name(
    cuda: FakeCuda, direct: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO), worker("a") as (a, _), worker("b") as (b, name):
        a.send(SendPeer(peer=name, addresses=b.endpoints.addresses, message=RENEW))
        until(lambda: any(state.bytes_per_s for state in a.states()))
        (state,) = a.states()
    suffix = "gpu" if direct else "host"
    assert f"a -> b over nixl-{suffix}: " in caplog.text
    assert state.transport == f"nixl-{suffix}"


@pytest.mark.parametrize("direct", [True], indirect=True)
def test_to_a_gpu_and_to_the_memory_of_its_host_are_two_costs_and_two_names(
    cuda: FakeCuda, direct: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of three peers on one host the network reaches the GPUs of two."""
    reached = {OPTIONS.device: None}
    monkeypatch.setattr(gpudirect, "no_gpudirect", lambda device: reached.get(device, NO_MODULE))
    other, events = replace(OPTIONS, device="cuda:4"), queue.SimpleQueue[object]()
    with ExitStack() as stack:
        a, _ = stack.enter_context(worker("a", post=events.put))
        places = (OPTIONS, OPTIONS, other)
        peers = [stack.enter_context(worker(f"b{i}", one)) for i, one in enumerate(places)]
        for links, name in peers:
            a.send(SendPeer(peer=name, addresses=links.endpoints.addresses, message=RENEW))
        until(lambda: sum(state.bytes_per_s > 0 for state in a.states()) == 3)
        told = {state.peer: state.transport for state in a.states()}
        got = [events.get() for _ in range(events.qsize())]
    costs = {event.peer: event.cost for event in got if isinstance(event, LinkMeasured)}
    gpu, same, host = (name for _, name in peers)
    assert told == {gpu: "nixl-gpu", same: "nixl-gpu", host: "nixl-gpu-host"}
    assert costs[gpu] is costs[same] is not costs[host]


@contextmanager
def worker(
    name: str,
    options: EndpointOptions = OPTIONS,
    post: Callable[[object], None] = lambda event: None,
) -> Iterator[tuple[PeerLinks, Incarnation]]:
    hello = PeerHello(
        wire_version=WIRE_VERSION,
        incarnation=Incarnation(uuid4().hex),
        fingerprint="f00d",
        kv=KvFacts(dtype="float32", block_size=16, blocks=8, slab_bytes=1024),
        name=name,
    )
    links = PeerLinks(["nixl"], hello, post, options=options, copies=COPIES)
    try:
        yield links, hello.incarnation
    finally:
        links.close()


@pytest.mark.parametrize("direct", [False], indirect=True)
def test_shared_memory_is_pinned_once_and_as_long_as_it_lives(cuda: FakeCuda, direct: bool) -> None:
    with opened("shm", "nixl", "ucx") as endpoints:
        slab = endpoints.register(10_000)
        ((start, nbytes),) = cuda.pinned.items()
        assert start == slab.memory.data_ptr() and nbytes >= 10_000
        memory = slab.memory
        assert memfd.pin(memory), "it is already"
        endpoints.deregister(slab)
        del slab
        gc.collect()
        assert cuda.is_pinned(memory), "a copy of ours may still use it"
        del memory
        gc.collect()
        assert not cuda.pinned
        endpoints.register(10_000)
        assert len(cuda.pinned) == 1


def test_shared_memory_stays_as_it_is_where_none_needs_it_pinned(cuda: FakeCuda) -> None:
    with opened("cuda_ipc", "shm") as endpoints:
        endpoints.register(1000)
    assert not cuda.pinned and not cuda.own


@pytest.mark.parametrize("direct", [False], indirect=True)
def test_what_cuda_refuses_to_pin_is_told(cuda: FakeCuda, direct: bool) -> None:
    cuda.refuses = 801
    why = r"pin \d+ bytes .*801.*leave shm out of transfer"
    with opened("shm", "nixl") as endpoints, pytest.raises(ConfigError, match=why):
        endpoints.register(1000)
