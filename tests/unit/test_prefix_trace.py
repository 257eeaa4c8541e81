"""The tree of runs on a recorded hour of conversations gives the hit rates known for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.kvpool.prefix_cache import CONVERSATION, Trace, replay

_TRACE = Path(__file__).parents[3] / "shared/data/mooncake/conversation_trace.jsonl"


@pytest.fixture(scope="module")
def trace() -> Trace:
    if not _TRACE.exists():
        pytest.skip("no conversation trace at ../shared/data/mooncake beside the repository")
    return Trace.read(_TRACE)


def test_an_infinite_cache_finds_what_is_published(trace: Trace) -> None:
    assert trace.reference is CONVERSATION
    assert round(replay(trace, "lru", trace.blocks).hit_percent, 2) == 36.64


@pytest.mark.parametrize("size_blocks", [1_000, 10_000])
def test_lru_finds_what_a_plain_lru_finds(trace: Trace, size_blocks: int) -> None:
    found = replay(trace, "lru", size_blocks).hit_percent
    assert found == pytest.approx(CONVERSATION.lru_percent[size_blocks], abs=1.0)
