"""How many KV blocks fit, as arithmetic."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from engine.core.sizing import (
    EngineLimits,
    KvSizing,
    MemoryProfile,
    kv_budget_bytes,
    of_one_host,
    size_kv,
    size_ranks,
)
from engine.load import Assembly
from engine.parallel.grid import Grid
from engine.parallel.opening import OwnRank
from kvpool.core.layout.layout import KvLayout, LayerGroup, Plane
from kvrelay.errors import ModelError

PLANES = (Plane(name="k", heads=2, dim=64), Plane(name="v", heads=2, dim=64))
LAYOUT = KvLayout(
    groups=(LayerGroup(layers=(0, 1), planes=PLANES),), dtype="bfloat16", block_size=16
)  # 1 KiB per token, 16 KiB per block
LIMITS = EngineLimits(max_model_len=None, prefill_chunk_tokens=512, max_running_requests=1000)
PROFILE = MemoryProfile(total_bytes=100 << 20, weight_bytes=20 << 20, activation_bytes=10 << 20)


def test_the_budget_is_what_is_left_of_the_fraction() -> None:
    assert kv_budget_bytes(PROFILE, LIMITS) == (90 - 20 - 10) << 20
    staged = replace(PROFILE, staging_bytes=5 << 20)
    assert kv_budget_bytes(staged, LIMITS) == (90 - 20 - 10 - 5) << 20
    assert kv_budget_bytes(PROFILE, replace(LIMITS, share=2)) == (45 - 20 - 10) << 20
    assert kv_budget_bytes(PROFILE, replace(LIMITS, share=4)) == 0
    assert kv_budget_bytes(PROFILE, replace(LIMITS, kv_memory_bytes=7)) == 7


def test_memory_is_filled() -> None:
    sizing = size_kv(LAYOUT, LIMITS, PROFILE, max_model_len=8192)
    assert sizing.blocks == 60 * 64
    assert sizing.tokens == sizing.blocks * 16
    assert sizing.kv_bytes == 60 << 20
    assert sizing.max_model_len == 8192
    assert "61440 tokens of KV fit" in sizing.reason
    assert "0.9 x 100 MiB - weights 20 MiB - activations 10 MiB - staging 0 B" in sizing.reason
    assert {name: nbytes >> 20 for name, nbytes in sizing.account.items()} == {
        "weights": 20,
        "activations": 10,
        "staging": 0,
        "KV": 60,
    }


def test_never_more_than_the_requests_can_need() -> None:
    sizing = size_kv(LAYOUT, replace(LIMITS, max_running_requests=3), PROFILE, max_model_len=100)
    assert sizing.blocks == 3 * 7
    assert "all that 3 requests can need" in sizing.reason
    assert sizing.account["KV"] == sizing.kv_bytes == 3 * 7 * LAYOUT.bytes_per_block


def test_a_long_context_is_lowered_to_what_fits() -> None:
    sizing = size_kv(LAYOUT, LIMITS, PROFILE, max_model_len=131_072)
    assert sizing.max_model_len == sizing.tokens == 61_440
    assert "max_model_len is lowered from 131072 to 61440" in sizing.reason


def test_nothing_useful_fits() -> None:
    tight = replace(LIMITS, kv_memory_bytes=63 << 10)
    with pytest.raises(ModelError, match="only 48 tokens of KV fit: kv_memory_bytes is 63 KiB"):
        size_kv(LAYOUT, tight, PROFILE, max_model_len=8192)
    assert size_kv(LAYOUT, tight, PROFILE, max_model_len=40).blocks == 3


def test_a_configured_count_is_kept() -> None:
    sizing = size_kv(LAYOUT, LIMITS, PROFILE, max_model_len=8192, blocks=10)
    assert (sizing.blocks, sizing.max_model_len) == (10, 160)


# --- several ranks ------------------------------------------------------------------------------

LARGER = replace(PROFILE, weight_bytes=50 << 20)
SMALLER = replace(PROFILE, total_bytes=40 << 20)
FULLER = replace(PROFILE, free_bytes=20 << 20)


def sized_on_gpus(*profiles: MemoryProfile, limits: EngineLimits = LIMITS) -> KvSizing:
    return size_ranks(LAYOUT, limits, profiles, max_model_len=8192, block_bytes=[8 << 10] * 2)


@pytest.mark.parametrize(
    ("other", "mebibytes"), [(PROFILE, 60), (LARGER, 30), (SMALLER, 6), (FULLER, 10)]
)
@pytest.mark.parametrize("place", [0, 1, 2])
def test_gpus_get_as_many_blocks_as_the_fullest_has_room_for(
    other: MemoryProfile, mebibytes: int, place: int
) -> None:
    """Each holds a third of a block's 24 KiB."""
    profiles = [PROFILE] * 3
    profiles[place] = other
    sizing = size_ranks(LAYOUT, LIMITS, profiles, max_model_len=8192, block_bytes=[8 << 10] * 3)
    assert sizing.blocks == (mebibytes << 20) // (8 << 10)
    assert sizing.kv_bytes == 3 * mebibytes << 20
    assert sizing.account["weights"] == 2 * PROFILE.weight_bytes + other.weight_bytes
    assert sizing.account["KV"] == sizing.kv_bytes
    named = 0 if other is PROFILE else place
    assert sizing.reason.startswith(f"rank {named} of 3, with 0.333 of the KV: ")


