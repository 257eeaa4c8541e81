"""KV restored from a pool node, host memory and disk, against computing it again by the engine.

A real `kvrelay pool-node` process beside this one. Its memory holds one prefix and its disk two, so
whichever prefix is not in memory comes from disk; the system's file cache is dropped before.
"""

from __future__ import annotations

import argparse
import logging
import os
import queue
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

import grpc
import torch
from transformers import LlamaConfig

from bench.access import ACCESS
from bench.engine.speed import EngineRun, Load
from bench.models import SMOLLM_135M, write_random_llama
from bench.report import Reading, Row, print_table, write_json
from cluster.core.settings import host_pool_address
from cluster.worker.pool.links import PoolLinks
from engine.core.sizing import EngineLimits
from engine.load import load_engine
from engine.model.checkpoint import open_checkpoint
from engine.runner import Engine
from kvpool.core.blocks.holding import Holder
from kvpool.core.blocks.tables import BlockTables
from kvpool.core.fetch.client_events import (
    NodeEvent,
    OfferBlocks,
    OfferConfirmed,
    OfferedBlock,
    PoolAnswer,
)
from kvpool.core.fetch.cost import RestoreCost
from kvpool.core.fetch.fetches import Restored
from kvpool.core.fetch.prefix_lookup import PoolUse, PrefixLookup
from kvpool.core.layout.hashes import BlockHashes, block_hashes, cache_salt
from kvpool.core.layout.layout import BlockId
from kvrelay.types import Incarnation, RequestKey
from kvrelay.v1.pool_node_pb2 import PoolReportRequest
from kvrelay.v1.pool_node_pb2_grpc import PoolNodeStub

_TOKENS = 4096
_BLOCK_SIZE = 16
_BLOCKS = _TOKENS // _BLOCK_SIZE
_LOAD = Load(requests=1, prompt_tokens=_TOKENS, output_tokens=1, chunk_tokens=512)
_SALT = cache_salt(fingerprint="bench", physical_format="bench", tenant="")
_PATIENCE_S = 120.0
_COMPUTED = Holder("bench", RequestKey("computed", 0))
_RESTORED = Holder("bench", RequestKey("restored", 0))
_Answer = PoolAnswer | Restored


class Restorer:
    """A worker's lookup and links to pool nodes over the engine's memory. Blocks `[0, _BLOCKS)`
    hold the computed prefix, which is stored under two names; restored ones go to
    `[_BLOCKS, 2 x _BLOCKS)`."""

    def __init__(self, engine: Engine, cluster: str, node: PoolNodeStub) -> None:
        self._node = node
        self._memory = engine.memory
        self._inbox: queue.SimpleQueue[NodeEvent | BaseException] = queue.SimpleQueue()
        self._stored = 0
        self._tables = BlockTables(engine.layout, 2 * _BLOCKS, caching=False)
        for holder in (_COMPUTED, _RESTORED):
            assert self._tables.try_grow(holder, _TOKENS, now_s=0.0)
        cost = RestoreCost(_BLOCK_SIZE)
        self._pool = PoolUse(self._tables, cost)
        self._lookup = PrefixLookup(tables=self._tables, cost=cost, pool=self._pool)
        self._links = PoolLinks(
            engine.memory,
            address=host_pool_address(cluster),
            incarnation=Incarnation(uuid4().hex),
            fingerprint=engine.facts.fingerprint,
            looks_up=True,
            post=self._inbox.put,
            crashed=self._inbox.put,
        )
        self._links.start()

    def store(self, hashes: BlockHashes) -> None:
        """Into memory, and from there to disk."""
        parents = (None, *hashes)
        blocks = tuple(
            OfferedBlock(name, parent, (BlockId(i),))
            for i, (name, parent) in enumerate(zip(hashes, parents, strict=False))
        )
        stores = self._pool.nodes.stores
        self._until(lambda answers: stores.connected)
        for number in range(0, _BLOCKS, 64):
            offer = OfferBlocks(offer=number, blocks=blocks[number : number + 64])
            stores.offer(offer, time.monotonic())
            self._await(OfferConfirmed)
        self._stored += len(hashes)
        deadline_s = time.monotonic() + _PATIENCE_S
        while self._on_disk() < self._stored:
            assert time.monotonic() < deadline_s, "the pool node does not write to disk"
            time.sleep(0.05)

    def _on_disk(self) -> int:
        tiers = self._node.Report(PoolReportRequest(), metadata=ACCESS.metadata).tiers
        return sum(
            states.blocks
            for tier in tiers
            for states in tier.states
            if (tier.tier, states.state) == ("disk", "cached")
        )

    def restore(self, hashes: BlockHashes) -> float:
        """Seconds."""
        begin, now_s = time.perf_counter(), time.monotonic()
        assert self._lookup.fetches.begin(_RESTORED, hashes, 0, None, now_s)
        restored = self._await(Restored)
        seconds = time.perf_counter() - begin
        assert isinstance(restored, Restored) and restored.tokens == _TOKENS, restored
        return seconds

    def check(self) -> None:
        """What was restored is what was computed."""
        slots = _TOKENS
        for plane in self._memory.planes[0]:
            assert torch.equal(plane[:, :slots], plane[:, slots : 2 * slots]), "wrong KV"
            plane[:, slots : 2 * slots].zero_()

    def close(self) -> None:
        self._links.close()

    def _await(self, kind: type[object]) -> _Answer:
        found: list[_Answer] = []

        def has_come(answers: list[_Answer]) -> bool:
            found.extend(answer for answer in answers if isinstance(answer, kind))
            return bool(found)

        self._until(has_come)
        return found[0]

    def _until(self, done: Callable[[list[_Answer]], bool]) -> None:
        deadline_s = time.monotonic() + _PATIENCE_S
        answers = self._execute()
        while not done(answers):
            event = self._inbox.get(timeout=max(0.0, deadline_s - time.monotonic()))
            if isinstance(event, BaseException):
                raise event
            answers = [*self._lookup.on_node(event, time.monotonic()), *self._execute()]

    def _execute(self) -> list[_Answer]:
        answers: list[_Answer] = []
        for command in self._pool.nodes.take_outbox():
            if isinstance(command, PoolAnswer):
                answers.append(command)
            else:
                self._links.execute(command)
        return answers


