"""`kvrelay router`, `worker` and `pool-node` as ordinary processes, for tests that start them."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from threading import Thread
from typing import NamedTuple
from uuid import uuid4

import pytest

from cluster.cli.status import kv
from kvrelay import Client, Stream
from kvrelay.results import Chunk
from tests.access import ACCESS
from tests.integration.ray_head import BIN, Marked, marked, until

POOL = f"plain-{uuid4().hex[:8]}"
KVRELAY = BIN / "kvrelay"

_AT = r"(\S+:\d+)(?:, with TLS)?\n"
ADDRESSES = rf"(?m)^gRPC on {_AT}(?:.*\n)*internal gRPC on {_AT}"

Process = subprocess.Popen[bytes]


class RouterAddresses(NamedTuple):
    """HOST:PORT of gRPC, for clients and for those who run the cluster."""

    grpc: str
    internal: str


@pytest.fixture
def here() -> Iterator[Marked]:
    with marked() as environment:
        yield environment
        until(lambda: not environment.processes())  # by themselves, after whoever started them


ROLES = ("prefill", "decode")


def start_router(
    here: Marked, log: Path, *options: str, again: RouterAddresses | None = None
) -> tuple[Process, RouterAddresses]:
    """`again`: at the gRPC addresses of one that is gone."""
    public, internal = map(port_of, again or ("", ""))
    ports = ("--http-port=0", f"--grpc-port={public}")
    settings = (f"router.internal_grpc_port={internal}", "router.lame_duck=null")
    options = (*(f"--set={one}" for one in settings), *options)
    process = here.start(KVRELAY, "router", *ports, *options, log=log)
    found = until(lambda: re.search(ADDRESSES, log.read_text()) or process.poll())
    assert isinstance(found, re.Match), log.read_text()
    return process, RouterAddresses(grpc=found[1], internal=found[2])


def port_of(address: str) -> str:
    return address.rpartition(":")[2] or "0"


def start_worker(
    here: Marked, routers: Sequence[RouterAddresses], role: str, log: Path, *more: str
) -> Process:
    joins = [f"--join={router.internal}" for router in routers]
    options = ("--role", role, "--cpu-threads", "1", "--pool", POOL)
    small = ("--set", "engine.kv_memory=16MiB", "--set", "model.dtype=float32")
    return here.start(KVRELAY, "worker", *joins, *options, *small, *more, log=log)


def start_pool_node(here: Marked, router: RouterAddresses, log: Path) -> Process:
    options = ("--name", POOL, "--join", router.internal, "--host-memory", "64MiB")
    return here.start(KVRELAY, "pool-node", *options, log=log)


def pool_nodes_of(router: RouterAddresses) -> int:
    return len(kv.of_router(router.internal, ACCESS).pool_nodes)


def workers_of(router: RouterAddresses) -> set[str]:
    with Client(router.grpc, timeout_s=30) as client:
        return {worker.role for worker in client.server_info().workers}


def until_joined(router: RouterAddresses) -> None:
    until(lambda: workers_of(router) == {*ROLES})


def generate(router: RouterAddresses) -> tuple[int, ...]:
    with Client(router.grpc, timeout_s=60) as client:
        return client.generate("It was", max_tokens=12, ignore_eos=True, temperature=0.0).token_ids


def holds_nothing(router: RouterAddresses) -> bool:
    """As this router is told by every worker."""
    workers = kv.of_router(router.internal, ACCESS).workers
    return len(workers) == len(ROLES) and all(
        not one.held and one.free_blocks + one.cached_blocks == one.total_blocks for one in workers
    )


class ChunkList:
    """Takes a stream's chunks as they come, on a thread."""

    def __init__(self, stream: Stream) -> None:
        self._chunks: list[Chunk] = []
        self._thread = Thread(target=lambda: self._chunks.extend(stream), daemon=True)
        self._thread.start()

    @property
    def tokens(self) -> int:
        return sum(len(chunk.token_ids) for chunk in [*self._chunks])

    def _of_choices(self) -> list[list[Chunk]]:
        self._thread.join(60)
        indexes = sorted({chunk.index for chunk in self._chunks})
        return [[chunk for chunk in self._chunks if chunk.index == i] for i in indexes]

    def texts(self) -> list[str]:
        return ["".join(chunk.text for chunk in own) for own in self._of_choices()]

    def ids(self) -> list[tuple[int, ...]]:
        return [tuple(i for chunk in own for i in chunk.token_ids) for own in self._of_choices()]
