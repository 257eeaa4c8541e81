"""How many KV blocks fit, as arithmetic."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.core.sizing import EngineLimits, MemoryProfile, kv_budget_bytes, size_kv
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


def test_never_more_than_the_requests_can_need() -> None:
    sizing = size_kv(LAYOUT, replace(LIMITS, max_running_requests=3), PROFILE, max_model_len=100)
    assert sizing.blocks == 3 * 7
    assert "all that 3 requests can need" in sizing.reason


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
