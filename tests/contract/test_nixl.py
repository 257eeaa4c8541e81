"""What only the nixl transport promises: killed and stopped peers in other processes, addresses."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from kvpool.transport import nixl_agent, nixl_wire
from kvpool.transport.base import Region, Write
from kvpool.transport.nixl_wire import Packet
from kvpool.transport.registry import open_endpoint
from kvrelay.errors import ConfigError, PeerError
from kvrelay.types import WIRE_VERSION, Incarnation
from tests.contract import shm_peer
from tests.contract.transport_kit import PATIENCE_S, Side, held, send_until_refused, until

_ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    before = held()
    yield
    assert held() == before, "threads, descriptors or mappings are left"


@contextmanager
def _writer(owner: Side, region: Region) -> Iterator[subprocess.Popen[bytes]]:
    """Another process, in the middle of writing ones to the region, for ever."""
    module, address = shm_peer.__name__, owner.endpoint.address
    command = [sys.executable, "-m", module, "write-for-ever", address, region.name]
    with subprocess.Popen(command, stdin=subprocess.PIPE, cwd=_ROOT) as process:
        try:
            assert owner.next() == b"writing"
            yield process
        finally:
            if process.poll() is None:
                process.kill()


def test_a_peer_killed_in_the_middle_of_a_write_is_lost_and_nothing_else() -> None:
    with Side("nixl") as owner:
        region, spared = owner.region(1 << 20), owner.region(64)
        with _writer(owner, region) as process:
            assert bool(region.memory.all())
            connection = owner.connected.get(timeout=PATIENCE_S)
            process.send_signal(signal.SIGKILL)
            assert owner.lost.get(timeout=PATIENCE_S) is connection
        with pytest.raises(PeerError, match="gone"):
            connection.notify(b"are you there?")
        with Side("nixl") as next_writer:
            again = next_writer.endpoint.connect(owner.endpoint.address)
            again.write(spared.name, 0, torch.ones(64, dtype=torch.uint8))
        assert bool(spared.memory.all())


def test_a_stopped_peer_holds_neither_the_sender_nor_the_close() -> None:
    with Side("nixl", send_timeout_s=0.2) as owner:
        region = owner.region(1 << 20)
        with _writer(owner, region) as process:
            connection = owner.connected.get(timeout=PATIENCE_S)
            process.send_signal(signal.SIGSTOP)
            assert "read nothing" in send_until_refused(connection)[1]
            owner.endpoint.close()


def test_memory_is_kept_until_the_last_writer_lets_go() -> None:
    """A stopped process may be in the middle of a write to it."""
    with Side("nixl") as owner:
        region = owner.region(1 << 20)
        agent, memory = owner.endpoint._agent, region.memory  # type: ignore[attr-defined]
        with _writer(owner, region) as process:
            process.send_signal(signal.SIGSTOP)
            owner.endpoint.deregister(region)
            assert agent.owned([memory]) == [True]
            process.send_signal(signal.SIGCONT)
            until(lambda: agent.owned([memory]) == [False])
            process.communicate(timeout=PATIENCE_S)
            assert process.returncode == 1, "its next write raises"


def test_registered_memory_travels_as_one_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """One descriptor for each piece, whatever their number; the rest goes by a staging buffer."""
    batches: list[int] = []
    transfer = nixl_agent.Agent.transfer

    def counted(agent: nixl_agent.Agent, *args: Any) -> None:
        batches.append(len(args[1]))
        transfer(agent, *args)

    monkeypatch.setattr(nixl_agent.Agent, "transfer", counted)
    with Side("nixl") as owner, Side("nixl") as writer:
        connection = writer.endpoint.connect(owner.endpoint.address)
        region, source = owner.region(40_000), writer.region(40_000).memory
        pieces = [*source.split(100), torch.ones(10, dtype=torch.uint8)]
        connection.write_many([Write(region.name, 0, piece) for piece in pieces])
        assert batches == [400, 1]


def test_a_port_may_have_passed_to_another_worker() -> None:
    with Side("nixl") as owner, Side("nixl") as writer:
        stale = owner.endpoint.address.replace("/", "/not-")
        with pytest.raises(PeerError, match=r"gone; nixl:127\.0\.0\.1:.* is in its place"):
            writer.endpoint.connect(stale)
        assert owner.connected.empty()


def test_the_host_that_is_given_is_listened_on_and_told() -> None:
    with Side("nixl") as plain:
        callbacks = plain.endpoint._callbacks  # type: ignore[attr-defined]
        name = Incarnation("elsewhere")
        other = open_endpoint("nixl", name, callbacks, host="127.0.0.2")
        assert other.address.startswith("nixl:127.0.0.2:")
        plain.endpoint.connect(other.address).close()
        other.close()


def _dial(owner: Side) -> socket.socket:
    sock = nixl_wire.dial(owner.endpoint.address)
    sock.settimeout(PATIENCE_S)
    return sock


def _answer(sock: socket.socket, data: bytes) -> tuple[Packet, bytes] | None:
    sock.sendall(data)
    sock.shutdown(socket.SHUT_WR)
    return nixl_wire.receive(sock)


def test_another_wire_version_is_refused_with_a_reason() -> None:
    hello = (WIRE_VERSION + 1).to_bytes(2, "little") + b"nixl:other"
    with Side("nixl") as owner, _dial(owner) as sock:
        answer = _answer(sock, b"\x01" + len(hello).to_bytes(4, "little") + hello)
        assert answer is not None and answer[0] is Packet.REFUSE
        assert f"wire version {WIRE_VERSION + 1}".encode() in answer[1]
        assert owner.connected.empty()


@pytest.mark.parametrize(
    "garbage",
    [
        b"\xff\0\0\0\0",
        b"\x04\xff\xff\xff\xff",
        b"\x01",
        b"\x04\x01\0\0\0x",
        b"\x01\x03\0\0\0\0\0\xff",
    ],
)
def test_garbage_is_dropped_and_others_are_served(garbage: bytes) -> None:
    with Side("nixl") as owner, Side("nixl") as writer:
        with _dial(owner) as sock:
            answer = _answer(sock, garbage)
            assert answer is None or answer[0] is Packet.REFUSE
        writer.endpoint.connect(owner.endpoint.address).notify(b"hello")
        assert owner.next() == b"hello"
        assert owner.lost.empty()


def test_silent_strangers_do_not_hold_up_connect_or_close() -> None:
    with Side("nixl") as owner, Side("nixl") as writer:
        strangers = [_dial(owner) for _ in range(3)]
        writer.endpoint.connect(owner.endpoint.address).notify(b"hello")
        assert owner.next() == b"hello"
        owner.endpoint.close()
        for stranger in strangers:
            assert stranger.recv(10) == b""
            stranger.close()


def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl_agent, "_PACKAGES", ("nixl_not_installed",))
    with pytest.raises(ConfigError, match=r"pip install 'kvrelay\[nixl\]'"):
        Side("nixl")
