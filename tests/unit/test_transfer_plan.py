"""Plans between random shards: every target slot once, from the right place, and no other."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpool.core.layout.codec import Codec, WireFormat
from kvpool.core.layout.layout import KvLayout, LayerGroup, Plane
from kvpool.core.layout.shards import GroupSlice, PlaneSlice, Shard, ShardLayout, reslice
from kvpool.core.transfer.plan import WRITE_TOKENS, cut
from kvpool.core.transfer.write import SlabSection, SlabWrite, TokenSpan
from kvrelay.errors import ConfigError
from tests.unit.transfer_kit import Case, carry_out, cases, holds, new_trial, stage_layers


@settings(max_examples=150)
@given(cases())
def test_every_target_slot_is_written_once_from_the_right_place(case: Case) -> None:
    trial = new_trial(case)
    for move in trial.moves:
        carry_out(move.transfer, move.pool, trial.target, move.layout.model.dtype)
    for planes, wanted in zip(trial.target, trial.expected, strict=True):
        for ours, theirs in zip(planes, wanted, strict=True):
            assert np.array_equal(ours, theirs)
    assert sum(move.transfer.nbytes for move in trial.moves) == trial.needed_bytes


_CODECS = st.sampled_from(list(Codec))
_STAGING_FOR_ANY_CODEC = 512
"""One token of one layer of any case, values, scales and padding."""


def _cut(case: Case, source: ShardLayout, codec: Codec) -> tuple[SlabWrite, ...]:
    staging_bytes = max(case.staging_bytes, _STAGING_FOR_ANY_CODEC)
    return cut(
        source,
        case.target,
        span=case.span,
        staging_bytes=staging_bytes,
        layer_groups=case.layer_groups,
        codec=codec,
    )


def _model_layers(section: SlabSection, source: ShardLayout) -> list[int]:
    held = stage_layers(source.shard, source.model.groups[section.part.group])
    return held[section.part.source_layer :][: section.part.layers]


@settings(max_examples=300)
@given(cases(), _CODECS)
def test_writes_are_few_large_and_fit_into_staging(case: Case, codec: Codec) -> None:
    staging_bytes = max(case.staging_bytes, _STAGING_FOR_ANY_CODEC)
    for source in case.sources:
        writes = _cut(case, source, codec)
        assert all(0 < write.nbytes <= staging_bytes for write in writes)
        runs = _layer_run_of_each(writes, source, case.layer_groups)
        for (before, run), (after, next_run) in pairwise(zip(writes, runs, strict=True)):
            if run == next_run:
                assert before.nbytes + after.sections[0].nbytes > staging_bytes
        for write in writes:
            for section in write.sections:
                _check_size(section, case, write.wire, staging_bytes)


def _layer_run_of_each(writes: Sequence[SlabWrite], source: ShardLayout, count: int) -> list[int]:
    """Which run of consecutive layers each write belongs to; fails if it has layers of two."""
    layers = [{x for s in w.sections for x in _model_layers(s, source)} for w in writes]
    runs = _even_runs(sorted(set().union(*layers)), count)
    held_by = [[i for i, run in enumerate(runs) if run & some] for some in layers]
    assert all(len(found) == 1 for found in held_by)
    assert [write.last_layer for write in writes] == [max(some) for some in layers]
    return [found[0] for found in held_by]


def _check_size(section: SlabSection, case: Case, wire: WireFormat, staging_bytes: int) -> None:
    seen = case.span.seen(case.target.model.groups[section.part.group].window)
    planes = [(plane.heads, plane.dim) for plane in section.part.planes]
    assert section.nbytes == wire.encoded_bytes(section.part.layers, section.tokens, planes)
    if staging_bytes >= 2 * wire.encoded_bytes(1, WRITE_TOKENS, planes):
        assert section.tokens >= min(WRITE_TOKENS, len(seen))
    else:
        assert section.part.layers == 1 or section.tokens >= min(WRITE_TOKENS, len(seen))


@settings(max_examples=200)
@given(cases(), _CODECS)
def test_first_layers_leave_first_in_the_runs_asked_for(case: Case, codec: Codec) -> None:
    for source in case.sources:
        writes = _cut(case, source, codec)
        runs = _layer_run_of_each(writes, source, case.layer_groups)
        assert runs == sorted(runs)


def _even_runs(layers: list[int], count: int) -> list[set[int]]:
    """Consecutive ones, their numbers within one of each other, the longer ones last."""
    pieces = np.array_split(np.array(layers[::-1], dtype=int), count)[::-1]
    return [set(piece.tolist()) for piece in pieces if len(piece)]


@given(cases())
def test_a_rank_allocates_the_heads_and_layers_it_holds(case: Case) -> None:
    for layout in (*case.sources, case.target):
        assert layout.local.block_size == layout.model.block_size
        for group, local in zip(layout.model.groups, layout.local.groups, strict=True):
            assert list(local.layers) == stage_layers(layout.shard, group)
            for plane, own in zip(group.planes, local.planes, strict=True):
                assert own.heads == len(holds(layout.shard, plane))


_LLAMA = LayerGroup(
    layers=tuple(range(32)),
    planes=(Plane(name="k", heads=8, dim=128), Plane(name="v", heads=8, dim=128)),
)


def _shard(
    group: LayerGroup, rank: int = 0, size: int = 1, layers: range | None = None
) -> ShardLayout:
    model = KvLayout(groups=(group,), dtype="bfloat16", block_size=16)
    return ShardLayout(model=model, shard=Shard(rank=rank, size=size, layers=layers))


def test_what_fits_is_one_write_of_all_layers() -> None:
    one = _shard(_LLAMA)
    span = TokenSpan(start=0, tokens=7500, next_position=7500)
    (write,) = cut(one, one, span=span, staging_bytes=1 << 30)
    assert write.nbytes == 7500 * 131_072
    assert [(s.part.layers, s.tokens) for s in write.sections] == [(32, 7500)]


def test_small_staging_cuts_by_tokens_then_by_layers_and_keeps_128_tokens() -> None:
    one = _shard(_LLAMA)
    span = TokenSpan(start=0, tokens=320, next_position=320)
    by_tokens = cut(one, one, span=span, staging_bytes=160 * 131_072)
    assert [w.sections[0].tokens for w in by_tokens] == [160, 160]
    by_layers = cut(one, one, span=span, staging_bytes=80 * 131_072)
    assert [(w.sections[0].part.layers, w.sections[0].tokens) for w in by_layers] == [(16, 160)] * 4
    assert [w.sections[0].part.source_layer for w in by_layers] == [0, 0, 16, 16]


@pytest.mark.parametrize(("start", "tokens"), [(0, 7500), (0, 512), (9, 400), (3, 300), (16, 1030)])
def test_sections_are_cut_between_blocks(start: int, tokens: int) -> None:
    one = _shard(_LLAMA)
    span = TokenSpan(start=start, tokens=tokens, next_position=start + tokens)
    sections = [s for w in cut(one, one, span=span, staging_bytes=8 << 20) for s in w.sections]
    assert all(s.start == start or s.start % 16 == 0 for s in sections)
    assert all(s.tokens >= WRITE_TOKENS for s in sections)
    assert len(sections) > 2


def test_replicas_share_the_sending_and_none_sends_twice() -> None:
    """Two heads on four source ranks, sent to eight and to one; a latent head on all four."""
    two = LayerGroup(layers=(0,), planes=(Plane(name="k", heads=2, dim=1),))
    latent = LayerGroup(layers=(0,), planes=(Plane(name="latent", heads=1, dim=576),))

    def senders(group: LayerGroup, target: ShardLayout) -> list[int]:
        return [r for r in range(4) if reslice(_shard(group, r, 4), target)]

    assert [senders(two, _shard(two, r, 8)) for r in range(8)] == [
        [0], [0], [1], [1], [2], [2], [3], [3],
    ]  # fmt: skip
    assert senders(two, _shard(two)) == [0, 2]
    assert senders(latent, _shard(latent)) == [0]
    assert [senders(latent, _shard(latent, r, 4)) for r in range(4)] == [[0], [1], [2], [3]]


def test_a_stage_sends_the_layers_and_heads_that_the_other_side_runs() -> None:
    source = _shard(_LLAMA, rank=1, size=2, layers=range(16, 32))
    target = _shard(_LLAMA, rank=3, size=4, layers=range(8, 24))
    planes = tuple(
        PlaneSlice(plane=p, source_head=2, target_head=0, heads=2, dim=128) for p in range(2)
    )
    assert reslice(source, target) == (
        GroupSlice(group=0, source_layer=0, target_layer=8, layers=8, planes=planes),
    )


def test_what_cannot_be_done_says_what_to_change() -> None:
    with pytest.raises(ConfigError, match="degree 3 can't split 8 KV heads"):
        reslice(_shard(_LLAMA), _shard(_LLAMA, size=3))
    one, span = _shard(_LLAMA), TokenSpan(start=0, tokens=5, next_position=5)
    with pytest.raises(ConfigError, match=r"staging_bytes 4095 .* at least 4096"):
        cut(one, one, span=span, staging_bytes=4095)
