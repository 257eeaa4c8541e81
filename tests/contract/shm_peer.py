"""The other process of test_control.py, test_one_sided.py and test_shm.py."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection as Pipe
from multiprocessing.context import ForkServerProcess

import torch

from kvpool.core.layout.layout import BlockId, KvLayout, LayerGroup, Plane, Tables
from kvpool.core.transfer.piece import Piece, cut_span
from kvpool.core.transfer.write import SlabWrite, TokenSpan, chunk_bytes
from kvpool.memory.collate import write_slab
from kvpool.memory.kv_memory import KvMemory
from kvpool.transport.peer.base import Connection, RegionName
from kvpool.transport.rdma.ucx_options import UcxOptions
from tests.contract.transport_kit import PATIENCE_S, Side, mapped_inode
from tests.forks import forks

MODEL = "5a" * 16
TOKENS = 100
LEASE_ID = 42
PIECE = Piece(span=TokenSpan(start=0, tokens=TOKENS, next_position=0), index=0)
"""All windows are still open, so every token of every group travels."""


def layout(block_size: int) -> KvLayout:
    planes = (Plane(name="k", heads=2, dim=8), Plane(name="v", heads=2, dim=8))
    groups = (
        LayerGroup(layers=(0, 2), planes=planes),
        LayerGroup(layers=(1,), planes=planes, window=16),
    )
    return KvLayout(groups=groups, dtype="float32", block_size=block_size)


def the_write() -> SlabWrite:
    (write,) = cut_span(layout(8), PIECE.span, chunk_bytes(layout(8), TOKENS))
    return write


def numbered_memory(block_size: int, tables: Tables) -> KvMemory:
    """Every element of the sequence's KV is a number of its own; other slots stay zero."""
    memory, number = KvMemory(layout(block_size), 32, "cpu"), 1
    for planes, table in zip(memory.planes, tables, strict=True):
        for plane in planes:
            for token in range(TOKENS):
                slot = table[token // block_size] * block_size + token % block_size
                row = plane[:, slot]
                row.copy_(torch.arange(number, number + row.numel()).view(row.shape))
                number += row.numel()
    return memory


def tables(block_size: int, first: int) -> Tables:
    """Two tables whose blocks are in no order, others for each `first`."""
    count = -(-TOKENS // block_size)
    one = tuple(BlockId((first + 7 * i) % 32) for i in range(count))
    return one, one[::-1]


def write_for_ever(connection: Connection, region: RegionName) -> None:
    data = torch.ones(1 << 20, dtype=torch.uint8)
    connection.write(region, 0, data)
    connection.notify(b"writing")
    while True:
        connection.write(region, 0, data)


def own_a_region(side: Side, connection: Connection, end: Pipe) -> None:
    region = side.region(16 << 20)
    connection.notify(region.name.encode())
    end.poll(None)


def region_told(message: bytes) -> RegionName:
    return RegionName(message.decode())


def write_one_slab(connection: Connection, region: RegionName, end: Pipe) -> None:
    window = connection.window(region)
    assert window is not None
    ours = tables(8, 3)
    write_slab(
        numbered_memory(8, ours),
        ours,
        PIECE,
        the_write(),
        fingerprint=MODEL,
        lease_id=LEASE_ID,
        window=window,
    )
    facts = {"pid": os.getpid(), "inode": mapped_inode("self", region)}
    connection.notify(json.dumps(facts).encode())
    end.poll(None)


def main(mode: str, address: str, region: str, end: Pipe, tls: str | None) -> None:
    with Side(address.partition(":")[0], ucx=UcxOptions(tls=tls)) as side:
        connection = side.endpoint.connect(address)
        match mode:
            case "write-for-ever":
                write_for_ever(connection, RegionName(region))
            case "own-a-region":
                own_a_region(side, connection, end)
            case "write-one-slab":
                write_one_slab(connection, RegionName(region), end)


def tell(process: ForkServerProcess, number: signal.Signals) -> None:
    assert process.pid is not None
    os.kill(process.pid, number)


@contextmanager
def running(
    mode: str, address: str, region: str = "", *, tls: str | None = None
) -> Iterator[ForkServerProcess]:
    """That process; it ends by itself with the context where it can, else it is killed. `tls`: what
    its UCX may use."""
    ours, theirs = forks().Pipe()
    process = forks().Process(target=main, args=(mode, address, region, theirs, tls))
    process.start()
    theirs.close()
    try:
        yield process
    finally:
        ours.close()
        if mode != "write-one-slab":
            process.kill()
        process.join(PATIENCE_S)
        ended = process.exitcode
        process.close()
    assert mode != "write-one-slab" or ended == 0
