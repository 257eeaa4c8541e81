"""Copies whole blocks between a worker's paged memory and the places of a pool node. Runs in the
worker.

A place holds a block of every layer group: for each group, for each layer, for each plane `[token,
head, dim]`. The bytes pass through the worker's own staging memory. There checksums are taken,
before bytes are written to a place and before they touch a block.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import gcd

import torch
import xxhash

from kvpool.core.blocks.device_blocks import Place
from kvpool.core.node.tier_blocks import PoolPlace
from kvpool.core.transfer.pool_map import PlaneShare, PoolMap
from kvpool.memory.kv_memory import KvMemory
from kvpool.memory.rows import BlockRows
from kvpool.transport.peer.base import Connection, Read, RegionName, RegionWrite
from kvrelay.errors import PeerError

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_STAGING_BYTES = 4 * 2**20  # about the size of a core's cache


def staging_bytes(block_bytes: int) -> int:
    """Staging for a useful number of blocks, at least one."""
    return max(1, _STAGING_BYTES // block_bytes) * block_bytes


class HostBlocks:
    """Copies between the blocks of `memory` and `staging`, CPU uint8 `[staging_bytes(...)]`."""

    def __init__(self, memory: KvMemory, staging: torch.Tensor) -> None:
        self._memory = memory
        self.block_bytes = memory.layout.bytes_per_block
        self._staging = staging.view(-1, self.block_bytes)
        self._on_device = self._staging
        self._rows: BlockRows | None = None
        if memory.device.type == "cpu" and not memory.lies_apart:
            self._rows = BlockRows(memory)
        else:
            self._on_device = torch.empty_like(self._staging, device=memory.parts[0].flat.device)

    @property
    def batch_blocks(self) -> int:
        return len(self._staging)

    def gather(self, blocks: Sequence[Place]) -> torch.Tensor:
        """uint8 `[len(blocks), block_bytes]`, valid until the next call; `batch_blocks` at most."""
        if self._rows is not None:
            self._rows.of(blocks).gather(self._staging[: len(blocks)])
            return self._staging[: len(blocks)]
        for plane, ids, in_place in self._planes(blocks, copies=1):
            in_place.copy_(plane.index_select(1, ids))
        self._staging[: len(blocks)].copy_(self._on_device[: len(blocks)])
        return self._staging[: len(blocks)]

    def scatter(self, blocks: Sequence[Place]) -> None:
        """Copies the first rows of `staged` into `blocks`; done on return."""
        if self._rows is not None:
            self._rows.of(blocks).scatter(self._staging[: len(blocks)])
            return
        self._on_device[: len(blocks)].copy_(self._staging[: len(blocks)])
        for plane, ids, in_place in self._planes(blocks, self._memory.map.most_copies):
            plane.index_copy_(1, ids, in_place)
        self._memory.settle()

    def staged(self, blocks: int) -> torch.Tensor:
        """uint8 `[blocks, block_bytes]`: the source of `scatter`."""
        return self._staging[:blocks]

    def _planes(
        self, blocks: Sequence[Place], copies: int
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """(in the pool `[layers, all blocks, tokens, elements]`, block ids, in the places `[layers,
        blocks, tokens, elements]`) of each plane and rank. Layers are the rank's, elements those of
        its heads, as words."""
        pool, size = self._memory.map, self._memory.layout.block_size
        for index, group in enumerate(self._memory.layout.groups):
            at = [place[index] for place in blocks]
            ids = torch.tensor(at, device=self._on_device.device)
            for number in range(len(group.planes)):
                in_places = self._in_places(len(blocks), index, number)
                for share in _shares(pool, index, number, copies):
                    plane = self._memory.parts[share.rank].planes[index][number]
                    in_pool = plane.flatten(2).unflatten(1, (-1, size))
                    layers, heads = share.layers, share.heads
                    of_layers = in_places[layers.start : layers.stop]
                    theirs = of_layers[:, :, :, heads.start : heads.stop].flatten(3)
                    word = _widest_word(in_pool, theirs)
                    yield in_pool.view(word), ids, theirs.view(word)

    def _in_places(self, count: int, index: int, number: int) -> torch.Tensor:
        """A plane of the places, `[layers, blocks, tokens, heads, dim]`: a strided view."""
        layout = self._memory.layout
        group, size = layout.groups[index], layout.block_size
        plane, layers = group.planes[number], len(group.layers)
        elements = self._on_device[:count].view(self._memory.parts[0].planes[0][0].dtype)
        before = sum(earlier.elements_per_token for earlier in layout.groups[:index])
        before += sum(earlier.elements for earlier in group.planes[:number])
        per_layer = group.elements_per_token // layers * size
        return elements.as_strided(
            (layers, count, size, plane.heads, plane.dim),
            (per_layer, elements.stride(0), plane.elements, plane.dim, 1),
            elements.storage_offset() + before * size,
        )


def _shares(pool: PoolMap, group: int, plane: int, copies: int) -> Iterator[PlaneShare]:
    for copy in range(min(copies, pool.copies(group, plane))):
        yield from pool.shares(group, plane, copy)


def _widest_word(*tensors: torch.Tensor) -> torch.dtype:
    """The widest type to copy these by: the fewer words, the faster."""
    common = 8
    for tensor in tensors:
        size = tensor.element_size()
        lengths = (*tensor.stride()[:-1], tensor.storage_offset(), tensor.shape[-1])
        common = gcd(common, *(length * size for length in lengths))
    return _WORDS[common]


def checksums(rows: torch.Tensor) -> tuple[int, ...]:
    """xxh3_64 of each row of CPU uint8 `[blocks, bytes]`."""
    return tuple(xxhash.xxh3_64_intdigest(row.data) for row in rows.numpy())


def store_blocks(
    blocks: HostBlocks,
    connection: Connection,
    region: RegionName,
    sources: Sequence[Place],
    places: Sequence[PoolPlace],
) -> tuple[int, ...]:
    """Gathers `sources[i]` into `places[i]` of the node's region. Returns the checksums.

    Raises PeerError when the node is gone; some places may be written by then.
    """
    found: list[int] = []
    for at in range(0, len(places), blocks.batch_blocks):
        end = at + blocks.batch_blocks
        rows = blocks.gather(sources[at:end])
        found += checksums(rows)
        _write(connection, region, places[at:end], rows)
    return tuple(found)


def fetch_blocks(
    blocks: HostBlocks,
    connection: Connection,
    region: RegionName,
    places: Sequence[PoolPlace],
    expected: Sequence[int],
    targets: Sequence[Place],
) -> int:
    """Scatters `places[i]` into `targets[i]`. Returns the number of blocks before the first whose
    bytes don't match their checksum. Raises PeerError when the node is gone."""
    done = 0
    for at in range(0, len(places), blocks.batch_blocks):
        end = at + blocks.batch_blocks
        rows = blocks.staged(len(places[at:end]))
        _read(connection, region, places[at:end], rows)
        sound = _equal_prefix(checksums(rows), expected[at:end])
        if sound:
            blocks.scatter(targets[at : at + sound])
        done += sound
        if sound < len(rows):
            break
    return done