@contextmanager
def pool_node(cluster: str, folder: Path, memory_bytes: int) -> Iterator[PoolNodeStub]:
    command = [sys.executable, "-m", "cluster", "pool-node", "--name", cluster]
    options = ["--host-memory", f"{memory_bytes}B", "--disk", str(folder), "--disk-size", "2GiB"]
    env = os.environ | {"KVRELAY_LOG": "warning"}
    with subprocess.Popen(
        [*command, *options], env=env, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            told = "internal gRPC on "
            line = next((line for line in process.stdout if line.startswith(told)), None)
            assert line is not None, "the pool node did not start"
            with grpc.insecure_channel(line.removeprefix(told).strip()) as channel:
                yield PoolNodeStub(channel)
        finally:
            process.terminate()


def _chain(name: int) -> BlockHashes:
    return block_hashes([name] * _BLOCKS, block_size=1, salt=_SALT)


def _drop_file_cache(folder: Path) -> None:
    os.sync()
    for path in folder.glob("*.segment"):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _timed(run: Callable[[], object]) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def _memcpy(nbytes: int) -> Callable[[], float]:
    source, target = torch.ones(nbytes, dtype=torch.uint8), torch.zeros(nbytes, dtype=torch.uint8)
    return lambda: _timed(lambda: target.copy_(source))


def _load(folder: Path) -> Engine:
    config = LlamaConfig.from_dict(SMOLLM_135M.to_dict() | {"max_position_embeddings": 2 * _TOKENS})
    limits = EngineLimits(
        max_model_len=_TOKENS + 1,
        prefill_chunk_tokens=_LOAD.chunk_tokens,
        max_running_requests=1,
    )
    return load_engine(
        open_checkpoint(str(write_random_llama(folder, config))),
        device="cpu",
        dtype="bfloat16",
        block_size=_BLOCK_SIZE,
        blocks=2 * _BLOCKS + 1,
        limits=limits,
    )


def measure(threads: int, repeats: int) -> list[Row]:
    torch.set_num_threads(threads)
    with tempfile.TemporaryDirectory() as name:
        folder, cluster = Path(name), f"bench-{uuid4().hex[:8]}"
        engine = _load(folder / "model")
        nbytes = _BLOCKS * engine.layout.bytes_per_block
        run, copy = EngineRun(engine, _LOAD), _memcpy(nbytes)
        found: dict[str, list[float]] = {"compute": [], "host": [], "disk": [], "memcpy": []}
        run.generate()
        with pool_node(cluster, folder / "disk", nbytes) as node:
            restorer = Restorer(engine, cluster, node)
            chains = (_chain(1), _chain(2))
            for chain in chains:
                restorer.store(chain)
            for number in range(repeats):
                found["compute"].append(_timed(run.generate))
                _drop_file_cache(folder / "disk")
                for tier in ("disk", "host"):
                    found[tier].append(restorer.restore(chains[number % 2]))
                    restorer.check()
                found["memcpy"].append(copy())
            restorer.close()
    return _rows({key: Reading(values=tuple(v)) for key, v in found.items()}, nbytes, threads)


def _rows(readings: dict[str, Reading], nbytes: int, threads: int) -> list[Row]:
    method = (
        f"random Llama of SmolLM-135M's shape, bf16, {_TOKENS} tokens ({nbytes / 2**20:.0f} MiB), "
        f"{threads} threads to compute, one to restore; disk without file cache"
    )
    rates = {key: _TOKENS / reading.median for key, reading in readings.items()}
    goals = {"host": 5.0, "disk": 2.0}
    names = {"host": "restored from host memory", "disk": "restored from disk"}
    rows = [
        Row(
            name=names[tier],
            value=rates[tier],
            unit="tokens/s",
            against="computed again",
            against_value=rates["compute"],
            goal=goal,
            method=method,
            spread=f"s: {readings[tier].spread()}; computing {readings['compute'].spread()}",
        )
        for tier, goal in goals.items()
    ]
    limit = Row(
        name=names["host"],
        value=nbytes / readings["host"].median / 1e9,
        unit="GB/s",
        against="contiguous memcpy",
        against_value=nbytes / readings["memcpy"].median / 1e9,
        method=method,
    )
    return [*rows, limit]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    rows = measure(args.threads, args.repeats)
    print_table("Pool: restored or computed again", rows)
    if args.json:
        write_json(args.json, rows)


if __name__ == "__main__":
    main()
