"""Links over several transports: which one a pair uses, what is measured, what is refused."""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import cast
from uuid import uuid4

import pytest
import torch

from cluster.worker import peers, prober
from cluster.worker.peers import PeerLinks
from cluster.worker.prober import Link
from kvpool.core.layout.layout import KvLayout, LayerGroup, Plane
from kvpool.core.transfer.commands import DropLink, FromPeer, LinkMeasured, PeerLost, SendPeer
from kvpool.core.transfer.link_cost import Sample, TimedStep
from kvpool.core.transfer.messages import PeerHello, RenewLeases, SlabLent
from kvpool.core.transfer.pool_map import KvFacts
from kvpool.core.transfer.slabs import LeaseId, SlabId
from kvpool.memory.kv_memory import KvMemory
from kvpool.memory.probe import measure_copies
from kvpool.transport import endpoints, link_kind, probe
from kvpool.transport.endpoints import EndpointOptions
from kvpool.transport.gpudirect import no_gpudirect
from kvpool.transport.link_kind import (
    LinkKind,
    UcxInfo,
    describe,
    library_of_nixl,
    no_cuda,
    no_rdma,
    obstacle_of,
    rdma_ports,
)
from kvpool.transport.peer.base import Connection, RegionName
from kvpool.transport.probe import PROBE_BYTES
from kvpool.transport.rdma.slab_memory import SlabMemory, SlabPlace
from kvpool.transport.rdma.ucx_options import UcxOptions
from kvrelay.errors import ConfigError, PeerError
from kvrelay.types import WIRE_VERSION, Incarnation, RequestKey
from tests.contract.fake_device import reaches_devices

RENEW = RenewLeases(keys=(RequestKey("r", 0),))
LAYOUT = KvLayout(
    groups=(
        LayerGroup(
            layers=(0, 1),
            planes=(Plane(name="k", heads=2, dim=8), Plane(name="v", heads=2, dim=8)),
        ),
    ),
    dtype="float32",
    block_size=16,
)
COPIES = {
    "cpu": (
        Sample(step=TimedStep.PREPARE, pieces=100, seconds=1e-3),
        Sample(step=TimedStep.GATHER, nbytes=2**20, pieces=4, seconds=1e-3),
        Sample(step=TimedStep.SCATTER, nbytes=2**20, pieces=4, seconds=1e-3),
    )
}


