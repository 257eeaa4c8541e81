"""One end of a measured transfer: a KV pool, slabs and one transport, driven by small messages."""

from __future__ import annotations

import json
import queue
from typing import Any
from uuid import uuid4

import torch
import xxhash

from bench.transfer.shape import Shape
from kvpool.core.transfer.write import Side
from kvpool.memory.collate import gather_write
from kvpool.memory.kv_memory import KvMemory
from kvpool.transport.mapped import memfd
from kvpool.transport.peer.base import Callbacks, Connection
from kvpool.transport.probe import PROBE_BYTES
from kvpool.transport.rdma.slab_memory import SlabMemory, SlabPlace
from kvpool.transport.registry import open_endpoint
from kvrelay.types import Incarnation

FINGERPRINT = "0" * 32
Message = dict[str, Any]


def _slabs(device: str) -> SlabMemory:
    """On the device, whatever this machine's network can do."""
    return SlabMemory(place=SlabPlace.DEVICE if device == "cuda" else SlabPlace.HOST, device=device)


class End:
    """`tables` say where the sequence lies here. `messages` are what the other end has said."""

    def __init__(self, scheme: str, shape: Shape, seed: int) -> None:
        self.shape = shape
        self.messages: queue.SimpleQueue[Message] = queue.SimpleQueue()
        callbacks = Callbacks(
            on_connect=self._connected, on_message=self._heard, on_lost=self._lost
        )
        self.endpoint = open_endpoint(
            scheme,
            Incarnation(f"bench-{uuid4().hex}"),
            callbacks,
            secret=b"bench",
            slabs=_slabs(shape.device),
            device=shape.device,
        )
        self.connection: Connection | None = None
        self.tables = shape.tables(seed)
        allocate = memfd.allocate if scheme == "shm" else None
        self.memory = KvMemory(shape.layout, shape.blocks, shape.device, allocate=allocate)
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
