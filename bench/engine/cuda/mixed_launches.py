"""POD-Attention's question: what would one launch for the decodes and the chunk of a mixed batch
save over two?

One layer of Llama-3.1-8B: decode attention alone, attention of a chunk alone, both one after
another on one stream, and at once on two. Both at once is what one launch could reach at best by
filling the device better; it is adopted if it takes at most 0.95 of one after another.
"""

from __future__ import annotations

import argparse

import torch

from bench.engine.cuda.attention_tilings import wanted_of
from bench.engine.cuda.attention_times import piece, time_device
from bench.report import Row, print_table
from engine.attention.triton.backend import TritonBackend
from engine.model.interface import Scores
from kvpool.memory.kv_memory import KvMemory

MIXES = (
    ((64, 1, 2047), (1, 512, 1536)),
    ((64, 1, 2047), (1, 2048, 6144)),
    ((8, 1, 8191), (1, 2048, 2048)),
)
"""Sequences, tokens of each and tokens before them: of the decodes, and of the chunk."""


class Attention:
    """Of one layer, for sequences of one kind."""

    def __init__(self, device: str, sequences: int, tokens: int, cached: int) -> None:
        wanted = wanted_of("bfloat16", device)
        shape, layout = wanted.groups[0], wanted.layout
        blocks = layout.blocks_for(tokens + cached)
        memory = KvMemory(layout, sequences * blocks, wanted.device)
        for plane in memory.planes[0]:
            plane.copy_(torch.randn_like(plane))
        backend = TritonBackend(memory, (shape,), {0: (0, 0)})
        slices = [piece(i, tokens, cached, blocks) for i in range(sequences)]
        self._state = backend.prepare(slices).state
        self._scores = Scores(scaling=shape.dim**-0.5, window=shape.window)
        count = sequences * tokens
        heads = (shape.query_heads, shape.kv_heads, shape.kv_heads)
        self._qkv = [
            torch.randn(1, count, h, shape.dim, dtype=wanted.dtype, device=device).transpose(1, 2)
            for h in heads
        ]

    def __call__(self) -> None:
        query, key, value = self._qkv
        self._state.attend(0, query, key, value, self._scores)


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
def rows(device: str, decodes: tuple[int, int, int], chunk: tuple[int, int, int]) -> list[Row]:
    one, other = Attention(device, *decodes), Attention(device, *chunk)
    side = torch.cuda.Stream() if device.startswith("cuda") else None
    serial_ms = 1000 * time_device(lambda: _at_once(one, other, None))
    times = {
        "decodes alone": time_device(one),
        "chunk alone": time_device(other),
        "both at once": time_device(lambda: _at_once(one, other, side)),
    }
    named = f"{decodes[0]} x {decodes[2] + 1} decoded, {chunk[1]} after {chunk[2]}"
    return [
        Row(
            name=f"{named}: {name}",
            value=1000 * seconds,
            unit="ms",
            against="one after another",
            against_value=serial_ms,
            goal=0.95 if name == "both at once" else None,
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
