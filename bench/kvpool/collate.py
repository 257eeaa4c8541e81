"""Gather and scatter of scattered blocks against one contiguous copy of the same bytes.

Llama-3.1-8B's layout in bf16: 8 KV heads of 128, blocks of 16 tokens at random over a pool twice as
large, slabs of 64 MiB on the CPU and of one whole transfer on a CUDA device.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from bench.report import Reading, Row, interleave, print_table, write_json
from kvpool.core.layout.codec import Codec
from kvpool.core.layout.layout import BlockId, KvLayout, LayerGroup, Plane
from kvpool.core.layout.shards import Shard, ShardLayout
from kvpool.core.transfer.plan import cut
from kvpool.core.transfer.write import Side, SlabWrite, TokenSpan
from kvpool.memory.collate import gather_write, scatter_write
from kvpool.memory.kv_memory import KvMemory

_BLOCK_SIZE = 16
_KV = (Plane(name="k", heads=8, dim=128), Plane(name="v", heads=8, dim=128))
_CPU_SLAB_BYTES = 64 << 20
_CUDA_GOAL = 0.8


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    layers: int
    tokens: int
    device: str

    @property
    def layout(self) -> KvLayout:
        group = LayerGroup(layers=tuple(range(self.layers)), planes=_KV)
        return KvLayout(groups=(group,), dtype="bfloat16", block_size=_BLOCK_SIZE)

    @property
    def nbytes(self) -> int:
        return self.layout.bytes_per_token * self.tokens

    @property
    def slab_bytes(self) -> int:
        return self.nbytes if self.device == "cuda" else min(_CPU_SLAB_BYTES, self.nbytes)


class Collation:
    """One sequence's blocks in a pool, and a slab; each run moves all of the sequence's bytes."""

    def __init__(self, load: Load) -> None:
        self._load = load
        blocks = load.layout.blocks_for(load.tokens)
        self._memory = KvMemory(load.layout, 2 * blocks, load.device)
        for plane in self._memory.planes[0]:
            plane.normal_()
        table = random.Random(0).sample(range(2 * blocks), blocks)
        self._side = Side(tables=(tuple(map(BlockId, table)),), block_size=_BLOCK_SIZE)
        self._contiguous = torch.empty(load.nbytes, dtype=torch.uint8, device=load.device).random_()
        self._slab = torch.zeros(load.slab_bytes, dtype=torch.uint8, device=load.device)

    def writes(self, codec: Codec) -> tuple[SlabWrite, ...]:
        one = ShardLayout(model=self._load.layout, shard=Shard())
        tokens = self._load.tokens
        span = TokenSpan(start=0, tokens=tokens, next_position=tokens)
        return cut(one, one, span=span, staging_bytes=self._load.slab_bytes, codec=codec)

    def copy(self) -> None:
        for start in range(0, self._load.nbytes, self._load.slab_bytes):
            source = self._contiguous[start : start + self._load.slab_bytes]
            self._slab[: len(source)].copy_(source)

    def gather(self, writes: Sequence[SlabWrite]) -> None:
        for write in writes:
            gather_write(self._memory, self._side, write, self._slab[: write.nbytes])

    def scatter(self, writes: Sequence[SlabWrite]) -> None:
        for write in writes:
            scatter_write(self._memory, self._side, write, self._slab[: write.nbytes])


def _gb_per_s(run: Callable[[], None], load: Load) -> float:
    """Bytes in the pool's dtype, read and written once.

    On a device an earlier run keeps it busy while the host prepares the one that is measured.
    """
    if load.device == "cuda":
        run()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        return load.nbytes / 1e6 / begin.elapsed_time(end)
    begin_s = time.perf_counter()
    run()
    return load.nbytes / 1e9 / (time.perf_counter() - begin_s)


def _readings(load: Load, repeats: int) -> dict[str, Reading]:
    collation = Collation(load)
    runs: dict[str, Callable[[], None]] = {"copy": collation.copy}
    for codec in Codec:
        writes = collation.writes(codec)
        runs[f"gather, codec {codec}"] = partial(collation.gather, writes)
        runs[f"scatter, codec {codec}"] = partial(collation.scatter, writes)
    for run in runs.values():
        run()
    rates = {name: partial(_gb_per_s, run, load) for name, run in runs.items()}
    return interleave(rates, repeats=repeats)


def _rows(readings: dict[str, Reading], load: Load, where: str) -> list[Row]:
    copy = readings["copy"]
    method = f"{load.tokens} tokens, {load.layers} layers, {load.nbytes / 1e6:.0f} MB, bf16"
    return [
        Row(
            name=f"{name}, {where}",
            value=reading.median,
            unit="GB/s",
            against="contiguous copy",
            against_value=copy.median,
            goal=_CUDA_GOAL if load.device == "cuda" and name.endswith("none") else None,
            method=f"{method}; bytes counted before encoding",
            spread=reading.spread(),
        )
        for name, reading in readings.items()
        if name != "copy"
    ]


def measure(load: Load, threads: Sequence[int], repeats: int) -> list[Row]:
    if load.device == "cuda":
        return _rows(_readings(load, repeats), load, torch.cuda.get_device_name())
    rows: list[Row] = []
    for count in threads:
        torch.set_num_threads(count)
        rows += _rows(_readings(load, repeats), load, f"{count} thread{'s' * (count > 1)}")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="on the CPU")
    parser.add_argument("--tokens", type=int, default=7500)
    parser.add_argument("--layers", type=int, help="default: 8 on the CPU, all 32 on CUDA")
    args = parser.parse_args()
    layers = args.layers or (32 if args.device == "cuda" else 8)
    load = Load(layers=layers, tokens=args.tokens, device=args.device)
    rows = measure(load, args.threads, args.repeats)
    print_table("Collation", rows)
    if args.json:
        write_json(args.json, rows)


if __name__ == "__main__":
    main()