def _write(
    connection: Connection, region: RegionName, places: Sequence[PoolPlace], rows: torch.Tensor
) -> None:
    window = _window(connection, region, places, rows.shape[1])
    if window is not None:
        for place, row in zip(places, rows, strict=True):  # index_copy_ goes byte by byte
            window[place].copy_(row)
        return
    size = rows.shape[1]
    writes = [RegionWrite(region, p * size, row) for p, row in zip(places, rows, strict=True)]
    connection.write_many(writes)


def _read(
    connection: Connection, region: RegionName, places: Sequence[PoolPlace], rows: torch.Tensor
) -> None:
    window = _window(connection, region, places, rows.shape[1])
    if window is not None:
        torch.index_select(window, 0, torch.tensor(places), out=rows)
        return
    size = rows.shape[1]
    connection.read_many([Read(region, p * size, r) for p, r in zip(places, rows, strict=True)])


def _window(
    connection: Connection, region: RegionName, places: Sequence[PoolPlace], block_bytes: int
) -> torch.Tensor | None:
    """The node's places, `[places, block_bytes]`, if the link can map them."""
    window = connection.window(region)
    if window is None:
        return None
    rows = window[: window.numel() // block_bytes * block_bytes].view(-1, block_bytes)
    if max(places) >= len(rows):
        raise PeerError(f"the pool node names place {max(places)} of {len(rows)}")
    return rows


def _equal_prefix(found: Sequence[int], expected: Sequence[int]) -> int:
    pairs = enumerate(zip(found, expected, strict=True))
    return next((i for i, (ours, theirs) in pairs if ours != theirs), len(found))