def test_a_stage_with_more_layers_has_more_of_each_block() -> None:
    """Two of three layers: as much room on both GPUs is full there first."""
    limits = replace(LIMITS, kv_memory_bytes=24 << 20)
    for given, blocks in ((LIMITS, (60 << 20) // (16 << 10)), (limits, 1024)):
        sizing = size_ranks(
            *(LAYOUT, given, [PROFILE, PROFILE]),
            max_model_len=8192,
            block_bytes=[8 << 10, 16 << 10],
        )
        assert sizing.blocks == blocks
        assert sizing.kv_bytes == blocks * (24 << 10)
    with pytest.raises(ModelError, match=r"^rank 1 of 2, with 0\.667 of the KV: "):
        size_ranks(
            *(LAYOUT, LIMITS, [PROFILE, replace(PROFILE, weight_bytes=99 << 20)]),
            max_model_len=8192,
            block_bytes=[8 << 10, 16 << 10],
        )


def test_a_rank_lowers_the_longest_sequence_of_all() -> None:
    longest = SMALLER.total_bytes - PROFILE.weight_bytes
    sizing = size_ranks(
        LAYOUT, LIMITS, [PROFILE, SMALLER], max_model_len=longest, block_bytes=[8 << 10] * 2
    )
    assert sizing.max_model_len == sizing.tokens == (6 << 20) // 512


def test_the_rank_without_room_is_named() -> None:
    full = replace(PROFILE, weight_bytes=80 << 20)
    with pytest.raises(ModelError, match=r"^rank 1 of 2, .*: only 0 tokens .* weights 80 MiB"):
        sized_on_gpus(PROFILE, full)


def test_a_configured_size_is_of_all_ranks() -> None:
    configured = replace(LIMITS, kv_memory_bytes=40 << 20)
    sizing = sized_on_gpus(PROFILE, PROFILE, limits=configured)
    assert sizing.kv_bytes == 40 << 20
    short = replace(PROFILE, free_bytes=29 << 20)  # 10 for a step's activations
    with pytest.raises(ModelError, match=r"^rank 1 of 2, .*takes 20 MiB and .* has 19 MiB left"):
        sized_on_gpus(PROFILE, short, limits=configured)


def test_ranks_of_one_host_take_what_each_has_measured() -> None:
    """Slabs are rank 0's, and the host's memory is there once."""
    first = replace(PROFILE, staging_bytes=5 << 20)
    assert of_one_host([first]) == first
    assert of_one_host([first, LARGER, SMALLER]) == MemoryProfile(
        total_bytes=(100 + 50 + 20) << 20,
        weight_bytes=(20 + 50 + 20) << 20,
        activation_bytes=30 << 20,
        staging_bytes=5 << 20,
    )


@pytest.mark.parametrize(("device", "mebibytes"), [("cpu", 135 - 70 - 20), ("cuda", 2 * 30)])
def test_an_engine_hears_all_its_ranks(device: str, mebibytes: int) -> None:
    own = OwnRank(rank=0, grid=Grid(tensor=2), group=None, line=None)
    assembly = SimpleNamespace(
        ranks=SimpleNamespace(own=own, profiles=lambda profile: (profile, LARGER)),
        model=SimpleNamespace(device=torch.device(device)),
        facts=SimpleNamespace(max_model_len=8192),
        layout=LAYOUT,
        limits=LIMITS,
        _profile=lambda: PROFILE,
        _is_first=True,
    )
    assert Assembly.sizing(cast(Assembly, assembly), None).kv_bytes == mebibytes << 20
