"""What a block's KV stands for: so a wrong block is noticed wherever it turns up."""

from __future__ import annotations

from functools import cache
from itertools import chain

from kvpool.core.blocks.device_blocks import Place
from kvpool.core.layout.hashes import BlockHash
from tests.sim.model import HISTORIES, NAMES, History, Memory

TENANTS = ("", "other")

Content = tuple[History | None, ...]
"""Of each (group, layer, token) of a block."""
GARBAGE: Content = (None,)


def take_block(memory: Memory, place: Place) -> Content:
    rows = (memory.row(group, layer, place[group]) for group, layer in memory.rows)
    return tuple(chain.from_iterable(rows))


def put_block(memory: Memory, place: Place, content: Content) -> None:
    size = memory.layout.block_size
    for number, (group, layer) in enumerate(memory.rows):
        row = memory.row(group, layer, place[group])
        row[:] = content[number * size : (number + 1) * size]


def torn(old: Content, new: Content) -> Content:
    """A write of `new` over `old` that is half done."""
    half = len(new) // 2
    return new[:half] + (old[half:] if len(old) == len(new) else GARBAGE)


def checksum(content: Content) -> int:
    return hash(content) % 2**64


@cache
def stands_for(content: Content, block_hash: BlockHash, block_size: int) -> bool:
    """Every layer has the KV of the tokens that are behind the name, of one of the tenants."""
    rows = {content[at : at + block_size] for at in range(0, len(content), block_size)}
    if len(rows) != 1 or None in content:
        return False
    (row,) = rows
    return any(block_hash == _name(row, tenant, block_size) for tenant in TENANTS)


def _name(row: tuple[History | None, ...], tenant: str, block_size: int) -> BlockHash | None:
    """None: these are no block's tokens, one after the other."""
    whole = HISTORIES.chain(row[-1])
    if len(whole) % block_size or tuple(whole[-block_size:]) != row:
        return None
    names = NAMES.chain(tenant, len(whole), block_size)
    names.extend(HISTORIES.token_ids(whole), len(whole))
    return names.at(len(whole) // block_size - 1)