class Side:
    def __init__(self, name: str, *transports: str, **options: object) -> None:
        hello = PeerHello(
            wire_version=WIRE_VERSION,
            incarnation=Incarnation(f"{name}-{uuid4().hex}"),
            fingerprint="f00d",
            kv=KvFacts(dtype="float32", block_size=16, blocks=8, slab_bytes=1024),
            name=name,
        )
        self.inbox: queue.SimpleQueue[FromPeer | PeerLost | LinkMeasured] = queue.SimpleQueue()
        known = {"options": EndpointOptions(secret=b"known")} | options
        self.links = PeerLinks(transports, hello, self.inbox.put, **known)  # type: ignore[arg-type]
        self.incarnation = hello.incarnation

    def greet(self, peer: Side) -> None:
        addresses = peer.links.endpoints.addresses
        self.links.send(SendPeer(peer=peer.incarnation, addresses=addresses, message=RENEW))

    def next(self) -> FromPeer | PeerLost | LinkMeasured:
        """But hellos."""
        event = self.inbox.get(timeout=20)
        if isinstance(event, FromPeer) and isinstance(event.message, PeerHello):
            return self.next()
        return event

    def until(self, kind: type) -> FromPeer | PeerLost | LinkMeasured:
        while not isinstance(event := self.next(), kind):
            pass
        return event


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine is no peer that is gone."""
    monkeypatch.setattr(prober, "ANSWER_S", 20.0)


@pytest.fixture
def side() -> Iterator[Callable[..., Side]]:
    with ExitStack() as stack:

        def make(name: str, *transports: str, **options: object) -> Side:
            made = Side(name, *transports, **options)
            stack.callback(made.links.close)
            return made

        yield make


def transport_of(side: Side, peer: Side) -> str:
    return side.links.connection(peer.incarnation).peer_address.partition(":")[0]


@pytest.mark.parametrize(
    ("ours", "theirs", "used"),
    [
        (("shm", "loopback"), ("loopback", "shm"), "shm"),
        (("loopback", "shm"), ("shm", "loopback"), "loopback"),
        (("shm", "loopback"), ("loopback",), "loopback"),
    ],
)
def test_the_opener_prefers(side, ours, theirs, used) -> None:
    a, b = side("a", *ours), side("b", *theirs)
    a.greet(b)
    assert b.next() == FromPeer(peer=a.incarnation, message=RENEW)
    assert transport_of(a, b) == transport_of(b, a) == used


def test_a_transport_that_does_not_reach_the_peer_is_passed_over(side, caplog) -> None:
    a, b = side("a", "shm", "loopback"), side("b", "loopback")
    addresses = ("shm:on-another-host", *b.links.endpoints.addresses)
    with caplog.at_level(logging.WARNING):
        a.links.send(SendPeer(peer=b.incarnation, addresses=addresses, message=RENEW))
    assert b.next() == FromPeer(peer=a.incarnation, message=RENEW)
    assert "using loopback: " in caplog.text and "shm:on-another-host" in caplog.text


def test_ports_and_secrets_are_those_of_the_options(side) -> None:
    ours = EndpointOptions(port_range=(21700, 21799), secret=b"one")
    a, b = side("a", "nixl", options=ours), side("b", "nixl", options=ours)
    (address,) = a.links.endpoints.addresses
    assert 21700 <= int(address.rpartition("/")[0].rpartition(":")[2]) <= 21799
    a.greet(b)
    assert b.next() == FromPeer(peer=a.incarnation, message=RENEW)
    stranger = side("c", "nixl", options=EndpointOptions(secret=b"another"))
    stranger.greet(b)
    assert isinstance(stranger.next(), PeerLost)


def test_nothing_in_common_is_said(side) -> None:
    a, b = side("a", "shm"), side("b", "loopback")
    a.greet(b)
    lost = a.next()
    assert isinstance(lost, PeerLost)
    assert lost.reason == "no transport in common: the peer has loopback, this worker shm"


def test_a_slab_goes_by_the_name_that_its_transport_knows(side) -> None:
    """Both transports reach the same memory, each by its own name."""
    a, b, c = side("a", "shm"), side("b", "loopback", "shm"), side("c", "loopback")
    slab = b.links.endpoints.register(4096)
    for peer in (a, c):
        peer.greet(b)
        b.next()
        b.links.notify(peer.incarnation, lent(slab.name))
        said = peer.next()
        assert isinstance(said, FromPeer) and isinstance(said.message, SlabLent)
        connection = peer.links.connection(b.incarnation)
        connection.write(RegionName(said.message.region), 0, torch.full((9,), 7).to(torch.uint8))
        assert slab.memory[:9].tolist() == [7] * 9
        slab.memory.zero_()


def lent(region: str) -> SlabLent:
    return SlabLent(
        key=RequestKey("r", 0), piece=0, slab_id=SlabId(0), region=region, lease_id=LeaseId(1)
    )


def test_a_region_that_is_gone_has_no_name(side) -> None:
    b = side("b", "loopback", "shm")
    slab = b.links.endpoints.register(64)
    b.links.endpoints.deregister(slab)
    assert b.links.endpoints.name_over("shm", slab.name) is None


def test_a_transport_without_its_package_is_left_out(side, caplog, monkeypatch) -> None:
    def missing(*_: object) -> None:
        raise ConfigError("transport 'nixl' needs its extra: pip install 'kvrelay[nixl]'")

    monkeypatch.setitem(opener(), "nixl", missing)
    with caplog.at_level(logging.WARNING):
        a = side("a", "nixl", "shm")
    assert a.links.endpoints.schemes == ("shm",)
    assert "pip install 'kvrelay[nixl]'; going on with shm" in caplog.text
    with pytest.raises(ConfigError, match=r"no transport can be used: .*kvrelay\[nixl\]"):
        side("b", "nixl")


def opener() -> dict[str, object]:
    from kvpool.transport import registry

    return registry._OPENERS  # type: ignore[return-value]


# --- measuring ----------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", ["shm", "loopback", "nixl"])
def test_both_ends_measure_their_link(side, transport, caplog) -> None:
    a, b = side("prefill-0", transport, copies=COPIES), side("decode-1", transport, copies=COPIES)
    with caplog.at_level(logging.INFO):
        a.greet(b)
        seen = [a.until(LinkMeasured), b.until(LinkMeasured)]
    for event, peer in zip(seen, (b, a), strict=True):
        assert isinstance(event, LinkMeasured) and event.peer == peer.incarnation
        assert event.cost.transport == transport
        assert 0 < event.cost.bytes_per_s < 1e12
        assert event.cost.latency_s > 0
        assert event.cost.mapped == (transport != "nixl")
    (state,) = a.links.states()
    assert (state.peer, state.transport) == (b.incarnation, transport)
    assert state.bytes_per_s > 0 and state.latency_s > 0
    assert b.links.states() == ()
    assert f"prefill-0 -> decode-1 over {transport}: " in caplog.text


def test_a_link_of_a_known_kind_keeps_the_figures(side) -> None:
    a = side("a", "shm", copies=COPIES)
    b, c = side("b", "shm", copies=COPIES), side("c", "shm", copies=COPIES)
    a.greet(b)
    first = a.until(LinkMeasured)
    a.greet(c)
    second = a.until(LinkMeasured)
    assert isinstance(first, LinkMeasured) and isinstance(second, LinkMeasured)
    assert second.peer == c.incarnation
    assert second.cost is first.cost


@pytest.mark.parametrize(
    ("address", "kind"),
    [
        ("shm:decode-0.1", "shm"),
        ("nixl:10.0.0.7:4711/decode-0.1", "nixl:10.0.0.7"),
        ("nixl:10.0.0.7:4711/gpu/decode-0.1", "nixl:10.0.0.7/gpu"),
        ("nixl:[fd00::7]:4711/decode-0.1", "nixl:[fd00::7]"),
        ("cuda_ipc:3f1c9a2e/decode-0.1", "cuda_ipc:3f1c9a2e"),
    ],
)
def test_links_to_one_host_or_gpu_are_of_one_kind(address: str, kind: str) -> None:
    assert link_to(address).kind == kind


def test_only_another_gpu_is_a_device_apart() -> None:
    own = "cuda_ipc:3f1c9a2e/prefill-0.1"
    assert not link_to("cuda_ipc:3f1c9a2e/decode-0.1").is_apart(own)
    assert link_to("cuda_ipc:77aa0b1c/decode-0.1").is_apart(own)
    assert not link_to("shm:decode-0.1").is_apart("shm:prefill-0.1")


def link_to(address: str) -> Link:
    connection = cast(Connection, SimpleNamespace(peer_address=address))
    peer = Incarnation(address.rpartition("/")[2])
    return Link(peer=peer, name="decode-0", connection=connection, probe_region="", opened=True)


def test_messages_pass_while_a_link_is_measured(side) -> None:
    a, b = side("a", "shm", copies=COPIES), side("b", "shm", copies=COPIES)
    for _ in range(100):
        a.greet(b)
    heard = [b.next()]
    while heard.count(FromPeer(peer=a.incarnation, message=RENEW)) < 100 or not measured(heard):
        heard.append(b.next())
    assert len(heard) == 100 + measured(heard)


def measured(heard: list[FromPeer | PeerLost | LinkMeasured]) -> int:
    return sum(isinstance(event, LinkMeasured) for event in heard)


def test_a_peer_that_vanishes_while_measured_is_just_lost(side, monkeypatch) -> None:
    """Its end closes as the first write of the other's probe arrives."""
    a, b = side("a", "shm", copies=COPIES), side("b", "shm", copies=COPIES)
    began = threading.Event()
    monkeypatch.setattr("cluster.worker.prober.probe.measure", stuck(began))
    a.greet(b)
    assert began.wait(20)
    b.links.close()
    assert isinstance(a.until(PeerLost), PeerLost)
    monkeypatch.undo()
    c = side("c", "shm", copies=COPIES)
    a.greet(c)
    event = a.until(LinkMeasured)
    assert isinstance(event, LinkMeasured) and event.peer == c.incarnation


