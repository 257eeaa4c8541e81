"""cuda_ipc between two GPUs, each of a process of its own. It has not run: no machine with two was
at hand."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection as Pipe

import pytest
import torch

from cluster.worker.prober import Link
from kvpool.transport.peer.base import RegionName
from kvrelay.types import Incarnation
from tests.contract.transport_kit import PATIENCE_S, Side
from tests.forks import forks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
_BYTES = 32 << 20


@contextmanager
def _process_on_the_second(address: str) -> Iterator[None]:
    ours, theirs = forks().Pipe()
    process = forks().Process(target=_be_the_second, args=(address, theirs))
    process.start()
    theirs.close()
    try:
        yield
    finally:
        ours.close()
        process.join(PATIENCE_S)
        process.kill()


def _be_the_second(address: str, end: Pipe) -> None:
    """Tells the name of its region, which is all 3; then, asked, the values in each half of it."""
    with Side("cuda_ipc", device="cuda:1") as side:
        connection, own = side.endpoint.connect(address), side.region(_BYTES)
        own.memory.fill_(3)
        torch.cuda.synchronize(own.memory.device)
        connection.notify(own.name.encode())
        side.next()
        halves = [half.unique().tolist() for half in own.memory.chunk(2)]
        connection.notify(str(halves).encode())
        end.poll(None)


def test_bytes_come_from_another_gpu_and_go_there() -> None:
    """By copies, and by a kernel that writes into the other's memory, as a gather does."""
    with (
        Side("cuda_ipc", device="cuda:0") as side,
        _process_on_the_second(side.endpoint.address),
    ):
        connection, here = side.connected.get(timeout=PATIENCE_S), side.region(_BYTES).memory
        region = RegionName(side.next().decode())
        connection.read(region, 0, here)
        assert here.unique().tolist() == [3]
        connection.write(region, 0, here.fill_(5))
        window = connection.window(region)
        assert window is not None
        window[_BYTES // 2 :].add_(here[_BYTES // 2 :])
        torch.cuda.synchronize(here.device)
        connection.notify(b"what has come?")
        assert side.next() == b"[[5], [10]]"
        link = Link(
            peer=Incarnation("second"),
            name="decode-1",
            connection=connection,
            probe_region=region,
            opened=False,
        )
        assert link.is_apart(side.endpoint.address), "it is costed as two devices with a link"
