"""The other ranks of an engine, the devices of all ranks, and their KV; a model on one device has
no others.

The KV pool of several ranks, as rank 0 sees it: on CPUs one piece of shared memory, which the
others map; on CUDA a piece on each GPU, which rank 0 maps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import torch

from engine.core.sizing import MemoryProfile
from engine.core.step import SequenceSlice
from engine.parallel.channel import Channel
from engine.parallel.grid import Grid
from engine.parallel.message import StepKind
from engine.parallel.opening import OwnRank
from kvpool.core.layout.layout import KvLayout
from kvpool.core.layout.shards import ShardLayout
from kvpool.core.transfer.pool_map import PoolMap
from kvpool.memory.kv_memory import Allocate, KvMemory
from kvpool.transport.mapped.cuda_ipc import CudaHandle, share
from kvrelay.errors import ModelError, PeerError

T = TypeVar("T")


class Ranks(Protocol):
    """`own` None: there is one rank."""

    @property
    def own(self) -> OwnRank | None: ...

    def together(self, work: Callable[[], T]) -> T:
        """All ranks do this at the same time, and meet when all have done it."""

    def profiles(self, own: MemoryProfile) -> tuple[MemoryProfile, ...]:
        """Each rank gives what it has measured. # rank |-> its profile, on rank 0; empty on the
        others."""

    def memory(
        self, layout: KvLayout, blocks: int, device: torch.device, allocate: Allocate | None
    ) -> KvMemory:
        """The KV pool as this rank sees it: the whole on rank 0, on the others their own part. Only
        rank 0's `blocks` counts."""

    def tell(self, slices: Sequence[SequenceSlice], kind: StepKind) -> None:
        """Lets the other ranks run this step too."""

    def watch(self, lost: Callable[[PeerError], None]) -> None:
        """`lost` is called on a thread when another rank has ended by itself."""

    def close(self) -> None: ...


class Alone:
    own = None

    def together(self, work: Callable[[], T]) -> T:
        return work()

    def profiles(self, own: MemoryProfile) -> tuple[MemoryProfile, ...]:
        return (own,)

    def memory(
        self, layout: KvLayout, blocks: int, device: torch.device, allocate: Allocate | None
    ) -> KvMemory:
        return KvMemory(layout, blocks, device, allocate)

    def tell(self, slices: Sequence[SequenceSlice], kind: StepKind) -> None:
        pass

    def watch(self, lost: Callable[[PeerError], None]) -> None:
        pass

    def close(self) -> None:
        pass


ALONE = Alone()


def own_layout(layout: KvLayout, own: OwnRank | None, layers: range | None) -> KvLayout:
    """This rank's part of the model's KV: `layers` are those of its stage."""
    if own is None:
        return layout
    return ShardLayout(model=layout, shard=own.grid.shard(own.rank, layers)).local


def own_memory(memory: KvMemory, layers: range | None) -> KvMemory:
    """This rank's part of its own view of the pool, in which other stages may have theirs too."""
    part = memory.parts[0]
    seen = {layer for group in part.layout.groups for layer in group.layers}
    return part if layers is None or seen <= set(layers) else part.of_layers(layers)


def lies_apart(device: torch.device) -> bool:
    """Whether each rank has its KV in memory of its own."""
    return device.type == "cuda"


def pool_map(layout: KvLayout, blocks: int, grid: Grid, *, apart: bool) -> PoolMap:
    """Each rank's heads; if they lie `apart`, on devices of their own, each rank's layers too."""
    total, stages = sum(len(group.layers) for group in layout.groups), tuple[range, ...]()
    if apart and grid.stages > 1:
        stages = tuple(grid.layers(stage, total) for stage in reversed(range(grid.stages)))
    return PoolMap(layout=layout, blocks=blocks, ranks=grid.tensor, stages=stages)


def rank_block_bytes(layout: KvLayout, own: OwnRank | None) -> tuple[int, ...]:
    """# rank |-> the size of its part of a block"""
    parts = pool_map(layout, 1, Grid() if own is None else own.grid, apart=True).parts
    return tuple(part.layout.bytes_per_block for part in parts)


def rank_devices(device: str, grid: Grid) -> tuple[str, ...]:
    """# rank |-> its device, all of this machine. Raises ModelError."""
    if device == "cpu":
        return ("cpu",) * grid.size
    if device != "cuda":
        raise ModelError(
            f"{grid} on {device}: ranks take the first GPUs that the worker sees: ask for the "
            "device cuda, and choose them by CUDA_VISIBLE_DEVICES"
        )
    return tuple(f"cuda:{rank}" for rank in range(grid.size))


def check_gpus(grid: Grid) -> None:
    """Raises ModelError if rank 0 can't reach the KV of all others."""
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if found < grid.size:
        raise ModelError(
            f"{grid} on cuda: each rank needs a GPU, {grid.size} in all, and torch sees {found}: "
            "check nvidia-smi, CUDA_VISIBLE_DEVICES and resources.GPU of the pool"
        )
    apart = [rank for rank in range(1, grid.size) if not torch.cuda.can_device_access_peer(0, rank)]
    if apart:
        raise ModelError(
            f"{grid} on cuda: cuda:0 can't reach the memory of cuda:{apart[0]}: "
            "choose GPUs with peer access (nvidia-smi topo -p2p r) by CUDA_VISIBLE_DEVICES"
        )


def map_parts(pool: PoolMap, device: torch.device, others: Sequence[Channel]) -> KvMemory:
    """Rank 0's side; `device` reaches the memory of all. Raises PeerError."""
    own = torch.zeros(pool.parts[0].nbytes, dtype=torch.uint8, device=device)
    theirs = [CudaHandle.unpack(one.receive()).map(device) for one in others]
    return KvMemory.of_parts(pool, [own, *theirs])


def offer_part(part: PoolMap, device: torch.device, leader: Channel) -> KvMemory:
    """Another rank's side. Raises ConfigError when CUDA can't share memory."""
    memory = KvMemory(part.layout, part.blocks, device)
    torch.cuda.synchronize(device)  # it is zeros when rank 0 sees it
    handle = share(memory.flat).pack()
    leader.send_facts(done=True)  # rather than an error
    leader.send(handle)
    return memory
