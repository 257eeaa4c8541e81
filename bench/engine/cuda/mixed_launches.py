"""POD-Attention's question: what would one launch for the decodes and the chunk of a mixed batch
save over two?

One layer of Llama-3.1-8B: decode attention alone, attention of a chunk alone, both one after
another on one stream, at once on two, and in one launch, where decodes have the chunk's tiles. One
of these is adopted if it takes at most 0.95 of one after another.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace

import torch

from bench.engine.cuda.attention_tilings import wanted_of
from bench.engine.cuda.attention_times import piece, time_device
from bench.report import Row, print_table
from engine.attention.triton.backend import TritonBackend
from engine.core.step import SequenceSlice
from engine.model.interface import AttentionState, Scores
from kvpool.memory.kv_memory import KvMemory

_Kind = tuple[int, int, int]
"""Sequences, tokens of each and tokens before them."""
MIXES = (
    ((64, 1, 2047), (1, 512, 1536)),
    ((64, 1, 2047), (1, 2048, 6144)),
    ((8, 1, 8191), (1, 2048, 2048)),
)
"""The decodes, and the chunk."""


class Attention:
    """Of one layer, for sequences of some kinds: in one launch, with the tiles of the longest."""

    def __init__(self, device: str, *kinds: _Kind) -> None:
        wanted = wanted_of("bfloat16", device)
        shape, layout = wanted.groups[0], wanted.layout
        each = [(tokens, cached) for count, tokens, cached in kinds for _ in range(count)]
        blocks = max(layout.blocks_for(tokens + cached) for tokens, cached in each)
        memory = KvMemory(layout, len(each) * blocks, wanted.device)
        for plane in memory.planes[0]:
            plane.copy_(torch.randn_like(plane))
        slices = [piece(i, *one, blocks) for i, one in enumerate(each)]
        self._state = _in_one_launch(TritonBackend(memory, (shape,), {0: (0, 0)}), slices)
        self._scores = Scores(scaling=shape.dim**-0.5, window=shape.window)
        count = sum(tokens for tokens, _ in each)
        heads = (shape.query_heads, shape.kv_heads, shape.kv_heads)
        self._qkv = [
            torch.randn(1, count, h, shape.dim, dtype=wanted.dtype, device=device).transpose(1, 2)
            for h in heads
        ]

    def __call__(self) -> None:
        query, key, value = self._qkv
        self._state.attend(0, query, key, value, self._scores)


def _in_one_launch(backend: TritonBackend, slices: Sequence[SequenceSlice]) -> AttentionState:
    """The backend itself makes a launch for each kind."""
    step = backend.step(slices)
    if step.decodes < len(slices):
        step = replace(step, decodes=0)
    named, tilings = backend.arrays(step)
    assert len(tilings) == 1
    return backend.prepared(named.send(backend.memory.device), tilings, None).state


def _at_once(first: Attention, second: Attention, side: torch.cuda.Stream | None) -> None:
    """Without a stream, in a rehearsal: one after another."""
    if side is None:
        second()
        first()
        return
    main = torch.cuda.current_stream()
    side.wait_stream(main)
    with torch.cuda.stream(side):
        second()
    first()
    main.wait_stream(side)


@torch.inference_mode()
def rows(device: str, decodes: _Kind, chunk: _Kind) -> list[Row]:
    one, other = Attention(device, decodes), Attention(device, chunk)
    together = Attention(device, decodes, chunk)
    side = torch.cuda.Stream() if device.startswith("cuda") else None
    serial_ms = 1000 * time_device(lambda: _at_once(one, other, None))
    times = {
        "decodes alone": time_device(one),
        "chunk alone": time_device(other),
        "two launches at once": time_device(lambda: _at_once(one, other, side)),
        "one launch": time_device(together),
    }
    named = f"{decodes[0]} x {decodes[2] + 1} decoded, {chunk[1]} after {chunk[2]}"
    return [
        Row(
            name=f"{named}: {name}",
            value=1000 * seconds,
            unit="ms",
            against="one after another",
            against_value=serial_ms,
            goal=None if name.endswith("alone") else 0.95,
            lower_is_better=True,
            method="one layer of Llama-3.1-8B, device time, medians",
        )
        for name, seconds in times.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rehearse", action="store_true", help="one short mix")
    args = parser.parse_args()
    mixes = (((2, 1, 31), (1, 16, 0)),) if args.rehearse else MIXES
    print_table("Mixed batches", [row for mix in mixes for row in rows(args.device, *mix)])


if __name__ == "__main__":
    main()