def stuck(began: threading.Event):
    def measure(connection, region, own, slab_bytes, ping):  # type: ignore[no-untyped-def]
        began.set()
        while True:
            ping()
            connection.write(region, 0, own)

    return measure


def test_probing_touches_only_its_own_region(side) -> None:
    a, b = side("a", "shm", copies=COPIES), side("b", "shm", copies=COPIES)
    regions = [s.links.endpoints.register(PROBE_BYTES) for s in (a, b)]
    for region in regions:
        region.memory.fill_(3)
    a.greet(b)
    a.until(LinkMeasured)
    assert all(bool((region.memory == 3).all()) for region in regions)


def test_copies_are_measured_in_the_first_blocks_of_the_pool() -> None:
    memory = KvMemory(LAYOUT, 300, "cpu")
    memory.flat.fill_(3)
    (samples,) = measure_copies(memory, 2**20).values()
    for plane in memory.planes[0]:
        changed = (plane.view(torch.uint8) != 3).flatten(2).any(2).nonzero()[:, 1]
        assert changed.unique().tolist() == list(range(256 * 16))
        assert not plane[:, : 256 * 16].any(), "attention finds what it found before"
    assert {sample.step for sample in samples} == {
        TimedStep.PREPARE,
        TimedStep.GATHER,
        TimedStep.SCATTER,
    }
    assert len({sample.pieces for sample in samples}) > 1
    assert all(sample.seconds > 0 and sample.pieces > 0 for sample in samples)
    assert all(sample.nbytes > 0 for sample in samples if sample.step is not TimedStep.PREPARE)


