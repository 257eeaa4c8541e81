"""The attention kernels on a CUDA device against plain attention in fp64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from engine.attention.triton.work import Tiling, chunk_tiling, decode_tiling
from engine.model.interface import Scores
from tests.unit.attention_kit import Batch, plain_attention

pytestmark = pytest.mark.gpu
_TOLERANCE = {torch.float32: 5e-6, torch.float16: 3e-3, torch.bfloat16: 2e-2}
_SCORES = {
    "plain": Scores(scaling=0.1),
    "window": Scores(scaling=0.1, window=300),
    "capped": Scores(scaling=1.0, window=77, softcap=5.0),
    "sinks": Scores(scaling=0.1, sinks=torch.linspace(-2, 3, 8)),
}


def _run(batch: Batch, tiling: Tiling) -> None:
    from engine.attention.triton.launch import DeviceWork, Parts, attend, part_elements
    from engine.attention.triton.work import most_parts

    query = batch.random(batch.tokens, batch.heads, batch.dim)
    planes = batch.planes()
    processors = torch.cuda.get_device_properties("cuda").multi_processor_count
    programs = processors * tiling.per_processor
    group = batch.heads // batch.kv_heads
    work = batch.work(tile_tokens=tiling.rows // group, programs=programs, key_tile=tiling.keys)
    sizes = part_elements(tiling.rows, batch.value_dim, most_parts(programs))
    values, marks = (torch.full((n,), float("nan"), device="cuda") for n in sizes)
    out = torch.full((*query.shape[:2], batch.value_dim), float("nan"), device="cuda")
    out = out.to(batch.dtype)
    attend(
        query,
        *planes,
        out,
        DeviceWork(**work),
        Parts(values=values, sizes=marks),
        batch.scores,
        tiling,
        block_size=batch.block_size,
        joined_rows=tiling.rows,
    )
    expected = plain_attention(batch, query, *planes)
    difference = (out.double().cpu() - expected).norm() / expected.norm()
    assert difference <= _TOLERANCE[batch.dtype], float(difference)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dim", [64, 80, 128, 256])
@pytest.mark.parametrize("scores", sorted(_SCORES))
def test_decode_and_chunks(dtype: torch.dtype, dim: int, scores: str) -> None:
    sinks = _SCORES[scores].sinks
    wanted = replace(_SCORES[scores], sinks=None if sinks is None else sinks.cuda())
    decode = Batch(
        counts=(1,) * 6,
        cached=(0, 5000, 63, 64, 700, 31),
        heads=8,
        kv_heads=2,
        dim=dim,
        value_dim=dim,
        scores=wanted,
        dtype=dtype,
        device="cuda",
    )
    _run(decode, decode_tiling(4, dim, dtype.itemsize))
    chunks = replace(decode, counts=(400, 3, 70), cached=(1500, 0, 33), blocks=[])
    _run(chunks, chunk_tiling(400, 4, dim, dtype.itemsize))
