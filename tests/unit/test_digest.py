"""A digest is of the KV, wherever it lies; what is not the same KV has another one."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvpool.core.layout.codec import Codec
from kvpool.core.layout.layout import NO_BLOCK, BlockId, KvLayout, LayerGroup, Plane, Tables
from kvpool.core.transfer.messages import CONVERTED, EXACT, LOSSY, KvDigest, prompt_from
from kvpool.core.transfer.piece import cut_span
from kvpool.core.transfer.write import Side, TokenSpan
from kvpool.memory.collate import gather_write, scatter_write
from kvpool.memory.digest import digest
from kvpool.memory.kv_memory import KvMemory

PLANES = (Plane(name="k", heads=4, dim=16), Plane(name="v", heads=4, dim=16))
FULL = LayerGroup(layers=(0, 2, 3), planes=PLANES)
LAYOUT = KvLayout(groups=(FULL,), dtype="float32", block_size=16)
WINDOWED = replace(LAYOUT, groups=(FULL, LayerGroup(layers=(1, 4), planes=PLANES, window=40)))
LATENT = replace(
    LAYOUT, groups=(LayerGroup(layers=(0, 1), planes=(Plane(name="c", heads=1, dim=48),)),)
)
TOKENS = 100
SPAN = TokenSpan(start=0, tokens=TOKENS, next_position=TOKENS)
BLOCKS = 24


def filled(layout: KvLayout, spikes: float = 0.0) -> KvMemory:
    """With `spikes`, a few channels outweigh the others, as in many models."""
    memory = KvMemory(layout, BLOCKS, "cpu")
    generator = torch.Generator().manual_seed(3)
    for planes in memory.planes:
        for plane in planes:
            values = torch.randn(plane.shape, generator=generator)
            values[..., :1] *= 1 + spikes
            plane.copy_(values.to(plane.dtype))
    return memory


def tables(layout: KvLayout, first: int, step: int = 1) -> Tables:
    count = layout.blocks_for(TOKENS)
    return (tuple(BlockId(first + i * step) for i in range(count)),) * len(layout.groups)


def travelled(
    source: KvMemory,
    layout: KvLayout,
    codec: Codec = Codec.NONE,
    ranks: int = 1,
) -> tuple[KvMemory, Tables]:
    """The KV of blocks 0, 1 ... in another memory and table."""
    target, wire = KvMemory(layout, BLOCKS, "cpu", ranks=ranks), source.layout
    wire = min(wire, layout, key=lambda one: one.bytes_per_token)
    there = tables(layout, BLOCKS - 1, -1)
    ours = Side(tables=tables(source.layout, 0), block_size=source.layout.block_size)
    for write in cut_span(wire, SPAN, 2**40):
        encoded = write.encoded(codec)
        slab = torch.empty(encoded.nbytes, dtype=torch.uint8)
        gather_write(source, ours, encoded, slab)
        scatter_write(target, Side(tables=there, block_size=layout.block_size), encoded, slab)
    return target, there


def apart(source: KvMemory, target: KvMemory, there: Tables) -> float:
    (sent,) = digest(source, tables(source.layout, 0), SPAN)
    return max(sent.distance(found) for found in digest(target, there, SPAN))


@pytest.mark.parametrize("layout", [LAYOUT, WINDOWED, LATENT])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("ranks", [1, 2, 8])
@pytest.mark.parametrize("block_size", [16, 8])
def test_where_it_lies_makes_no_difference(
    layout: KvLayout, dtype: str, ranks: int, block_size: int
) -> None:
    source = filled(replace(layout, dtype=dtype))
    target, there = travelled(
        source, replace(layout, dtype=dtype, block_size=block_size), ranks=ranks
    )
    assert len(digest(target, there, SPAN)) == target.map.most_copies
    assert apart(source, target, there) < EXACT / 10


@pytest.mark.parametrize("spikes", [0.0, 30.0, 1000.0])
def test_what_is_lost_on_purpose_is_allowed(spikes: float) -> None:
    source = filled(LAYOUT, spikes)
    for codec in (Codec.INT8, Codec.FP8):
        assert EXACT < apart(source, *travelled(source, LAYOUT, codec)) < LOSSY / 2
    converted = travelled(source, replace(LAYOUT, dtype="bfloat16"))
    assert EXACT / 10 < apart(source, *converted) < CONVERTED / 2


def wrong(memory: KvMemory, there: Tables, how: str) -> None:
    """In one block of 16 tokens."""
    keys = memory.planes[0][0]
    here, next_ = (slice(block * 16, block * 16 + 16) for block in there[0][2:4])
    match how:
        case "another block":
            keys[:, here] = keys[:, next_]
        case "never written":
            keys[:, here] = 0
        case "swapped":
            keys[:, here], keys[:, next_] = keys[:, next_].clone(), keys[:, here].clone()
        case "another layer":
            keys[0, here] = keys[1, here]
        case "heads swapped":
            keys[:, here] = keys[:, here].flip(2)
        case "shifted by a token":
            keys[:, here] = keys[:, here].roll(1, dims=1)
        case "wrong scale":
            keys[:, here] *= 4


WRONG = [
    "another block",
    "never written",
    "swapped",
    "another layer",
    "heads swapped",
    "shifted by a token",
    "wrong scale",
]


@pytest.mark.parametrize("how", WRONG)
@pytest.mark.parametrize("codec", [Codec.NONE, Codec.INT8, Codec.FP8])
def test_one_wrong_block_is_found(how: str, codec: Codec) -> None:
    source = filled(LAYOUT)
    target, there = travelled(source, LAYOUT, codec)
    wrong(target, there, how)
    assert apart(source, target, there) > (EXACT if codec is Codec.NONE else LOSSY)


def test_one_changed_bit_is_found_where_nothing_is_lost() -> None:
    source = filled(replace(LAYOUT, dtype="bfloat16"))
    target, there = travelled(source, replace(LAYOUT, dtype="bfloat16"))
    target.planes[0][1][1, there[0][4] * 16 + 5, 2, 7].neg_()
    assert apart(source, target, there) > EXACT


def test_a_wrong_copy_of_a_head_is_found() -> None:
    source = filled(LATENT)
    target, there = travelled(source, LATENT, ranks=2)
    assert apart(source, target, there) < EXACT
    target.parts[1].planes[0][0][0, there[0][0] * 16] += 1
    assert apart(source, target, there) > EXACT


def test_what_the_next_query_does_not_see_is_not_asked_for() -> None:
    memory = filled(WINDOWED)
    full, window = tables(WINDOWED, 0)
    (whole,) = digest(memory, (full, window), SPAN)
    (trimmed,) = digest(memory, (full, (NO_BLOCK,) * 3 + window[3:]), SPAN)
    assert trimmed == whole
    assert [len(plane.norms) for plane in whole.planes] == [7, 7, 3, 3]


def test_what_is_held_already_is_left_out() -> None:
    memory = filled(LAYOUT)
    (rest,) = digest(memory, tables(LAYOUT, 0), prompt_from(32, TOKENS))
    memory.planes[0][0][:, :32] = 0
    assert digest(memory, tables(LAYOUT, 0), prompt_from(32, TOKENS)) == (rest,)
    assert isinstance(rest, KvDigest)
    assert rest.start == 32