def test_copies_are_measured_in_a_pool_of_one_block() -> None:
    (samples,) = measure_copies(KvMemory(LAYOUT, 1, "cpu"), 2**20).values()
    assert all(sample.seconds > 0 and sample.pieces > 0 for sample in samples)


# --- links that stall ---------------------------------------------------------------------------


def drop(side: Side, peer: Side) -> None:
    side.links.drop(DropLink(peer=peer.incarnation, reason="a copy took over 2.0 s"))


def lost(side: Side) -> PeerLost:
    event = side.until(PeerLost)
    assert isinstance(event, PeerLost)
    return event


@pytest.mark.parametrize("opener_drops", [True, False])
def test_a_stalled_link_ends_for_both_and_the_next_takes_another_transport(
    side: Callable[..., Side], opener_drops: bool
) -> None:
    """Also when it was the other side that has waited for a copy."""
    a, b = side("a", "shm", "loopback"), side("b", "shm", "loopback")
    a.greet(b)
    assert b.next() == FromPeer(peer=a.incarnation, message=RENEW)
    here, there = (a, b) if opener_drops else (b, a)
    drop(here, there)
    assert lost(here).failure == lost(there).failure == "transfer_timeout"
    a.greet(b)
    assert b.until(FromPeer) == FromPeer(peer=a.incarnation, message=RENEW)
    assert transport_of(a, b) == transport_of(b, a) == "loopback"


