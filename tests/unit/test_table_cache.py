"""Blocks that are found again: always with the right KV in them, never written, never lost."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from kvpool.core.blocks.holding import Holder
from kvpool.core.blocks.pool import BlockState
from kvpool.core.blocks.tables import BlockTables
from kvpool.core.layout.block_names import BlockNames, HashChain
from kvpool.core.layout.layout import NO_BLOCK, BlockId, KvLayout, LayerGroup, Plane
from kvrelay.types import RequestKey

SIZE = 4
_PLANES = (Plane(name="k", heads=1, dim=2),)


def _layout(*windows: int | None) -> KvLayout:
    groups = tuple(
        LayerGroup(layers=(i,), planes=_PLANES, window=window) for i, window in enumerate(windows)
    )
    return KvLayout(groups=groups, dtype="float32", block_size=SIZE)


def _holder(name: str, choice: int = 0) -> Holder:
    return Holder("decode", RequestKey(name, 0), choice)


def _names(tables: BlockTables, tokens: list[int], tenant: str = "") -> HashChain:
    names = tables.chain(tenant, len(tokens))
    names.extend(tokens, len(tokens))
    return names


def _serve(tables: BlockTables, name: str, tokens: list[int], tenant: str = "") -> int:
    """Opened, computed and named; how many tokens were there already."""
    names = _names(tables, tokens, tenant)
    found = tables.try_open(_holder(name), len(tokens), hashes=names.full(len(tokens)), now_s=0)
    assert found is not None
    tables.fill(_holder(name), names.full(len(tokens)))
    tables.trim(_holder(name), len(tokens))
    tables.validate()
    return found


def test_a_prefix_is_found_while_it_is_held_and_after() -> None:
    tables, prompt = BlockTables(_layout(None), 8), list(range(10))
    assert _serve(tables, "a", prompt) == 0
    assert _serve(tables, "b", [*prompt[:8], 99]) == 8
    shared = tables.tables(_holder("a"))[0][:2]
    assert tables.tables(_holder("b"))[0][:2] == shared
    tables.release(_holder("a"))
    tables.release(_holder("b"))
    assert tables.counts()[BlockState.CACHED] == 2
    assert tables.free_blocks == 8
    assert _serve(tables, "c", prompt) == 8
    assert tables.tables(_holder("c"))[0][:2] == shared
    assert (tables.queried_tokens, tables.hit_tokens) == (8 + 8 + 8, 16)


def test_tenants_share_nothing() -> None:
    tables = BlockTables(_layout(None), 8)
    _serve(tables, "a", list(range(8)), tenant="x")
    assert _serve(tables, "b", list(range(8)), tenant="y") == 0
    assert _serve(tables, "c", list(range(8)), tenant="x") == 8


def test_without_caching_nothing_is_found_or_kept() -> None:
    tables = BlockTables(_layout(None), 8, caching=False)
    _serve(tables, "a", list(range(8)))
    assert _serve(tables, "b", list(range(8))) == 0
    tables.release(_holder("a"))
    assert tables.counts()[BlockState.CACHED] == 0


def test_cached_blocks_make_room_leaves_first() -> None:
    tables = BlockTables(_layout(None), 4)
    _serve(tables, "a", list(range(12)))
    tables.release(_holder("a"))
    assert tables.try_grow(_holder("b"), 8, now_s=0)
    tables.release(_holder("b"))
    assert _serve(tables, "c", list(range(12))) == 8


def test_what_is_held_is_never_evicted() -> None:
    tables = BlockTables(_layout(None), 4)
    _serve(tables, "a", list(range(12)))
    assert not tables.try_grow(_holder("b"), 8, now_s=0)
    names = _names(tables, [*range(12), 1, 2, 3, 4, 5])
    assert tables.try_open(_holder("b"), 17, hashes=names.full(16), now_s=0) is None
    assert _holder("b") not in tables
    tables.validate()


def test_two_that_computed_the_same_keep_their_own_blocks_and_go_on_as_one_chain() -> None:
    tables, prompt = BlockTables(_layout(None), 8), list(range(8))
    for name in "ab":
        assert tables.try_open(_holder(name), 12, now_s=0) == 0
    for name in "ab":
        tables.fill(_holder(name), _names(tables, prompt).full(8))
        tables.validate()
    mine, others = tables.tables(_holder("b"))[0], tables.tables(_holder("a"))[0]
    assert not set(mine) & set(others)
    longer = [*prompt, 7, 7, 7, 7]
    tables.fill(_holder("b"), _names(tables, longer).full(12))
    tables.release(_holder("a"))
    tables.validate()
    tables.release(_holder("b"))
    tables.validate()
    assert _serve(tables, "c", longer) == 12
    assert tables.tables(_holder("c"))[0] == (*others[:2], mine[2])


def test_a_window_holds_only_what_it_shows() -> None:
    tables = BlockTables(_layout(None, 5), 16)
    _serve(tables, "a", list(range(24)))
    full, windowed = tables.tables(_holder("a"))
    assert NO_BLOCK not in full
    assert [block == NO_BLOCK for block in windowed] == [True] * 5 + [False]  # 20..24 is seen
    assert tables.device.counts(1)[BlockState.ACTIVE] == 1
    assert tables.device.counts(1)[BlockState.CACHED] == 5


def test_a_hit_needs_what_its_window_shows() -> None:
    """Blocks 0 and 1 of the window group give way; a prefix that ends behind block 2 still has
    all it needs, one that ends behind block 1 does not."""
    tables, tokens = BlockTables(_layout(None, 5), 12), list(range(16))
    _serve(tables, "a", tokens)
    tables.release(_holder("a"))
    tables.device.release(1, tables.device.take(1, 10, leased=False))
    assert _serve(tables, "b", [*tokens[:8], 99]) == 0
    assert _serve(tables, "c", [*tokens[:12], 99]) == 12
    assert _serve(tables, "d", [*tokens[:8], 98]) == 8, "b has brought back what was lost"


def test_a_decode_worker_takes_only_the_last_window_of_what_is_to_come() -> None:
    tables = BlockTables(_layout(None, 5), 16)
    assert tables.try_open(_holder("a"), 21, seen_from=20, leased=True, now_s=0) == 0
    full, windowed = tables.tables(_holder("a"))
    assert len(full) == len(windowed) == 6
    assert [block == NO_BLOCK for block in windowed] == [True] * 4 + [False] * 2  # 16..
    tables.activate(_holder("a"))
    tables.fill(_holder("a"), _names(tables, list(range(20))).full(20))
    tables.validate()
    tables.release(_holder("a"))
    assert _serve(tables, "b", [*range(20), 99]) == 20
    assert _serve(tables, "c", [*range(12), 99]) == 0  # its window was never here


def test_names_stop_at_the_border_where_positions_change() -> None:
    names = BlockNames(rope_border_tokens=8)
    short, long = names.chain("", 6, SIZE), names.chain("", 9, SIZE)
    for chain in (short, long):
        chain.extend(list(range(16)), 16)
    assert len(short.full(16)) == 2
    assert len(long.full(16)) == 4
    assert short.full(4).hashes() != long.full(4).hashes()


@dataclass
class _Sequence:
    holder: Holder
    tokens: list[int]
    computed: int
    names: HashChain


@dataclass
class _World:
    """# (group, block) |-> the tokens that its KV stands for, as far as they were written"""

    tables: BlockTables
    draw: random.Random
    written: dict[tuple[int, BlockId], list[int]] = field(default_factory=dict)
    alive: list[_Sequence] = field(default_factory=list)
    opened: int = 0
    found: int = 0

    def open(self) -> None:
        tokens = [self.draw.randrange(2) for _ in range(self.draw.randrange(1, 40))]
        holder, names = _holder(f"s{self.opened}"), _names(self.tables, tokens)
        found = self.tables.try_open(
            holder, len(tokens) + 1, hashes=names.full(len(tokens) - 1), ahead_tokens=8, now_s=0
        )
        if found is None:
            return
        self.opened += 1
        self.found += found
        self.alive.append(_Sequence(holder, tokens, found, names))

    def compute(self, sequence: _Sequence) -> None:
        end = min(len(sequence.tokens), sequence.computed + self.draw.randrange(1, 9))
        if end == sequence.computed:
            sequence.tokens.append(self.draw.randrange(2))
            end += 1
        if not self.tables.try_grow(sequence.holder, end, now_s=0):
            self.end(sequence)
            return
        if self.tables.try_own(sequence.holder, sequence.computed) is None:
            self.end(sequence)
            return
        self.check(sequence)
        self.write(sequence, end)
        sequence.names.extend(sequence.tokens, end)
        self.tables.fill(sequence.holder, sequence.names.full(end))
        self.tables.trim(sequence.holder, end)

    def check(self, sequence: _Sequence) -> None:
        """All that the next query sees is there."""
        for g, group in enumerate(self.tables.layout.groups):
            table = self.tables.tables(sequence.holder)[g]
            first = group.first_block(sequence.computed, SIZE)
            for index in range(first, sequence.computed // SIZE):
                expected = sequence.tokens[: (index + 1) * SIZE]
                assert self.written[g, table[index]] == expected, (g, index)

    def write(self, sequence: _Sequence, end: int) -> None:
        for g, table in enumerate(self.tables.tables(sequence.holder)):
            for at in range(sequence.computed, end):
                assert not self.tables.device.pools[g].is_shared(table[at // SIZE])
                self.written[g, table[at // SIZE]] = sequence.tokens[: at + 1]
        sequence.computed = end

    def fork(self, sequence: _Sequence) -> None:
        target = Holder("decode", sequence.holder.key, self.opened)
        self.opened += 1
        partial = sequence.computed % SIZE  # its copy would be the engine's work
        if partial or sequence.computed < len(sequence.tokens):
            return
        self.tables.fork(sequence.holder, target, now_s=0)
        twin = _Sequence(target, list(sequence.tokens), sequence.computed, sequence.names.copy())
        self.alive.append(twin)

    def end(self, sequence: _Sequence) -> None:
        self.tables.release(sequence.holder)
        self.alive.remove(sequence)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("windows", [(None,), (None, 6), (5,), (3, None, 17)])
def test_whatever_happens_no_block_is_lost_or_wrong(
    windows: tuple[int | None, ...], seed: int
) -> None:
    draw = random.Random(seed)
    world = _World(BlockTables(_layout(*windows), 24), draw)
    for _ in range(400):
        if not world.alive or draw.random() < 0.15:
            world.open()
            continue
        sequence = draw.choice(world.alive)
        move = draw.choices([world.compute, world.fork, world.end], [12, 1, 1])[0]
        move(sequence)
        world.tables.validate()
    for sequence in list(world.alive):
        world.end(sequence)
    world.tables.validate()
    assert world.found > 0
    assert world.tables.free_blocks == 24
    assert world.tables.device.tree.blocks <= 24
