"""Blocks that begin alike are found by comparing them all, only faster."""

from __future__ import annotations

import random

import pytest

from kvpool.hashes import BlockHash, token_bytes
from kvpool.siblings import Content, Siblings, common_tokens

ABOVE = [b"salt", b"one block", b"another"]
LARGE = [0, 1, 255, 256, 65_536, 2**32 - 1]


def _common(one: list[int], other: list[int]) -> int:
    """Token by token."""
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


@pytest.mark.parametrize("seed", range(50))
def test_common_tokens_are_counted_from_the_start(seed: int) -> None:
    draw = random.Random(seed)
    one = draw.choices(LARGE, k=draw.randrange(9))
    other = [*one[: draw.randrange(9)], *draw.choices(LARGE, k=draw.randrange(9))]
    assert common_tokens(token_bytes(one), token_bytes(other)) == _common(one, other)


@pytest.mark.parametrize("seed", range(20))
def test_none_shares_more_than_the_first_that_is_found(seed: int) -> None:
    draw = random.Random(seed)
    siblings, here = Siblings(), dict[BlockHash, tuple[bytes, list[int]]]()
    for number in range(600):
        if here and draw.random() < 0.3:
            gone = draw.choice([*here])
            del here[gone]
            siblings.discard(gone)
        else:
            tokens = draw.choices(LARGE[: draw.randrange(2, 7)], k=draw.randrange(1, 8))
            above, name = draw.choice(ABOVE), BlockHash(number.to_bytes(32))
            here[name] = above, tokens
            siblings.add(name, Content(above, token_bytes(tokens)))
        above, wanted = draw.choice(ABOVE), draw.choices(LARGE, k=draw.randrange(1, 8))
        shared = {n: _common(wanted, tokens) for n, (a, tokens) in here.items() if a == above}
        found = siblings.nearest(Content(above, token_bytes(wanted)))
        assert all(shared[name] == tokens for tokens, name in found)
        assert [tokens for tokens, _ in found] == sorted(shared.values(), reverse=True)[:8]
        siblings.validate(set(here))


def test_few_are_found_however_many_there_are() -> None:
    siblings = Siblings()
    for number in range(5000):
        siblings.add(BlockHash(number.to_bytes(32)), Content(b"", token_bytes([7, number])))
    found = siblings.nearest(Content(b"", token_bytes([7, 2500, 1])))
    assert found[0] == (2, BlockHash((2500).to_bytes(32)))
    assert len(found) == 8


def test_what_is_added_twice_is_gone_when_discarded_once() -> None:
    siblings, name = Siblings(), BlockHash(bytes(32))
    for _ in range(2):
        siblings.add(name, Content(b"", token_bytes([1, 2])))
    siblings.discard(name)
    siblings.discard(name)
    assert name not in siblings
    assert siblings.nearest(Content(b"", token_bytes([1, 2]))) == []
    siblings.validate(set())
