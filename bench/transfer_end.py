"""One end of a measured transfer: a KV pool, slabs and one transport, driven by small messages.

The receiving end answers commands on a thread of its own, in another process (`python -m
bench.transfer_end SCHEME ...`) or, for loopback, in this one.
"""

from __future__ import annotations

import json
import queue
import random
import sys
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any
from uuid import uuid4

import psutil
import torch
import xxhash

from kvpool.layout import BlockId, KvLayout, LayerGroup, Plane, Tables
from kvpool.memory import KvMemory
from kvpool.memory_collate import read_slab
from kvpool.memory_direct import fetch
from kvpool.memory_sections import gather_write
from kvpool.piece import Piece
from kvpool.pool_map import KvFacts
from kvpool.shard import Shard, ShardLayout
from kvpool.staging import Staging, plan_staging
from kvpool.transfer_plan import Side, TokenSpan, Write, cut
from kvpool.transport import memfd
from kvpool.transport.base import Callbacks, Connection
from kvpool.transport.probe import PROBE_BYTES
from kvpool.transport.registry import open_endpoint
from kvrelay.types import Incarnation

FINGERPRINT = "0" * 32
SLABS = 4
CHUNK_TOKENS = 512
Message = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Llama-3.1-8B's KV: 8 heads of 128, bf16, in 16-token blocks; `layers` of its 32.
    Runs of `run_blocks` adjacent blocks lie apart."""

    layers: int
    tokens: int
    run_blocks: int = 1

    @property
    def layout(self) -> KvLayout:
        planes = tuple(Plane(name=name, heads=8, dim=128) for name in ("k", "v"))
        group = LayerGroup(layers=tuple(range(self.layers)), planes=planes)
        return KvLayout(groups=(group,), dtype="bfloat16", block_size=16)

    @property
    def blocks(self) -> int:
        return self.layout.blocks_for(self.tokens)

    @property
    def nbytes(self) -> int:
        return self.layout.bytes_per_token * self.tokens

    def tables(self, seed: int) -> Tables:
        """Blocks in an order in which hardly any follows its neighbour."""
        starts = list(range(0, self.blocks, self.run_blocks))
        random.Random(seed).shuffle(starts)
        runs = (range(start, min(start + self.run_blocks, self.blocks)) for start in starts)
        return (tuple(BlockId(block) for run in runs for block in run),)

    def span(self, tokens: int | None = None) -> TokenSpan:
        count = self.tokens if tokens is None else tokens
        return TokenSpan(start=0, tokens=count, next_position=count)

    def cut(self, tokens: int | None = None) -> tuple[Write, ...]:
        """As the workers cut it, into what their slabs hold."""
        return _cut(self, self.span(tokens), self.staging.payload_bytes)

    def whole(self, tokens: int | None = None) -> tuple[Write, ...]:
        """All in one write."""
        return _cut(self, self.span(tokens), self.nbytes)

    @property
    def staging(self) -> Staging:
        """A worker's own, on a CPU."""
        return plan_staging(
            self.layout, slabs=SLABS, chunk_tokens=CHUNK_TOKENS, total_bytes=None, on_cpu=True
        )


@lru_cache(maxsize=32)
def _cut(shape: Shape, span: TokenSpan, staging_bytes: int) -> tuple[Write, ...]:
    one = ShardLayout(model=shape.layout, shard=Shard())
    return cut(one, one, span=span, staging_bytes=staging_bytes)


@dataclass(slots=True)
class Trace:
    """Named spans of one process, in seconds of the machine's monotonic clock."""

    spans: list[tuple[str, float, float]] = field(default_factory=list)
    enabled: bool = False

    @contextmanager
    def span(self, name: str):  # type: ignore[no-untyped-def]
        started_s = time.monotonic()
        yield
        if self.enabled:
            self.spans.append((name, started_s, time.monotonic()))


