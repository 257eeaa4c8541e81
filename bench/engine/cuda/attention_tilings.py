"""Which tiles suit a CUDA device: one layer's attention with Llama-3.1-8B's heads, by tiling.

What `engine.attention.triton.work` holds should be the best of these on the devices that matter.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import product

import torch

from bench.engine.cuda.attention_times import measure_work
from engine.attention.backend import GroupShape
from engine.attention.choosing.needs import Wanted
from engine.attention.triton.backend import TritonBackend
from engine.attention.triton.work import CHUNK, DECODE, Tiling
from kvpool.core.layout.layout import KvLayout, LayerGroup, Plane

_DECODES = {"64 x 8192": (64, 1, 8191), "64 x 2048": (64, 1, 2047), "1 x 2048": (1, 1, 2047)}
_CHUNKS = {"8192 alone": (1, 8192, 0), "512 after 7680": (1, 512, 7680)}


def wanted_of(dtype: str, device: str) -> Wanted:
    planes = tuple(Plane(name=name, heads=8, dim=128) for name in "kv")
    group = LayerGroup(layers=(0,), planes=planes)
    return Wanted(
        device=torch.device(device),
        dtype=torch.bfloat16,
        layout=KvLayout(groups=(group,), dtype=dtype, block_size=16),
        groups=(GroupShape(query_heads=32, kv_heads=8, dim=128, value_dim=128, window=None),),
    )


def _decode_tilings() -> Iterator[Tiling]:
    for keys, stages, warps, programs in product((32, 64, 128), (3, 4, 5), (2, 4), (1, 2, 3, 4)):
        yield replace(DECODE, keys=keys, stages=stages, warps=warps, per_processor=programs)


def _chunk_tilings() -> Iterator[Tiling]:
    for rows, keys, stages, warps in product((64, 128), (32, 64, 128), (2, 3, 4), (4, 8)):
        for programs in (1, 2):
            yield replace(
                CHUNK, rows=rows, keys=keys, stages=stages, warps=warps, per_processor=programs
            )


def _show(
    kind: str, tiling: Tiling, works: dict[str, tuple[int, int, int]], wanted: Wanted
) -> None:
    open_backend = partial(TritonBackend, **{kind: tiling})
    try:
        times = [1e6 * measure_work(open_backend, wanted, *work) for work in works.values()]
    except Exception as error:  # too much shared memory, or registers
        print(kind, tiling, "not possible:", str(error).splitlines()[0][:80])
        return
    shown = ", ".join(f"{name}: {time:.1f} us" for name, time in zip(works, times, strict=True))
    print(f"{kind} {tiling}: {shown}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kv", default="bfloat16", help="bfloat16 or float8_e4m3fn")
    parser.add_argument("--kind", choices=("decode", "chunk"), action="append")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rehearse", action="store_true", help="one tiling and short contexts")
    args = parser.parse_args()
    kinds, wanted = args.kind or ["decode", "chunk"], wanted_of(args.kv, args.device)
    if args.rehearse:
        _show("decode", DECODE, {"2 x 32": (2, 1, 31)}, wanted)
        _show("chunk", CHUNK, {"16 alone": (1, 16, 0)}, wanted)
        return
    for tiling in _decode_tilings() if "decode" in kinds else ():
        _show("decode", tiling, _DECODES, wanted)
    for tiling in _chunk_tilings() if "chunk" in kinds else ():
        _show("chunk", tiling, _CHUNKS, wanted)


if __name__ == "__main__":
    main()
