"""Names of blocks: equal exactly when the tokens so far and the salt are equal."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool.core.layout.block_names import HashChain
from kvpool.core.layout.hashes import (
    BlockHash,
    BlockHashes,
    CacheSalt,
    block_hashes,
    cache_salt,
)


def _salt(**other: str) -> CacheSalt:
    return cache_salt(**{"fingerprint": "f", "physical_format": "p", "tenant": "t", **other})


def _chain(token_ids: list[int], block_size: int = 2, salt: CacheSalt | None = None) -> list[bytes]:
    return [*block_hashes(token_ids, block_size=block_size, salt=salt or _salt())]


def test_the_hash_of_a_block_never_changes() -> None:
    """Blocks on disk are found again by later versions."""
    first, second = block_hashes([1, 2, 3, 4_000_000_000], block_size=2, salt=_salt())
    assert first.hex() == "285398a36d799b30212aced23a525edcf56050cccc50cfee8feedf5aad8aaf63"
    assert second.hex() == "8fd5e6ac649f4ce8615fde4e152d175ed70347986e7fca12453d8ad3179172f0"


def test_every_part_of_the_salt_separates() -> None:
    salts = {_salt(), _salt(fingerprint="g"), _salt(physical_format="q"), _salt(tenant="u")}
    assert len({block_hashes([1], block_size=1, salt=salt) for salt in salts}) == 4


def test_parts_of_the_salt_never_run_together() -> None:
    assert _salt(fingerprint="ab", physical_format="c") != _salt(
        fingerprint="a", physical_format="bc"
    )
    assert _salt(physical_format="", tenant="pt") != _salt(physical_format="pt", tenant="")


def test_only_full_blocks_are_named() -> None:
    assert len(_chain([1, 2, 3])) == 1
    assert _chain([1]) == []


def test_ids_that_are_no_tokens_are_refused() -> None:
    for token in (-1, 2**32):
        with pytest.raises(OverflowError):
            block_hashes([token], block_size=1, salt=_salt())


_tokens = st.lists(st.integers(0, 1), max_size=12)


@given(_tokens, _tokens)
def test_chains_agree_as_far_as_the_tokens_do(ours: list[int], theirs: list[int]) -> None:
    for index, pair in enumerate(zip(_chain(ours), _chain(theirs), strict=False)):
        end = 2 * (index + 1)
        assert (pair[0] == pair[1]) == (ours[:end] == theirs[:end])


@given(_tokens, st.integers(1, 4), st.lists(st.integers(0, 12)), st.booleans(), st.data())
def test_a_growing_chain_is_the_chain_of_the_whole(
    tokens: list[int], block_size: int, cuts: list[int], as_prompt: bool, data: st.DataObject
) -> None:
    """Whatever is asked for in between, and in whatever order."""
    whole = BlockHashes.of(map(BlockHash, _chain(tokens, block_size)))
    chain = HashChain(salt=_salt(), block_size=block_size)
    ids = tuple(tokens) if as_prompt else tokens
    for cut in (*sorted(cuts), len(tokens)):
        chain.extend(ids, min(cut, len(tokens)))
        named = chain.full(cut)
        if depths := range(len(named)):
            depth = data.draw(st.sampled_from(depths))
            assert named.at(depth) == whole[depth]
            assert named.packed_from(depth) == whole[depth : len(named)].packed
    assert chain.copy().full(len(tokens)).hashes() == whole


@given(st.lists(st.integers(0, 200), min_size=60, max_size=200))
def test_few_states_are_kept(depths: list[int]) -> None:
    chain = HashChain(salt=_salt(), block_size=1)
    chain.extend(tuple(range(201)), 201)
    whole = block_hashes(range(201), block_size=1, salt=_salt())
    for depth in depths:
        assert chain.at(depth) == whole.at(depth)
    assert len(chain._states) == len(chain._depths) <= 64


def test_packed_hashes_are_a_sequence() -> None:
    one, other = _chain([1, 2, 3, 4])
    packed = BlockHashes.of([BlockHash(one), BlockHash(other)])
    assert [*packed] == [one, other] == [packed[0], packed[-1]]
    assert packed[1:] == BlockHashes(other) and packed[5:2] == BlockHashes()
    assert one in packed and len(packed) == 2
    with pytest.raises(IndexError):
        packed[2]
