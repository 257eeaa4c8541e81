"""Prompts that part from others within a block: what they share is copied, and only that."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from cluster.worker.block_reports import BlockReports
from kvpool.block_names import HashChain
from kvpool.block_news import BlockNews
from kvpool.blocks import BlockState
from kvpool.copies import LEAST_COPIED_TOKENS, CopyPairs
from kvpool.holder import Holder
from kvpool.layout import BlockId, KvLayout, LayerGroup, Plane
from kvpool.tables import BlockTables
from kvrelay.types import RequestKey

SIZE = 4
_PLANES = (Plane(name="k", heads=1, dim=2),)


def _tables(*windows: int | None, blocks: int = 16, caching: bool = True) -> BlockTables:
    groups = tuple(
        LayerGroup(layers=(i,), planes=_PLANES, window=window) for i, window in enumerate(windows)
    )
    layout = KvLayout(groups=groups, dtype="float32", block_size=SIZE)
    return BlockTables(layout, blocks, caching=caching)


def _holder(name: str) -> Holder:
    return Holder("prefill", RequestKey(name, 0))


def _names(tables: BlockTables, prompt: list[int], tenant: str = "") -> HashChain:
    names = tables.chain(tenant, len(prompt))
    names.extend(prompt, len(prompt))
    return names


def _open(
    tables: BlockTables, name: str, prompt: list[int], tenant: str = ""
) -> tuple[int, int, CopyPairs]:
    """Tokens found in whole blocks, tokens copied, and the copies."""
    names, last = _names(tables, prompt, tenant), len(prompt) - 1
    found = tables.try_open(_holder(name), len(prompt), hashes=names.full(last), now_s=0)
    assert found is not None
    return found, *tables.begin_like_another(_holder(name), names, prompt, last)


def _finish(tables: BlockTables, name: str, prompt: list[int], tenant: str = "") -> None:
    """As a prefill worker does with a prompt that is computed."""
    names, holder = _names(tables, prompt, tenant), _holder(name)
    tables.copied(holder)
    tables.fill(holder, names.full(len(prompt)), names=names)
    tables.fill_partly(holder, names, prompt[len(prompt) // SIZE * SIZE :])
    tables.trim(holder, len(prompt))
    tables.validate()


def _serve(tables: BlockTables, name: str, prompt: list[int], tenant: str = "") -> tuple[int, int]:
    found, copied, _ = _open(tables, name, prompt, tenant)
    tables.validate()
    _finish(tables, name, prompt, tenant)
    return found, copied


def test_what_is_shared_of_the_block_in_which_prompts_part_is_copied() -> None:
    tables = _tables(None)
    _serve(tables, "a", list(range(12)))
    found, copied, pairs = _open(tables, "b", [*range(7), 99, 98, 97])
    assert (found, copied) == (4, 3)
    assert pairs == (((tables.tables(_holder("a"))[0][1], tables.tables(_holder("b"))[0][1]),),)


def test_without_a_whole_block_in_common_the_first_one_is_copied() -> None:
    tables = _tables(None)
    _serve(tables, "a", list(range(12)))
    assert _serve(tables, "b", [*range(3), 99, 98]) == (0, 3)


def test_of_a_prompt_that_is_here_whole_only_the_last_token_is_left() -> None:
    tables = _tables(None)
    _serve(tables, "a", list(range(8)))
    assert _serve(tables, "b", list(range(8))) == (4, 3)
    tables.release(_holder("a"))
    tables.release(_holder("b"))
    assert tables.counts()[BlockState.CACHED] == 2, "they are the same blocks"


def test_a_last_block_that_never_was_full_is_found_too() -> None:
    tables, prompt = _tables(None), list(range(11))
    _serve(tables, "a", prompt)
    tables.release(_holder("a"))
    tables.validate()
    assert _serve(tables, "b", prompt) == (8, 2)
    assert _serve(tables, "c", [*prompt, 11, 12, 13]) == (8, 3)


def test_the_one_that_shares_most_is_copied() -> None:
    tables, shared = _tables(None), [0, 1, 2, 3]
    for name, tail in (("a", [4, 9, 9, 9]), ("b", [4, 5, 6, 9]), ("c", [4, 5, 9, 9])):
        _serve(tables, name, [*shared, *tail])
    _, copied, pairs = _open(tables, "d", [*shared, 4, 5, 6, 7, 8])
    assert copied == 3
    assert pairs[0][0][0] == tables.tables(_holder("b"))[0][1]


def test_too_few_are_computed() -> None:
    tables = _tables(None)
    _serve(tables, "a", list(range(8)))
    few = LEAST_COPIED_TOKENS - 1
    assert _open(tables, "b", [*range(4 + few), 99, 98])[1:] == (0, ())
    assert _open(tables, "c", [*range(5 + few), 99, 98])[1] == LEAST_COPIED_TOKENS


def test_equal_tokens_after_another_beginning_are_not_copied() -> None:
    tables = _tables(None)
    _serve(tables, "a", list(range(8)))
    _serve(tables, "b", [9, 9, 9, 9])
    assert _open(tables, "c", [9, 9, 9, 9, 4, 5, 6, 7])[:2] == (4, 0)


def test_tenants_copy_nothing_of_each_other() -> None:
    tables, prompt = _tables(None), list(range(7))
    _serve(tables, "a", prompt, "x")
    assert _serve(tables, "b", prompt, "y") == (0, 0)
    assert _serve(tables, "c", prompt, "x") == (4, 2)


def test_without_caching_nothing_is_copied() -> None:
    tables = _tables(None, caching=False)
    _serve(tables, "a", list(range(7)))
    assert _serve(tables, "b", list(range(7))) == (0, 0)


def test_what_is_copied_from_is_held_until_the_copy_is_made() -> None:
    tables = _tables(None, blocks=4)
    _serve(tables, "a", list(range(8)))
    tables.release(_holder("a"))
    _, copied, pairs = _open(tables, "b", [*range(6), 99])
    ((source, _),) = pairs[0]
    assert copied == 2
    assert tables.free_blocks == 1
    assert tables.try_grow(_holder("c"), SIZE, now_s=0)
    assert not tables.try_grow(_holder("d"), SIZE, now_s=0)
    tables.validate()
    tables.copied(_holder("b"))
    assert tables.try_grow(_holder("d"), SIZE, now_s=0)
    assert tables.tables(_holder("d")) == ((source,),)
    tables.validate()


def test_one_that_goes_before_its_copy_is_made_lets_go_of_what_it_copies() -> None:
    tables = _tables(None, blocks=4)
    _serve(tables, "a", list(range(8)))
    tables.release(_holder("a"))
    assert _open(tables, "b", [*range(6), 99])[1] == 2
    tables.release(_holder("b"))
    tables.validate()
    assert tables.free_blocks == 4


def test_what_has_been_copied_stays_longer() -> None:
    tables = _tables(None, blocks=6)
    for name, tail in (("a", [4, 5, 6, 7]), ("b", [8, 8, 8, 8])):
        _serve(tables, name, [*range(4), *tail])
        tables.release(_holder(name))
    assert _open(tables, "c", [*range(6), 99])[1] == 2
    tables.release(_holder("c"))
    tables.cache.release(0, tables.cache.take(0, 4, leased=False))
    assert _open(tables, "d", [*range(6), 98])[1] == 2, "b's was evicted first"


def test_a_block_without_its_part_in_a_window_group_is_not_copied() -> None:
    tables = _tables(None, 5, blocks=8)
    _serve(tables, "a", list(range(16)))
    tables.release(_holder("a"))
    assert _open(tables, "b", [*range(4), 99, 98])[:2] == (4, 0)
    tables.release(_holder("b"))
    tables.cache.release(1, tables.cache.take(1, 5, leased=False))  # 1 has faded longest
    assert _open(tables, "c", [*range(6), 98])[:2] == (4, 0)


def test_nobody_is_told_of_partial_blocks() -> None:
    tables = _tables(None, blocks=4)
    tables.cache.changes, tables.cache.reports = BlockNews(), True
    _serve(tables, "a", list(range(7)))
    names = tuple(_names(tables, list(range(7))).full(7))
    assert tuple(block.hash for block in tables.cache.take_news()) == names
    (told,) = BlockReports(tables.cache).everything()
    assert told.stored == names
    assert tables.cache.changes.take() == (names, ())
    tables.release(_holder("a"))
    assert tables.try_grow(_holder("b"), 16, now_s=0)
    assert tables.cache.changes.take() == ((), names)


def test_copied_tokens_count_as_found() -> None:
    tables, prompt = _tables(None), list(range(11))
    _serve(tables, "a", prompt)
    assert (tables.queried_tokens, tables.hit_tokens) == (8, 0)
    _serve(tables, "b", prompt)
    assert (tables.queried_tokens, tables.hit_tokens) == (8 + 10, 10)
    _serve(tables, "c", [*range(6), 7, 8, 9])
    assert (tables.queried_tokens, tables.hit_tokens) == (18 + 8, 10 + 6)


def _common(one: list[int], other: list[int]) -> int:
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("windows", [(None,), (None, 6), (5,)])
def test_as_much_is_found_as_any_earlier_prompt_shares(
    windows: tuple[int | None, ...], seed: int
) -> None:
    draw, tables, earlier = random.Random(seed), _tables(*windows, blocks=2000), list[list[int]]()
    for number in range(120):
        prompt = draw.choices(range(2), k=draw.randrange(1, 20))
        most = max((_common(one, prompt[:-1]) for one in earlier), default=0)
        within = most % SIZE
        expected = most if within >= LEAST_COPIED_TOKENS else most - within
        found, copied = _serve(tables, str(number), prompt)
        assert found + copied == expected, (prompt, found, copied)
        earlier.append(prompt)
        if draw.random() < 0.7:
            tables.release(_holder(str(number)))


@dataclass
class _Prompt:
    holder: Holder
    tokens: list[int]
    names: HashChain
    computed: int
    copied: int
    pairs: CopyPairs


@dataclass
class _World:
    """# (group, block) |-> the tokens that its KV stands for. Copies and steps come when they
    come, as do other prompts."""

    tables: BlockTables
    draw: random.Random
    written: dict[tuple[int, BlockId], list[int]] = field(default_factory=dict)
    alive: list[_Prompt] = field(default_factory=list)
    opened: int = 0
    copied: int = 0

    def open(self) -> None:
        tokens = self.draw.choices(range(2), k=self.draw.randrange(2, 30))
        holder, names = _holder(str(self.opened)), _names(self.tables, tokens)
        last = len(tokens) - 1
        found = self.tables.try_open(
            holder, len(tokens), hashes=names.full(last), ahead_tokens=2 * SIZE, now_s=0
        )
        if found is None:
            return
        copied, pairs = self.tables.begin_like_another(holder, names, tokens, last)
        self.opened += 1
        self.copied += copied
        self.alive.append(_Prompt(holder, tokens, names, found, copied, pairs))

    def step(self, prompt: _Prompt) -> None:
        self.copy(prompt)
        start = prompt.computed + prompt.copied
        end = min(len(prompt.tokens), start + self.draw.randrange(1, SIZE))
        if not self.tables.try_grow(prompt.holder, len(prompt.tokens), window_tokens=end, now_s=0):
            self.end(prompt)
            return
        self.check(prompt, start)
        self.write(prompt, start, end)
        self.tables.copied(prompt.holder)
        prompt.computed, prompt.copied = end, 0
        self.tables.fill(prompt.holder, prompt.names.full(end), names=prompt.names)
        if end == len(prompt.tokens):
            self.tables.fill_partly(
                prompt.holder, prompt.names, prompt.tokens[end // SIZE * SIZE :]
            )
        self.tables.trim(prompt.holder, end)

    def copy(self, prompt: _Prompt) -> None:
        for group, pairs in enumerate(prompt.pairs):
            for source, mine in pairs:
                self.written[group, mine] = self.written[group, source]
        prompt.pairs = ()

    def check(self, prompt: _Prompt, start: int) -> None:
        """All that the next query sees is there."""
        for g, group in enumerate(self.tables.layout.groups):
            table = self.tables.tables(prompt.holder)[g]
            for index in range(group.first_block(start, SIZE), -(-start // SIZE)):
                until = min(start, (index + 1) * SIZE)
                assert self.written[g, table[index]][:until] == prompt.tokens[:until], (g, index)

    def write(self, prompt: _Prompt, start: int, end: int) -> None:
        for g, table in enumerate(self.tables.tables(prompt.holder)):
            for at in range(start, end):
                assert not self.tables.pools[g].is_shared(table[at // SIZE])
                self.written[g, table[at // SIZE]] = prompt.tokens[: at + 1]

    def end(self, prompt: _Prompt) -> None:
        self.tables.release(prompt.holder)
        self.alive.remove(prompt)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("windows", [(None,), (None, 6), (5,), (3, None, 17)])
def test_whatever_happens_no_block_is_lost_or_wrong(
    windows: tuple[int | None, ...], seed: int
) -> None:
    draw = random.Random(seed)
    world = _World(_tables(*windows, blocks=20), draw)
    for _ in range(500):
        running = [p for p in world.alive if p.computed < len(p.tokens)]
        if not world.alive or draw.random() < 0.3:
            world.open()
        elif running and draw.random() < 0.8:
            world.step(draw.choice(running))
        else:
            world.end(draw.choice(world.alive))
        world.tables.validate()
    for prompt in list(world.alive):
        world.end(prompt)
    world.tables.validate()
    assert world.copied > 20
    assert world.tables.free_blocks == 20
