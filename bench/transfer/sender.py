"""The sending end, which leads: it moves, checks and times."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import psutil
import torch

from bench.transfer.end import FINGERPRINT, End, Message
from bench.transfer.shape import Shape
from kvpool.core.transfer.link_cost import LinkCost, TransferShape, TransferWay, fit
from kvpool.core.transfer.piece import Piece, transfer_shape
from kvpool.core.transfer.write import Side, SlabWrite
from kvpool.memory.collate import write_slab
from kvpool.memory.kv_memory import KvMemory
from kvpool.memory.probe import blocks_measured, measure_copies
from kvpool.transport import probe
from kvpool.transport.peer.base import RegionName

MESSAGE_LINKS = ("nixl", "ucx")
PATIENCE_S = 120.0


class Sender(End):
    """The prefill worker's side; `address` is the receiver's."""

    def __init__(self, scheme: str, shape: Shape, address: str) -> None:
        super().__init__(scheme, shape, seed=1)
        self.scheme = scheme
        self.memory.flat.random_()
        self._staging = self.endpoint.register(shape.staging.slab_bytes)
        self._plain = torch.zeros_like(self.memory.flat[: shape.nbytes])
        self.connection = self.endpoint.connect(address)
        self.say(say="hello", kv=self.kv.name, blocks=shape.blocks)
        hello = self.hear("hello")
        self._slabs = [RegionName(name) for name in hello["slabs"]]
        self._kv_there, self._probe_there = hello["kv"], hello["probe"]

    def hear(self, what: str) -> Message:
        message = self.messages.get(timeout=PATIENCE_S)
        assert message["say"] == what, message
        return message

    def collated(self, tokens: int | None = None) -> float:
        """Gather, write, scatter; the receiver scatters one slab while the next is on its way."""
        count = self.shape.tokens if tokens is None else tokens
        started_s = time.monotonic()
        free = list(range(len(self._slabs)))
        for index, write in enumerate(self.shape.cut(count)):
            slab = free.pop() if free else int(self.hear("free")["slab"])
            self._send(slab, Piece(span=self.shape.span(count), index=index), write)
            self.say(say="filled", slab=slab, index=index, tokens=count)
        while len(free) < len(self._slabs):
            free.append(int(self.hear("free")["slab"]))
        return time.monotonic() - started_s

    def _send(self, slab: int, piece: Piece, write: SlabWrite) -> None:
        region = self._slabs[slab]
        window = self.peer.window(region)
        size = write_slab(
            self.memory,
            self.tables,
            piece,
            write,
            fingerprint=FINGERPRINT,
            lease_id=piece.index,
            window=self._staging.memory if window is None else window,
        )
        self.memory.settle()
        if window is None:
            self.peer.write(region, 0, self._staging.memory[:size])

    def direct(self, tokens: int | None = None) -> float:
        """The receiver reads each block, layer and plane."""
        count = self.shape.tokens if tokens is None else tokens
        return self._direct(count, at_once=self.scheme in MESSAGE_LINKS)

    def direct_pieces(self, tokens: int) -> float:
        """As workers do: they exchange two more messages than those about slabs
        (kvpool.core.transfer.messages)."""
        started_s = time.monotonic()
        self._ping()
        self._direct(tokens, at_once=False)
        return time.monotonic() - started_s

    def _direct(self, tokens: int, *, at_once: bool) -> float:
        started_s = time.monotonic()
        self.say(say="read", tokens=tokens, at_once=at_once)
        self.hear("read")
        return time.monotonic() - started_s

    def lay_out(self, run_blocks: int) -> None:
        """Anew, at both ends."""
        self.shape = replace(self.shape, run_blocks=run_blocks)
        self.tables = self.shape.tables(seed=1)
        self.say(say="runs", blocks=run_blocks)
        self.hear("runs")

    def one_write(self) -> float:
        """The same bytes in one piece, from registered memory to registered memory."""
        started_s = time.monotonic()
        self.peer.write(RegionName(self._kv_there), 0, self.memory.flat[: self.shape.nbytes])
        return time.monotonic() - started_s

    def memcpy(self) -> float:
        started_s = time.monotonic()
        self._plain.copy_(self.memory.flat[: self.shape.nbytes])
        self.memory.settle()
        return time.monotonic() - started_s

    def check(self, move: Callable[[], float]) -> None:
        """Nothing but the very bytes may have arrived."""
        self.say(say="digest")
        self.hear("digest")
        move()
        self.say(say="digest")
        assert self.hear("digest")["digest"] == self.digest(), "other bytes arrived"

    def cost(self) -> LinkCost:
        """As the workers measure it."""
        region = RegionName(self._probe_there)
        slab_bytes = self.shape.staging.payload_bytes
        samples = probe.measure(self.peer, region, self.probe.memory, slab_bytes, self._ping)
        mapped = self.peer.window(region) is not None
        layout = self.shape.layout
        pool = KvMemory(layout, blocks_measured(layout), self.memory.device)
        copies = measure_copies(pool, slab_bytes)
        own = copies[self.probe.memory.device.type]
        at_once = mapped and self.probe.memory.is_cuda
        return fit(self.scheme, [*samples, *own], mapped=mapped, at_once=at_once)

    def _ping(self) -> None:
        self.say(say="ping")
        self.hear("pong")

    def pieces(self, tokens: int | None = None) -> list[TransferShape]:
        target = Side(tables=self.shape.tables(seed=2), block_size=self.side.block_size)
        return [transfer_shape(write, self.side, target) for write in self.shape.cut(tokens)]

    def expected_s(self, cost: LinkCost, tokens: int | None = None) -> dict[TransferWay, float]:
        """Piece by piece, as workers choose."""
        pieces = self.pieces(tokens)
        count = len(pieces)
        return {
            w: sum(cost.seconds(w, p.times(count)) for p in pieces) / count for w in TransferWay
        }

    def way(self, cost: LinkCost, tokens: int | None = None) -> TransferWay:
        """As workers choose for the first piece; the others are like it."""
        pieces = self.pieces(tokens)
        return cost.choose(pieces[0].times(len(pieces)))

    def rss_bytes(self) -> int:
        """Of both ends."""
        self.say(say="rss")
        return int(self.hear("rss")["bytes"]) + psutil.Process().memory_info().rss
