"""A network that swallows what two hosts send each other, and tells neither."""

from __future__ import annotations

import ctypes
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest

from bench.chaos.clusters.host import NotPermitted, SecondHost, second_host
from kvpool.transport.peer.rendezvous import Network

CLONE_NEWNET = 0x40000000
NOTICED_S = 7.0
Found = TypeVar("Found")


@pytest.fixture
def host() -> Iterator[SecondHost]:
    try:
        with second_host() as found:
            yield found
    except NotPermitted as error:
        pytest.skip(f"no network namespaces here: {error}")


def there(host: SecondHost, call: Callable[[], Found]) -> Found:
    """What a thread in the other host's network does: its sockets stay there."""
    found: list[Found] = []

    def run() -> None:
        with Path("/run/netns", host.name).open() as namespace:
            assert ctypes.CDLL(None).setns(namespace.fileno(), CLONE_NEWNET) == 0
        found.append(call())

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return found[0]


def network(host: str) -> Network:
    return Network("test", "peer", host=host, port_range=None, secret=b"s")


def connected(host: SecondHost) -> tuple[socket.socket, socket.socket, int]:
    """(here, there, the port there)"""
    far = there(host, lambda: network(host.far))
    near, admitted = network(host.near), []

    def admit() -> None:
        sock, _ = far.listener.accept()
        far.admit(sock)
        admitted.append(sock)

    thread = threading.Thread(target=admit)
    thread.start()
    sock = near.dial(far.address)
    thread.join()
    port = far.listener.getsockname()[1]
    far.listener.close()
    near.listener.close()
    return sock, admitted[0], port


@pytest.mark.parametrize("sends", [True, False])
def test_a_silent_network_is_noticed_by_both_ends(host: SecondHost, sends: bool) -> None:
    here, far, port = connected(host)
    host.swallow([port], [])
    began_s = time.monotonic()
    if sends:
        here.send(b"?")
    for end in (here, far):
        end.settimeout(began_s + NOTICED_S - time.monotonic())
        with pytest.raises(OSError, match=r"timed out|No route|unreachable") as caught:
            end.recv(1)
        assert not isinstance(caught.value, TimeoutError) or caught.value.errno
        end.close()
