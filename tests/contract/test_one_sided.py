"""What the transports over a network promise: staging, memory that outlives its region, ports,
who is let in."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import pytest
import torch

from kvpool.transport.peer import control_wire
from kvpool.transport.peer.base import Region, RegionWrite
from kvpool.transport.peer.control_wire import Packet
from kvpool.transport.peer.endpoint import PeerEndpoint
from kvpool.transport.peer.exposure import Check
from kvpool.transport.rdma import nixl, ucx
from kvpool.transport.rdma.agent import Operation, RegionPiece
from kvpool.transport.rdma.one_sided import OneSidedExposure
from kvpool.transport.rdma.ucx_options import UcxOptions
from kvpool.transport.registry import open_endpoint
from kvrelay.errors import ConfigError, PeerError
from kvrelay.types import Incarnation
from tests.contract import shm_peer
from tests.contract.transport_kit import PATIENCE_S, SECRET, MakeSide, Side, pair, until

_ROOT = Path(__file__).parents[2]


@pytest.fixture(params=["nixl", "ucx"])
def scheme(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@contextmanager
def _writer(owner: Side, region: Region) -> Iterator[ForkServerProcess]:
    """Another process, in the middle of writing ones to the region, for ever."""
    with shm_peer.running("write-for-ever", owner.endpoint.address, region.name) as process:
        assert owner.next() == b"writing"
        yield process


def _exposure(side: Side) -> OneSidedExposure:
    assert isinstance(side.endpoint, PeerEndpoint)
    assert isinstance(side.endpoint._exposure, OneSidedExposure)
    return side.endpoint._exposure


def test_memory_is_kept_until_the_last_writer_lets_go(make_side: MakeSide) -> None:
    """A stopped process may be in the middle of a write to it."""
    owner = make_side()
    region = owner.region(1 << 20)
    registered, memory = _exposure(owner)._registered, region.memory
    with _writer(owner, region) as process:
        shm_peer.tell(process, signal.SIGSTOP)
        owner.endpoint.deregister(region)
        assert registered.hold([memory]) == [True]
        shm_peer.tell(process, signal.SIGCONT)
        until(lambda: registered.hold([memory]) == [False])
        process.join(PATIENCE_S)
        assert process.exitcode == 1, "its next write raises"


OVER_TCP = "tcp,self"
"""A stopped process answers no read; within a host it would not be asked."""


class Stalled:
    """A read of a region of a process that is stopped by then."""

    def __init__(self, reader: Side, process: ForkServerProcess) -> None:
        self.connection = reader.connected.get(timeout=PATIENCE_S)
        self.name = shm_peer.region_told(reader.next())
        self.target = reader.region(16 << 20).memory
        self.other = reader.region(1 << 20).memory
        self.connection.read(self.name, 0, self.other)
        shm_peer.tell(process, signal.SIGSTOP)
        self.failed = threading.Event()
        self.thread = threading.Thread(target=self._read)
        self.thread.start()

    def _read(self) -> None:
        try:
            self.connection.read(self.name, 0, self.target)
        except PeerError:
            self.failed.set()


def test_no_byte_of_a_read_comes_after_it_has_failed(make_side: MakeSide) -> None:
    """Its memory is another's then. A read whose link is closed fails at once, or goes on to its
    end."""
    reader = make_side(ucx=UcxOptions(tls=OVER_TCP))
    with shm_peer.running("own-a-region", reader.endpoint.address, tls=OVER_TCP) as process:
        stalled = Stalled(reader, process)
        closing = threading.Thread(target=stalled.connection.close)
        closing.start()
        at_once = stalled.failed.wait(3.0)
        if at_once:
            stalled.target.fill_(7)
        shm_peer.tell(process, signal.SIGCONT)
        assert stalled.failed.wait(PATIENCE_S)
        if not at_once:
            stalled.target.fill_(7)
        closing.join()
        again = reader.endpoint.connect(stalled.connection.peer_address)
        again.read(stalled.name, 0, stalled.other)
        assert bool((stalled.target == 7).all())
        stalled.thread.join()


@pytest.mark.parametrize("how", ["killed", "closed"])
def test_a_read_that_stalls_ends_with_either_process(make_side: MakeSide, how: str) -> None:
    reader = make_side(ucx=UcxOptions(tls=OVER_TCP))
    with shm_peer.running("own-a-region", reader.endpoint.address, tls=OVER_TCP) as process:
        stalled = Stalled(reader, process)
        if how == "killed":
            process.kill()
        else:
            reader.endpoint.close()
        assert stalled.failed.wait(PATIENCE_S)
        stalled.thread.join()


def test_a_peer_with_which_a_copy_hangs_is_not_connected_anew(
    make_side: MakeSide, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until the copy has ended. Nobody waits for that: it may take TCP minutes to give up."""
    owner, writer = make_side(), make_side()
    region, address = owner.region(64), owner.endpoint.address
    connection = writer.endpoint.connect(address)
    endpoint: Any = writer.endpoint
    remote = endpoint._peers[address]._remote
    begun, ends = threading.Event(), threading.Event()

    def hang(*_: object) -> None:
        begun.set()
        ends.wait()

    source = torch.zeros(8, dtype=torch.uint8)
    with monkeypatch.context() as patch:
        patch.setattr(remote, "transfer", hang)
        copy = threading.Thread(target=connection.write, args=(region.name, 0, source))
        copy.start()
        begun.wait()
        closing = threading.Thread(target=connection.close)
        closing.start()
        began_s = time.monotonic()
        with pytest.raises(PeerError, match="still runs"):
            writer.endpoint.connect(address)
        assert time.monotonic() - began_s < 3.0
        ends.set()
        copy.join()
        closing.join()
    again = writer.endpoint.connect(address)
    again.write(region.name, 0, source + 7)
    assert region.memory[:8].tolist() == [7] * 8


