"""Preloaded prompts are kept, as long as what may come still fits beside them."""

from __future__ import annotations

import pytest

from kvpool.core.blocks.holding import Holder
from kvpool.core.blocks.tables import BlockTables, Pins
from kvrelay.types import RequestSpec
from tests.unit.worker_kit import BLOCK, LAYOUT, key, spec

BLOCKS = 6


def computed(tables: BlockTables, request: RequestSpec) -> RequestSpec:
    """It ran and went: its full blocks are cached."""
    holder, tokens = Holder("decode", request.key), len(request.prompt_ids)
    names = tables.chain(request.tenant, tokens)
    names.extend(request.prompt_ids, tokens)
    assert tables.try_open(holder, tokens, now_s=0) == 0
    tables.fill(holder, names.full(tokens))
    tables.release(holder)
    return request


@pytest.mark.parametrize(("longest_blocks", "is_pinned"), [(4, True), (5, False)])
def test_the_longest_sequence_still_fits(longest_blocks: int, is_pinned: bool) -> None:
    tables = BlockTables(LAYOUT, BLOCKS)
    pins = Pins(tables, longest_tokens=longest_blocks * BLOCK)
    request = computed(tables, spec("a", 2 * BLOCK))
    assert pins.try_pin(request, 0) is is_pinned
    assert (request in pins) is is_pinned
    assert tables.try_open(Holder("decode", key("b")), longest_blocks * BLOCK, now_s=0) == 0
    tables.validate()


def test_pins_that_share_blocks_count_them_once() -> None:
    tables = BlockTables(LAYOUT, BLOCKS)
    pins = Pins(tables, longest_tokens=3 * BLOCK)
    for name, blocks in (("a", 2), ("b", 3)):
        assert pins.try_pin(computed(tables, spec(name, blocks * BLOCK)), 0)
    assert tables.free_blocks == 3
    assert not pins.try_pin(spec("c", 4 * BLOCK), 0), "it was never computed"
