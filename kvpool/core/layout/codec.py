"""The encodings of a section's elements in a slab, and their sizes in bytes. Pure.

Under `none` a section is, for each layer, for each plane, `[token, head, dim]` in the wire's dtype.
Under `fp8` and `int8`, all padded to 16 bytes:

    values    one byte each, in the same order
    scales    float32: for each layer, for each plane, `[codec block, head]`

A codec block is 16 tokens, counted from the section's first (the last may be shorter), whatever the
block sizes of the two pools. A value is its code times the scale of its block and head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from kvpool.core.layout.layout import DTYPE_BYTES

CODEC_BLOCK_TOKENS = 16
SCALE_BYTES = 4
LEAST_SCALE = 2.0**-126
"""The smallest normal float32: all-zero heads need no special case, and no scale's inverse
overflows."""
_PAD_BYTES = 16


class Codec(StrEnum):
    NONE = "none"
    FP8 = "fp8"
    """e4m3: relative error at most 1/16, or 2^-10 scales where that is more."""
    INT8 = "int8"
    """Symmetric: error at most half a scale."""

    @property
    def scale_per_largest(self) -> float:
        """A scale is this factor times the largest magnitude in its block and head, or
        LEAST_SCALE."""
        return 1 / (448 if self is Codec.FP8 else 127)


@dataclass(frozen=True, slots=True, kw_only=True)
class WireFormat:
    """`dtype` is the dtype of the elements under codec `none`; the other codecs ignore it."""

    dtype: str
    codec: Codec = Codec.NONE

    def __post_init__(self) -> None:
        assert self.dtype in DTYPE_BYTES, self.dtype

    @property
    def element_bytes(self) -> int:
        return DTYPE_BYTES[self.dtype] if self.codec is Codec.NONE else 1

    def value_bytes(self, layers: int, tokens: int, token_elements: int) -> int:
        """The part of `encoded_bytes` before the scales."""
        values = layers * tokens * token_elements * self.element_bytes
        return values if self.codec is Codec.NONE else _padded(values)

    def encoded_bytes(self, layers: int, tokens: int, planes: Sequence[tuple[int, int]]) -> int:
        """A section of `tokens` tokens of `layers` layers, whose planes have (heads, dim)."""
        token_elements = sum([heads * dim for heads, dim in planes])
        values = self.value_bytes(layers, tokens, token_elements)
        if self.codec is Codec.NONE:
            return values
        heads = sum(heads for heads, _ in planes)
        return values + _padded(layers * codec_blocks(tokens) * heads * SCALE_BYTES)


def codec_blocks(tokens: int) -> int:
    return -(-tokens // CODEC_BLOCK_TOKENS)


def _padded(nbytes: int) -> int:
    return -(-nbytes // _PAD_BYTES) * _PAD_BYTES
