"""What an engine needs of the other ranks; a model on one device has none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import torch

from engine.parallel.group import Group
from engine.step import SequenceSlice
from kvpool.layout import KvLayout
from kvpool.memory.kv_memory import Allocate, KvMemory
from kvpool.pool.map import PoolMap
from kvpool.shard import Shard, ShardLayout
from kvrelay.errors import PeerError

T = TypeVar("T")


class Ranks(Protocol):
    """`group` None: there is one rank."""

    @property
    def group(self) -> Group | None: ...

    def in_turn(self, work: Callable[[], T]) -> T:
        """Rank after rank, so that only one at a time has the whole model in memory."""

    def memory(
        self, layout: KvLayout, blocks: int, device: torch.device, allocate: Allocate | None
    ) -> KvMemory:
        """The KV pool as this rank sees it: all heads on rank 0, on the others their own. Only rank
        0's `blocks` count."""

    def tell(self, slices: Sequence[SequenceSlice], is_long: bool) -> None:
        """The others run this step too."""

    def watch(self, lost: Callable[[PeerError], None]) -> None:
        """`lost` is called, on a thread, when another rank has ended by itself."""

    def close(self) -> None: ...


class Alone:
    group = None

    def in_turn(self, work: Callable[[], T]) -> T:
        return work()

    def memory(
        self, layout: KvLayout, blocks: int, device: torch.device, allocate: Allocate | None
    ) -> KvMemory:
        return KvMemory(layout, blocks, device, allocate)

    def tell(self, slices: Sequence[SequenceSlice], is_long: bool) -> None:
        pass

    def watch(self, lost: Callable[[PeerError], None]) -> None:
        pass

    def close(self) -> None:
        pass


ALONE = Alone()


def own_layout(layout: KvLayout, group: Group | None) -> KvLayout:
    """What of the model's KV this rank holds."""
    if group is None:
        return layout
    return ShardLayout(model=layout, shard=Shard(rank=group.rank, size=group.size)).local


def block_bytes(layout: KvLayout, group: Group | None) -> int:
    """What one block takes on all ranks together."""
    ranks = 1 if group is None else group.size
    return PoolMap(layout=layout, blocks=1, ranks=ranks).bytes_per_block
