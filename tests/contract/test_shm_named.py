"""An shm endpoint under a name that peers know, with memory that is taken as it fills."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from kvpool.transport.mapped import memfd
from kvpool.transport.peer.base import Callbacks, Endpoint
from kvpool.transport.registry import open_endpoint
from kvrelay.errors import ConfigError
from kvrelay.types import Incarnation
from tests.contract.transport_kit import Side

_QUIET = Callbacks(
    on_connect=lambda connection: None,
    on_message=lambda connection, payload: None,
    on_lost=lambda connection: None,
)


def _named(incarnation: str, name: str) -> Endpoint:
    return open_endpoint("shm", Incarnation(incarnation), _QUIET, name=name)


def test_found_by_its_name_in_each_of_its_lives() -> None:
    name = f"named-{os.getpid()}"
    with Side("shm") as peer:
        regions = []
        for incarnation in ("first", "second"):
            endpoint = _named(incarnation, name)
            assert endpoint.address == f"shm:{name}"
            region = endpoint.register(8)
            connection = peer.endpoint.connect(f"shm:{name}")
            connection.write(region.name, 0, torch.ones(8, dtype=torch.uint8))
            assert bool(region.memory.all())
            regions.append(region.name)
            with pytest.raises(ConfigError, match="in use"):
                _named("third", name)
            endpoint.close()
        assert regions[0] != regions[1], "a region of an earlier life is never taken for a new one"


def test_memory_that_is_taken_lazily_is_shared_all_the_same() -> None:
    nbytes = 1 << 30
    memory = memfd.allocate(nbytes, "kvrelay-lazy", lazily=True)
    (fd,) = (made.fd for made in memfd._made.values() if made.holds(memory.data_ptr(), nbytes))
    assert os.fstat(fd).st_blocks * 512 < 1 << 20
    with Side("shm") as owner, Side("shm") as peer:
        region = owner.endpoint.adopt(memory)
        connection = peer.endpoint.connect(owner.endpoint.address)
        connection.write(region.name, nbytes - 5, torch.ones(5, dtype=torch.uint8))
        assert bool(memory[-5:].all())
        assert os.fstat(fd).st_blocks * 512 < 1 << 20


def _resident_kib(address: int) -> int:
    """Of the mapping that begins there: pages that this process has touched."""
    lines = Path("/proc/self/smaps").read_text().split("\n")
    (at,) = (i for i, line in enumerate(lines) if line.startswith(f"{address:x}-"))
    (found,) = (line for line in lines[at : at + 8] if line.startswith("Rss:"))
    return int(found.split()[1])


@pytest.mark.parametrize("lazily", [False, True])
def test_all_pages_are_there_at_once_unless_taken_lazily(lazily: bool) -> None:
    nbytes = 4 << 20
    memory = memfd.allocate(nbytes, "kvrelay-touched", lazily=lazily)
    expected = 0 if lazily else nbytes // 1024
    assert _resident_kib(memory.data_ptr()) in range(expected, expected + 8)
    assert not memory.any()