def test_when_every_transport_has_stalled_the_one_of_longest_ago_is_tried_again(
    side: Callable[..., Side], monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = side("a", "shm", "loopback"), side("b", "shm", "loopback")
    used = []
    for _ in range(4):
        a.greet(b)
        b.until(FromPeer)
        used.append(transport_of(a, b))
        drop(a, b)
        lost(a), lost(b)
    assert used == ["shm", "loopback", "shm", "loopback"]
    monkeypatch.setattr(peers, "STALLED_S", 0.0)
    a.greet(b)
    b.until(FromPeer)
    assert transport_of(a, b) == "shm", "after a while it is as good as the others"


def test_a_link_that_is_lost_already_is_not_dropped(side: Callable[..., Side]) -> None:
    a, b = side("a", "shm"), side("b", "shm")
    drop(a, b)
    a.greet(b)
    assert b.next() == FromPeer(peer=a.incarnation, message=RENEW)
    assert a.inbox.qsize() <= 1, "nothing but the hello"


# --- require ------------------------------------------------------------------------------------


@contextmanager
def sysfs(folder: Path, *, state: str = "4: ACTIVE", verbs: bool = True) -> Iterator[tuple]:
    port = folder / "sys" / "mlx5_0" / "ports" / "1"
    types = port / "gid_attrs" / "types"
    types.mkdir(parents=True)
    (port / "state").write_text(f"{state}\n")
    (port / "link_layer").write_text("Ethernet\n")
    (port / "rate").write_text("200 Gb/sec (4X HDR)\n")
    (types / "3").write_text("RoCE v2\n")
    traffic = folder / "sys" / "mlx5_0" / "tc" / "1"
    traffic.mkdir(parents=True)
    (traffic / "traffic_class").write_text("Global tclass=106\n")
    devices = folder / "dev"
    devices.mkdir()
    if verbs:
        (devices / "uverbs0").touch()
    yield folder / "sys", devices


def test_rdma_ports_are_read(tmp_path) -> None:
    with sysfs(tmp_path) as (ports, devices):
        (port,) = rdma_ports(ports)
        assert (port.device, port.port, port.active) == ("mlx5_0", 1, True)
        assert port.rate == "200 Gb/sec (4X HDR)"
        assert port.roce == (("gid 3", "RoCE v2"), ("traffic class", "Global tclass=106"))
        assert no_rdma(ports, devices, {}) is None


@pytest.mark.parametrize(
    ("environment", "why"),
    [
        ({"UCX_TLS": "tcp,sm"}, "UCX_TLS=tcp,sm leaves out RDMA"),
        ({"UCX_TLS": "^ib"}, "UCX_TLS=^ib leaves out RDMA"),
        ({"UCX_NET_DEVICES": "eth0"}, "UCX_NET_DEVICES=eth0 names none of mlx5_0"),
        ({"UCX_TLS": "rc,cuda", "UCX_NET_DEVICES": "mlx5_0:1"}, None),
        ({"UCX_TLS": "^tcp"}, None),
    ],
)
def test_variables_may_leave_rdma_out(tmp_path, environment, why) -> None:
    with sysfs(tmp_path) as (ports, devices):
        assert no_rdma(ports, devices, environment) == why


def test_why_there_is_no_rdma(tmp_path) -> None:
    assert "no RDMA device" in (no_rdma(tmp_path / "sys", tmp_path / "dev", {}) or "")
    with sysfs(tmp_path / "a", state="1: DOWN") as (ports, devices):
        assert no_rdma(ports, devices, {}) == "no RDMA port is active: mlx5_0:1 is DOWN"
    with sysfs(tmp_path / "b", verbs=False) as (ports, devices):
        assert "uverbs* can't be opened" in (no_rdma(ports, devices, {}) or "")


def info(*resources: str, components: tuple[str, ...] = ("tcp", "ib")) -> UcxInfo:
    return UcxInfo(version="1", components=components, resources=resources)


def test_ucx_itself_says_whether_it_uses_rdma(monkeypatch) -> None:
    monkeypatch.setattr(link_kind, "no_rdma", lambda: "no device")
    assert obstacle_of(info("tcp/eth0", "rc_mlx5/mlx5_0:1")) is None
    assert obstacle_of(info("tcp/eth0")) == "no device"
    assert obstacle_of(info(components=("tcp",))) == "its UCX was built without verbs"
    monkeypatch.setattr(link_kind, "no_rdma", lambda: None)
    assert obstacle_of(info("tcp/eth0")) == "UCX uses no RDMA device here"


def test_ucx_itself_says_whether_it_knows_cuda() -> None:
    cuda = ("tcp", "ib", "cuda_cpy", "cuda_ipc")
    assert no_cuda(info("rc_mlx5/mlx5_0:1", "cuda_copy/cuda", components=cuda)) is None
    assert "leaves out cuda_copy" in (no_cuda(info("cuda_ipc/cuda", components=cuda)) or "")
    assert "built without CUDA" in (no_cuda(info("rc_mlx5/mlx5_0:1")) or "")


def test_the_library_of_nixl_can_be_asked() -> None:
    library = library_of_nixl()
    assert library is not None
    found = describe(library, UcxOptions(tls="tcp"))
    assert isinstance(found, UcxInfo)
    assert found.version.count(".") == 2
    assert {"tcp", "ib"} <= set(found.components)
    assert found.resources and all(name.startswith("tcp/") for name in found.resources)
    assert "can't be loaded" in str(describe(library.with_name("no.so"), UcxOptions()))


def test_what_is_required_and_absent_is_refused_at_start(side, monkeypatch) -> None:
    monkeypatch.setattr(link_kind, "rdma_obstacle", lambda scheme, ucx: f"{scheme} sees no device")
    wanted = r"transfer.require is \[rdma\] and nixl is tcp \(nixl sees no device\)"
    with pytest.raises(ConfigError, match=wanted):
        side("a", "nixl", require=[LinkKind.RDMA])
    with pytest.raises(ConfigError, match=r"require is \[cuda_ipc, rdma\] and shm is shm"):
        side("a", "shm", require=[LinkKind.RDMA, LinkKind.CUDA_IPC])


def test_what_gpudirect_lacks_is_told(side, monkeypatch) -> None:
    reaches_devices(monkeypatch.setattr, no_module="no module is loaded")
    lacks = {"cpu": "KV is on cpu", "cuda:1": "no module is loaded"}
    for device, why in lacks.items():
        options = EndpointOptions(secret=b"known", device=device)
        wanted = rf"transfer.require is \[gpudirect\] and nixl is rdma \({why}\)"
        with pytest.raises(ConfigError, match=wanted):
            side("a", "nixl", options=options, require=[LinkKind.GPUDIRECT])


@pytest.mark.parametrize("lacks", ["a network", "CUDA", "GPUDirect", "registration", None])
def test_slabs_lie_where_the_network_reaches_them(monkeypatch, lacks: str | None) -> None:
    why = f"it lacks {lacks}" if lacks else ""
    network, module = (why if lacks == one else None for one in ("a network", "GPUDirect"))
    reaches_devices(monkeypatch.setattr, no_rdma=network, no_module=module)
    monkeypatch.setattr(link_kind, "cuda_obstacle", lambda *_: why if lacks == "CUDA" else None)
    refusal = why if lacks == "registration" else ""
    monkeypatch.setattr(endpoints, "obstacle", lambda *_, **__: refusal)
    options = EndpointOptions(device="cuda:1")
    place = SlabPlace.PINNED if lacks else SlabPlace.DEVICE
    assert options.slabs("nixl") == SlabMemory(place=place, device="cuda:1", why_host=why)
    assert options.slabs("cuda_ipc") == SlabMemory(place=SlabPlace.DEVICE, device="cuda:1")
    assert options.slabs("shm") == EndpointOptions().slabs("nixl") == SlabMemory()
    kinds = {"a network": LinkKind.TCP, None: LinkKind.GPUDIRECT}
    assert options.kind("ucx") is kinds.get(lacks, LinkKind.RDMA)


@pytest.mark.parametrize("direct", [True, False])
def test_a_gpu_has_slabs_where_cuda_ipc_or_gpudirect_reaches_them(monkeypatch, direct) -> None:
    reaches_devices(monkeypatch.setattr, no_module=None if direct else "no module")
    monkeypatch.setattr(endpoints, "obstacle", lambda *_, **__: "")
    on_gpu = EndpointOptions(device="cuda:0")
    assert on_gpu.on_device(["cuda_ipc", "shm"])
    assert on_gpu.on_device(["shm", "nixl"]) is direct
    assert not on_gpu.on_device(["shm", "tcp"])
    assert not EndpointOptions(device="cpu").on_device(["cuda_ipc", "nixl"])


def test_gpudirect_is_a_kind_of_rdma() -> None:
    assert LinkKind.GPUDIRECT.meets(["rdma"])
    assert LinkKind.GPUDIRECT.meets([])
    assert not LinkKind.RDMA.meets(["gpudirect"])
    assert not LinkKind.GPUDIRECT.meets(["shm"])


def test_a_network_reaches_a_gpu_by_a_module_or_by_dma_buf(tmp_path) -> None:
    asked: list[int] = []
    without = no_gpudirect("cuda:3", tmp_path, lambda number: bool(asked.append(number)))
    assert "no nvidia-peermem module" in (without or "")
    assert asked == [3]
    assert no_gpudirect("cuda", tmp_path, lambda number: number == 0) is None
    (tmp_path / "nvidia_peermem").mkdir()
    assert no_gpudirect("cuda", tmp_path, lambda number: False) is None


def test_a_peer_without_what_is_required_is_refused(side, monkeypatch) -> None:
    monkeypatch.setattr(link_kind, "rdma_obstacle", lambda scheme, ucx: None)
    a, b = side("a", "shm", "nixl", require=[LinkKind.RDMA]), side("b", "shm")
    assert a.links.endpoints.schemes == ("nixl",)
    a.greet(b)
    lost = a.next()
    assert isinstance(lost, PeerLost)
    assert "the peer has shm, this worker nixl (transfer.require is [rdma])" in lost.reason


def test_nothing_stays_open(side) -> None:
    before = set(os.listdir("/proc/self/fd"))
    a, b = Side("a", "shm", "loopback", copies=COPIES), Side("b", "shm", copies=COPIES)
    a.greet(b)
    a.until(LinkMeasured)
    a.links.close()
    b.links.close()
    names = {thread.name for thread in threading.enumerate()}
    assert "kvrelay-prober" not in names
    del a, b
    import gc

    gc.collect()
    assert set(os.listdir("/proc/self/fd")) <= before


def test_a_link_that_seemed_slow_at_first_is_measured_again(
    side: Callable[..., Side], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By both sides, further and further apart."""
    monkeypatch.setattr(prober, "AGAIN_S", (0.2, 0.4))
    taken: dict[int, list[float]] = {}

    def measure(connection: Connection, *_: object) -> list[Sample]:
        times = taken.setdefault(threading.get_ident(), [])
        times.append(time.monotonic())
        slow = 100.0 if len(times) == 1 else 1.0
        steps = (TimedStep.MESSAGE, TimedStep.WRITE, TimedStep.READ)
        return [Sample(step=step, nbytes=2**20, seconds=slow * 1e-4) for step in steps]

    monkeypatch.setattr(probe, "measure", measure)
    a, b = side("a", "shm", copies=COPIES), side("b", "shm", copies=COPIES)
    a.greet(b)
    for here in (a, b):
        latencies_s = [here.until(LinkMeasured).cost.latency_s]  # type: ignore[union-attr]
        while latencies_s[-1] > 1e-3:  # a side whose time has not come says again what it knows
            latencies_s.append(here.until(LinkMeasured).cost.latency_s)  # type: ignore[union-attr]
        assert latencies_s[0] == pytest.approx(5e-3) and latencies_s[-1] == pytest.approx(5e-5)
    b.until(LinkMeasured)
    assert len(taken) == 2, "each on a thread of its own"
    for times in taken.values():
        gaps_s = [later - earlier for earlier, later in pairwise(times)]
        assert gaps_s[0] >= 0.15 and all(gap_s >= 0.3 for gap_s in gaps_s[1:])
    assert max(map(len, taken.values())) >= 3
    assert a.links.states()[0].latency_s == pytest.approx(5e-5)


def test_a_link_whose_peer_did_not_answer_in_time_is_tried_again(
    side: Callable[..., Side], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By both sides; one that is gone is not."""
    monkeypatch.setattr(prober, "AGAIN_S", (0.05, 300.0))
    tried: dict[int, int] = {}

    def measure(*_: object) -> list[Sample]:
        here = threading.get_ident()
        tried[here] = tried.get(here, 0) + 1
        if tried[here] == 1:
            raise PeerError("no answer")
        return [Sample(step=step, nbytes=2**20, seconds=1e-4) for step in TimedStep]

    monkeypatch.setattr(probe, "measure", measure)
    a, b = side("a", "shm", copies=COPIES), side("b", "shm", copies=COPIES)
    a.greet(b)
    a.until(LinkMeasured)
    b.until(LinkMeasured)
    assert len(tried) == 2 and min(tried.values()) >= 2
    a.links.close()
    b.until(PeerLost)
    assert not b.links._prober._live and not b.links._prober._failed
