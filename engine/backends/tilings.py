"""Which tiles the Triton kernels work in, by head dim, dtype and what is asked. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiling:
    """`rows` of (token, head of the group) meet `keys` at a time; `per_processor` programs share a
    multiprocessor; `stages` tiles of keys are on their way at once."""

    rows: int
    keys: int
    warps: int
    stages: int
    per_processor: int


DECODE = Tiling(rows=16, keys=64, warps=4, stages=4, per_processor=2)
"""Memory bound: two tiles of keys and of values on their way in each of two programs; a stage is
taken by the block tables, which are loaded before."""
CHUNK = Tiling(rows=128, keys=64, warps=8, stages=3, per_processor=1)
"""Compute bound: a row of matrix units for each of two warp groups."""
_TILE_BYTES = 16 << 10
"""Of keys, for the tilings as they stand: 64 of 128 dims in 16 bits."""


def decode_tiling(group: int, dim: int, element_bytes: int, base: Tiling = DECODE) -> Tiling:
    """For one token of each sequence. `group`: query heads of a KV head."""
    return _fitted(replace(base, rows=_power_of_two(group, 16)), dim, element_bytes)


def chunk_tiling(
    tokens: int, group: int, dim: int, element_bytes: int, base: Tiling = CHUNK
) -> Tiling:
    """For slices of up to `tokens` tokens. Few kinds, since each is compiled when it first runs."""
    if tokens * group <= DECODE.rows:
        return decode_tiling(group, dim, element_bytes)
    rows = _power_of_two(group, base.rows if dim <= 128 else base.rows // 2)
    return _fitted(replace(base, rows=rows), dim, element_bytes)


def _fitted(tiling: Tiling, dim: int, element_bytes: int) -> Tiling:
    """Fewer keys at a time where each takes more memory: shared memory holds as many stages."""
    keys = tiling.keys
    while keys > 16 and keys * dim * element_bytes > _TILE_BYTES:
        keys //= 2
    return replace(tiling, keys=keys)


def _power_of_two(least: int, start: int) -> int:
    while start < least:
        start *= 2
    return start
