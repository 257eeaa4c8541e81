"""When a worker that is a process of its own counts as ready: routers can use it."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NoReturn

import grpc
import pytest

from cluster.cli.plain.ready_file import ready_file
from cluster.worker.process import WorkerService
from kvrelay.starts import StartLedger
from kvrelay.types import Role
from kvrelay.v1 import worker_pb2 as pb
from kvrelay.wire import WIRE_VERSION
from tests.unit.router_kit import hello


class Context:
    async def abort(self, code: grpc.StatusCode, told: str) -> NoReturn:
        raise ConnectionError(told)


async def attached(said: list[pb.ToWorker]) -> list[bool]:
    """What is heard of whether routers can use the worker, until the stream of one ends."""
    heard: list[bool] = []
    ledger, unused = StartLedger(0.0), (lambda: None, lambda _: None)
    service: Any = WorkerService(
        hello("w", Role.BOTH), queue.SimpleQueue(), *unused, ledger, heard.append
    )

    async def requests() -> AsyncIterator[pb.ToWorker]:
        for message in said:
            yield message

    async for _ in service.Attach(requests(), Context()):
        pass
    return heard


def greeting(version: int) -> pb.ToWorker:
    return pb.ToWorker(hello=pb.RouterHello(wire_version=version))


def test_a_router_that_has_joined_it_can_use_it() -> None:
    assert asyncio.run(attached([greeting(WIRE_VERSION)])) == [True]


def test_not_one_of_another_version() -> None:
    with pytest.raises(ConnectionError, match=f"wire version {WIRE_VERSION}, the router 1"):
        asyncio.run(attached([greeting(1)]))


def test_not_one_that_refuses_it() -> None:
    refused = pb.ToWorker(refused=pb.RouterRefused(reason="another model"))
    heard = asyncio.run(attached([greeting(WIRE_VERSION), refused]))
    assert heard[-1] is False


def test_the_file_of_a_killed_process_says_nothing(tmp_path: Path) -> None:
    path = tmp_path / "ready"
    path.touch()
    with ready_file(path) as file:
        assert not path.exists()
        file.show(True)
        assert path.exists()
    assert not path.exists()
    with ready_file(None) as none:
        none.show(True)
