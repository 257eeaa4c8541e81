"""The receiving end: it answers commands on a thread of its own, in another process (`python -m
bench.transfer.receiver SCHEME SHAPE`) or, for loopback, in this one.
"""

from __future__ import annotations

import argparse
import json
import threading
from collections.abc import Callable
from dataclasses import replace

import psutil
import torch

from bench.transfer.end import FINGERPRINT, End
from bench.transfer.shape import SLABS, Shape
from kvpool.core.transfer.piece import Piece
from kvpool.core.transfer.pool_map import KvFacts
from kvpool.core.transfer.write import Side
from kvpool.memory.collate import read_slab
from kvpool.memory.direct import fetch
from kvpool.transport.registry import schemes


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
        read_slab(
            self.memory,
            self.tables,
            Piece(span=self.shape.span(tokens), index=index),
            self.shape.cut(tokens)[index],
            fingerprint=FINGERPRINT,
            lease_id=index,
            window=self._slabs[slab].memory,
        )
        self.memory.settle()
        self.say(say="free", slab=slab)

    def _runs(self, blocks: int) -> None:
        """Both ends lay the sequence out anew."""
        shape = replace(self.shape, run_blocks=blocks)
        self.tables = shape.tables(seed=2)
        self._source = Side(tables=shape.tables(seed=1), block_size=self.side.block_size)
        self.say(say="runs")

    def _read(self, tokens: int, at_once: bool) -> None:
        """A batch for each write of the cut or for all, its preparation included."""
        for write in self.shape.whole(tokens) if at_once else self.shape.cut(tokens):
            fetch(self.memory, self.side, self.peer, self._kv, self._source, write)
            self.memory.settle()
        self.say(say="read")

    def _digest(self) -> None:
        self.say(say="digest", digest=self.digest())
        self.memory.flat.zero_()

    def _rss(self) -> None:
        self.say(say="rss", bytes=psutil.Process().memory_info().rss)


def receiver_in_thread(scheme: str, shape: Shape) -> tuple[str, Callable[[], None]]:
    """Its address, and what waits for its end."""
    receiver = Receiver(scheme, shape)
    thread = threading.Thread(target=receiver.run, name="bench-receiver")
    thread.start()
    return receiver.endpoint.address, thread.join


def main() -> None:
    args = _arguments()
    receiver = Receiver(args.scheme, args.shape)
    print(receiver.endpoint.address, flush=True)
    receiver.run()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="started by python -m bench.transfer")
    parser.add_argument("scheme", choices=schemes(), help="the transport")
    parser.add_argument("shape", type=_shape, help="the fields of Shape, as JSON")
    return parser.parse_args()


def _shape(given: str) -> Shape:
    return Shape(**json.loads(given))


if __name__ == "__main__":
    main()
