"""What only the shm transport promises: two processes, one memory; killed peers; nothing left."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kvpool.memory.collate import read_slab, slab_bytes
from kvpool.memory.kv_memory import KvMemory
from kvpool.transport.mapped import memfd
from kvpool.transport.peer import control_wire
from kvpool.transport.peer.base import Region, RegionName
from kvpool.transport.peer.control_wire import Packet
from kvpool.transport.peer.endpoint import PeerEndpoint
from kvrelay.errors import PeerError
from tests.contract import shm_peer
from tests.contract.transport_kit import Side, held, is_mapped, mapped_inode, no_more_than, until

_ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """No threads, descriptors or mappings."""
    before = held()
    yield
    until(lambda: no_more_than(before))


def test_one_slab_is_mapped_in_two_processes_and_scattered() -> None:
    """The writer's blocks have 8 tokens, the reader's 16."""
    ours = shm_peer.tables(16, 5)
    memory = KvMemory(shm_peer.layout(16), 32, "cpu")
    with Side("shm") as owner:
        region = owner.region(slab_bytes(memory.layout, shm_peer.TOKENS))
        address = owner.endpoint.address
        with shm_peer.running("write-one-slab", address, region.name) as process:
            facts = json.loads(owner.next())
            assert facts["pid"] == process.pid != os.getpid()
            pids = os.getpid(), facts["pid"]
            inodes = {mapped_inode(pid, region.name) for pid in pids}
            assert inodes == {facts["inode"]}
            assert None not in inodes
            read_slab(
                memory,
                ours,
                shm_peer.PIECE,
                shm_peer.the_write(),
                fingerprint=shm_peer.MODEL,
                lease_id=shm_peer.LEASE_ID,
                window=region.memory,
            )
        del region
    expected = shm_peer.numbered_memory(16, ours)
    for planes, others in zip(memory.planes, expected.planes, strict=True):
        for plane, other in zip(planes, others, strict=True):
            assert torch.equal(plane, other)


def test_a_retired_region_is_freed_with_its_last_mapping() -> None:
    with Side("shm") as owner, Side("shm") as writer:
        connection = writer.endpoint.connect(owner.endpoint.address)
        region, other = owner.region(1 << 16), owner.region(1 << 16)
        name, window = region.name, connection.window(region.name)
        owner.endpoint.deregister(region)
        del region
        assert window is not None
        window.fill_(1)  # a late actor harms no one
        assert is_mapped(name)
        with pytest.raises(PeerError, match=r"retired|has no region"):
            connection.write(name, 0, torch.zeros(1))
        del window
        assert not is_mapped(name)
        del other


def test_memory_made_to_be_shared_is_freed_with_its_last_tensor() -> None:
    before = held()
    memory = memfd.allocate(100_000, "kvrelay-test")
    part = memory[50_000:].view(torch.bfloat16)
    del memory
    assert is_mapped(RegionName("kvrelay-test"))
    with Side("shm") as owner:
        region = owner.endpoint.adopt(part.view(torch.uint8))
        del part
        region.memory.fill_(1)
        del region
    until(lambda: no_more_than(before))


def test_a_retired_region_is_unmapped_by_its_peers() -> None:
    with Side("shm") as owner, Side("shm") as writer:
        connection = writer.endpoint.connect(owner.endpoint.address)
        names = []
        for _ in range(5):
            region = owner.region(4096)
            connection.write(region.name, 0, torch.ones(4096, dtype=torch.uint8))
            names.append(region.name)
            owner.endpoint.deregister(region)
            del region
        until(lambda: not any(is_mapped(name) for name in names))


def test_a_region_cannot_be_resized_by_a_peer() -> None:
    with Side("shm") as owner:
        region = owner.region(4096)
        fd = _fetch_descriptor(owner, region)
        for size in (0, 1 << 20):
            with pytest.raises(PermissionError):
                os.ftruncate(fd, size)
        os.close(fd)
        del region


def _fetch_descriptor(owner: Side, region: Region) -> int:
    assert isinstance(owner.endpoint, PeerEndpoint)
    with owner.endpoint._rendezvous.dial(owner.endpoint.address) as sock:
        control_wire.send(sock, Packet.GET, region.name.encode())
        grant = control_wire.receive_grant(sock)
    assert grant is not None and grant.fd is not None
    return grant.fd


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can run a process as another user")
def test_another_user_is_turned_away() -> None:
    script = """
import socket, sys
sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
sock.connect("\\0kvrelay-" + sys.argv[1])
try:
    sock.send(bytes([8, len(sys.argv[2]), 0, 0, 0]) + sys.argv[2].encode())
    print(len(sock.recv(1000)))
except OSError:
    print(0)
"""
    python = "/usr/bin/python3" if os.path.exists("/usr/bin/python3") else sys.executable
    with Side("shm") as owner:
        region = owner.region(10)
        command = [python, "-c", script, owner.endpoint.address, region.name]
        answers = {
            user: subprocess.run(command, user=user, capture_output=True, check=True, cwd="/")
            for user in (0, 65534)
        }
        del region
    assert int(answers[0].stdout) > 0
    assert int(answers[65534].stdout) == 0


def test_regions_leave_no_name_behind() -> None:
    """Of what this process has mapped; others, and other tests' semaphores, come and go there."""
    before = _named_memory()
    with Side("shm") as owner:
        region = owner.region(100)
        assert _named_memory() <= before
        assert mapped_inode("self", region.name) is not None
        assert mapped_inode("self", type(region.name)(region.name + "0")) is None
        name = region.name
        del region
    until(lambda: not is_mapped(name))


def _named_memory() -> set[str]:
    """What this process has mapped of files in shared memory."""
    fields = (line.split() for line in Path("/proc/self/maps").read_text().splitlines())
    return {last for *_, last in fields if last.startswith("/dev/shm/")}