class End:
    """`tables` say where the sequence lies here. `messages` are what the other end has said."""

    def __init__(self, scheme: str, shape: Shape, seed: int) -> None:
        self.shape = shape
        self.messages: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self.trace = Trace()
        callbacks = Callbacks(
            on_connect=self._connected, on_message=self._heard, on_lost=self._lost
        )
        self.endpoint = open_endpoint(scheme, Incarnation(f"bench-{uuid4().hex}"), callbacks)
        self.connection: Connection | None = None
        self.tables = shape.tables(seed)
        allocate = memfd.allocate if scheme == "shm" else None
        self.memory = KvMemory(shape.layout, shape.blocks, "cpu", allocate=allocate)
        self.kv = self.endpoint.adopt(self.memory.flat)
        self.probe = self.endpoint.register(PROBE_BYTES)

    @property
    def side(self) -> Side:
        return Side(tables=self.tables, block_size=self.shape.layout.block_size)

    @property
    def peer(self) -> Connection:
        assert self.connection is not None
        return self.connection

    def say(self, **message: object) -> None:
        self.peer.notify(json.dumps(message).encode())

    def digest(self) -> str:
        """Of the sequence's KV, whatever blocks it lies in."""
        found = xxhash.xxh3_64()
        for write in self.shape.cut():
            out = torch.empty(write.nbytes, dtype=torch.uint8)
            gather_write(self.memory, self.side, write, out)
            found.update(out.numpy().data)
        return str(found.hexdigest())

    def _connected(self, connection: Connection) -> None:
        self.connection = connection

    def _heard(self, connection: Connection, payload: bytes) -> None:
        message = json.loads(payload)
        if message["say"] == "ping":
            self.say(say="pong")
        else:
            self.messages.put(message)

    def _lost(self, connection: Connection) -> None:
        self.messages.put({"say": "lost"})


class Receiver(End):
    """Scatters filled slabs and reads directly, as a decode worker's transfer thread does."""

    def __init__(self, scheme: str, shape: Shape) -> None:
        super().__init__(scheme, shape, seed=2)
        size = shape.staging.slab_bytes
        self._source = Side(tables=shape.tables(seed=1), block_size=self.side.block_size)
        self._slabs = [self.endpoint.register(size) for _ in range(SLABS)]

    def run(self) -> None:
        """Until the other end is gone."""
        torch.set_num_threads(1)
        while (message := self.messages.get())["say"] != "lost":
            getattr(self, f"_{message.pop('say')}")(**message)
        self.endpoint.close()

    def _hello(self, kv: str, blocks: int) -> None:
        self._kv = KvFacts(
            dtype=self.shape.layout.dtype,
            block_size=self.shape.layout.block_size,
            blocks=blocks,
            slab_bytes=0,
            region=kv,
        )
        self.say(
            say="hello",
            slabs=[slab.name for slab in self._slabs],
            kv=self.kv.name,
            probe=self.probe.name,
        )

    def _filled(self, slab: int, index: int, tokens: int) -> None:
        with self.trace.span("scatter"):
            read_slab(
                self.memory,
                self.tables,
                Piece(span=self.shape.span(tokens), index=index),
                self.shape.cut(tokens)[index],
                fingerprint=FINGERPRINT,
                lease_id=index,
                window=self._slabs[slab].memory,
            )
        self.say(say="free", slab=slab)

    def _runs(self, blocks: int) -> None:
        """Both ends lay the sequence out anew."""
        shape = replace(self.shape, run_blocks=blocks)
        self.tables = shape.tables(seed=2)
        self._source = Side(tables=shape.tables(seed=1), block_size=self.side.block_size)
        self.say(say="runs")

    def _read(self, tokens: int, at_once: bool) -> None:
        """A batch for each write of the cut or for all, its preparation included."""
        with self.trace.span("read"):
            for write in self.shape.whole(tokens) if at_once else self.shape.cut(tokens):
                fetch(self.memory, self.side, self.peer, self._kv, self._source, write)
        self.say(say="read")

    def _digest(self) -> None:
        self.say(say="digest", digest=self.digest())
        self.memory.flat.zero_()

    def _rss(self) -> None:
        self.say(say="rss", bytes=psutil.Process().memory_info().rss)

    def _trace(self, on: bool) -> None:
        self.trace.enabled = on
        spans, self.trace.spans = self.trace.spans, []
        for name, started_s, ended_s in spans:
            self.say(say="span", span=(name, started_s, ended_s))
        self.say(say="traced")


def receiver_in_thread(scheme: str, shape: Shape) -> tuple[str, Callable[[], None]]:
    """Its address, and what waits for its end."""
    receiver = Receiver(scheme, shape)
    thread = threading.Thread(target=receiver.run, name="bench-receiver")
    thread.start()
    return receiver.endpoint.address, thread.join


def main() -> None:
    scheme, layers, tokens = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    receiver = Receiver(scheme, Shape(layers=layers, tokens=tokens))
    print(receiver.endpoint.address, flush=True)
    receiver.run()


if __name__ == "__main__":
    main()
