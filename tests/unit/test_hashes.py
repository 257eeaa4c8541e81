"""Chained block hashes: equal exactly when the tokens so far and the salt are equal."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool.core.layout.hashes import (
    BlockHash,
    BlockHashes,
    CacheSalt,
    block_hashes,
    cache_salt,
    extend_chain,
    token_bytes,
)


def _salt(**other: str) -> CacheSalt:
    return cache_salt(**{"fingerprint": "f", "physical_format": "p", "tenant": "t", **other})


def _chain(token_ids: list[int], block_size: int = 2, salt: CacheSalt | None = None) -> list[bytes]:
    chain = bytearray()
    extend_chain(chain, token_ids, len(token_ids), block_size=block_size, salt=salt or _salt())
    return [*BlockHashes(bytes(chain))]


def _block_hash(parent: BlockHash | None, token_ids: list[int], salt: CacheSalt) -> BlockHash:
    (found,) = block_hashes(parent, token_bytes(token_ids), len(token_ids), salt)
    return found


def test_the_hash_of_a_block_never_changes() -> None:
    """Blocks on disk are found again by later versions."""
    first = _block_hash(None, [1, 2, 3, 4_000_000_000], _salt())
    assert first.hex() == "e3bcf02eb9dc5e1a28a71d44d523fc34b9c1472dcdbc4cabc13c074ee1906a1d"
    assert (
        _block_hash(first, [5], _salt()).hex()
        == "fb925102f578f012b9830fc11a07e8d7919df9b0da5bf4612c23ed330bb6923b"
    )


def test_every_part_of_the_salt_separates() -> None:
    salts = {_salt(), _salt(fingerprint="g"), _salt(physical_format="q"), _salt(tenant="u")}
    assert len({_block_hash(None, [1], salt) for salt in salts}) == 4


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
            _block_hash(None, [token], _salt())


_tokens = st.lists(st.integers(0, 1), max_size=12)


@given(_tokens, _tokens)
def test_chains_agree_as_far_as_the_tokens_do(ours: list[int], theirs: list[int]) -> None:
    for index, pair in enumerate(zip(_chain(ours), _chain(theirs), strict=False)):
        end = 2 * (index + 1)
        assert (pair[0] == pair[1]) == (ours[:end] == theirs[:end])


@given(_tokens, st.integers(1, 4), st.integers(0, 12))
def test_a_growing_chain_is_the_chain_of_the_whole(
    tokens: list[int], block_size: int, cut: int
) -> None:
    chain = bytearray()
    for known in (tokens[:cut], tokens):
        extend_chain(chain, known, len(known), block_size=block_size, salt=_salt())
    assert [*BlockHashes(bytes(chain))] == _chain(tokens, block_size)


def test_packed_hashes_are_a_sequence() -> None:
    one, other = _chain([1, 2, 3, 4])
    packed = BlockHashes.of([BlockHash(one), BlockHash(other)])
    assert [*packed] == [one, other] == [packed[0], packed[-1]]
    assert packed[1:] == BlockHashes(other) and packed[5:2] == BlockHashes()
    assert one in packed and len(packed) == 2
    with pytest.raises(IndexError):
        packed[2]