def test_registered_memory_travels_as_one_batch(
    make_side: MakeSide, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One descriptor for each piece, whatever their number; the rest goes by a staging buffer."""
    owner, writer, connection = pair(make_side)
    region, source = owner.region(40_000), writer.region(40_000).memory
    remote = connection._peer._remote  # type: ignore[attr-defined]
    transfer, batches = remote.transfer, list[int]()

    def counted(operation: Operation, pieces: list[RegionPiece], check: Check) -> None:
        batches.append(len(pieces))
        transfer(operation, pieces, check)

    monkeypatch.setattr(remote, "transfer", counted)
    pieces = [*source.split(100), torch.ones(10, dtype=torch.uint8)]
    connection.write_many([RegionWrite(region.name, 0, piece) for piece in pieces])
    assert batches == [400, 1]


def test_a_piece_lies_in_one_registered_memory_or_in_none(make_side: MakeSide) -> None:
    registered = _exposure(make_side())._registered
    memory = torch.zeros(300, dtype=torch.uint8)
    first, second = memory[:100], memory[100:200]
    registered.add(first)
    registered.add(second)
    pieces = [memory[at : at + 20] for at in (0, 80, 90, 100, 180, 190, 250, 10)]
    assert registered.hold(pieces) == [True, True, False, True, True, False, False, True]


def test_staging_is_told_and_given_back(make_side: MakeSide) -> None:
    owner, writer, connection = pair(make_side)
    region = owner.region(10)
    connection.write(region.name, 0, writer.region(10).memory)
    assert writer.endpoint.staging_bytes == 0, "registered memory needs none"
    connection.write(region.name, 0, torch.ones(10, dtype=torch.uint8))
    assert writer.endpoint.staging_bytes == 4 * 2**20
    connection.close()
    until(lambda: writer.endpoint.staging_bytes == 0)


def test_memory_on_a_device_is_refused(make_side: MakeSide) -> None:
    with pytest.raises(ConfigError, match="host memory only, not meta"):
        make_side().endpoint.adopt(torch.empty(10, dtype=torch.uint8, device="meta"))


def test_the_host_that_is_given_is_listened_on_and_told(make_side: MakeSide, scheme: str) -> None:
    plain = make_side()
    callbacks = plain.endpoint._callbacks  # type: ignore[attr-defined]
    other = open_endpoint(
        scheme, Incarnation("elsewhere"), callbacks, host="127.0.0.2", secret=SECRET
    )
    assert other.address.startswith(f"{scheme}:127.0.0.2:")
    plain.endpoint.connect(other.address).close()
    other.close()


def test_a_port_of_the_range_is_listened_on(make_side: MakeSide, scheme: str) -> None:
    callbacks = make_side().endpoint._callbacks  # type: ignore[attr-defined]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port: int = taken.getsockname()[1]
        name = Incarnation("ranged")
        with pytest.raises(ConfigError, match=rf"{port}.*{port}"):
            open_endpoint(scheme, name, callbacks, port_range=(port, port))
        before = _listened_on()
        other = open_endpoint(scheme, name, callbacks, port_range=(port, port + 30))
        ports = _listened_on() - before
        assert int(other.address.rpartition(":")[2].partition("/")[0]) in ports
        assert all(port < one <= port + 30 for one in ports), "UCX's own listeners too"
        other.close()


def _listened_on() -> set[int]:
    """The TCP ports on which this process listens."""
    links = (os.readlink(link.path) for link in os.scandir("/proc/self/fd") if link.is_symlink())
    ours = {link[len("socket:[") : -1] for link in links if link.startswith("socket:[")}
    rows = [row.split() for row in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return {int(row[1].partition(":")[2], 16) for row in rows if row[3] == "0A" and row[9] in ours}


def test_what_ucx_refuses_is_told(make_side: MakeSide) -> None:
    with pytest.raises(ConfigError, match="refuses UCX_TLS=carrier-pigeon"):
        make_side(ucx=UcxOptions(tls="carrier-pigeon"))
    assert "UCX_TLS" not in os.environ


def test_the_environment_is_left_as_it_was(scheme: str) -> None:
    """Loading a library, too: what one sets would be taken by the other."""
    script = (
        "import os, sys; from tests.contract.transport_kit import Side; before = dict(os.environ);"
        "Side(sys.argv[1]).endpoint.close(); print(dict(os.environ) == before)"
    )
    command = [sys.executable, "-c", script, scheme]
    done = subprocess.run(command, cwd=_ROOT, capture_output=True, check=True, text=True)
    assert done.stdout.endswith("True\n"), done.stdout


def test_a_network_device_that_is_not_there_is_named(make_side: MakeSide) -> None:
    with pytest.raises(ConfigError, match="mlx5_77"):
        make_side(ucx=UcxOptions(net_devices="mlx5_77"))


def test_what_ucx_takes_moves_bytes(make_side: MakeSide) -> None:
    option = UcxOptions(
        tls="tcp,self", rndv_threshold_bytes=65536, max_eager_rails=1, net_devices="lo"
    )
    owner, writer = make_side(ucx=option), make_side(ucx=option)
    region = owner.region(100_000)
    connection = writer.endpoint.connect(owner.endpoint.address)
    connection.write(region.name, 0, torch.ones(100_000, dtype=torch.uint8))
    assert bool(region.memory.all())


def test_only_who_knows_the_secret_is_let_in(make_side: MakeSide) -> None:
    owner, friend = make_side(secret=b"right"), make_side(secret=b"right")
    connection = friend.endpoint.connect(owner.endpoint.address)
    region = owner.region(10)
    connection.write(region.name, 0, torch.ones(10, dtype=torch.uint8))
    assert bool(region.memory.all())
    owner.connected.get(timeout=PATIENCE_S)
    for other in (make_side(secret=b"wrong"), make_side(secret=b"")):
        with pytest.raises(PeerError, match="refused: its cluster has another token"):
            other.endpoint.connect(owner.endpoint.address)
    assert owner.connected.empty()


def test_who_does_not_know_the_secret_is_not_trusted(make_side: MakeSide) -> None:
    """An impostor that lets everyone in: it cannot answer the connecting side's challenge."""
    impostor = socket.create_server(("127.0.0.1", 0))
    side = make_side(secret=b"right")
    scheme = side.endpoint.address.partition(":")[0]

    def let_in() -> None:
        sock, _ = impostor.accept()
        with sock:
            control_wire.send(sock, Packet.CHALLENGE, bytes(32))
            control_wire.receive(sock)
            control_wire.send(sock, Packet.PROOF, bytes(32))
            sock.recv(1)

    thread = threading.Thread(target=let_in)
    thread.start()
    address = f"{scheme}:127.0.0.1:{impostor.getsockname()[1]}/someone"
    with pytest.raises(PeerError, match="does not know this cluster's token"):
        side.endpoint.connect(address)
    thread.join()
    impostor.close()


def test_without_the_package_the_extra_is_named(
    monkeypatch: pytest.MonkeyPatch, scheme: str
) -> None:
    monkeypatch.setattr(nixl, "_PACKAGES", ("nixl_not_installed",))
    monkeypatch.setattr(ucx, "_PACKAGE", "ucxx_not_installed")
    with pytest.raises(ConfigError, match=rf"pip install 'kvrelay\[{scheme}\]'"):
        Side(scheme)
