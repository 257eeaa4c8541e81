"""The device tier's tensors: paged KV of every layer. Runs in the worker that owns the blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from kvpool.core.blocks.holding import CopyPairs
from kvpool.core.layout.layout import KvLayout
from kvpool.core.layout.shards import Shard, ShardLayout
from kvpool.core.transfer.pool_map import PoolMap

Allocate = Callable[[int], torch.Tensor]
"""Zeros, uint8 `[bytes]`, on the KV's device."""


class KvMemory:
    """One tensor per (layer group, plane): `[layers, slots, heads, dim]`, slot = block x size.

    All are views of `flat`, uint8 `[bytes]`, laid out as PoolMap says, so that a link which can
    share memory shares them all as one region. `allocate` None takes plain memory of `device`.
    With several `ranks` the tensors are those of `parts`, each of a rank's heads; without, the
    memory is its only part. Ranks on GPUs of their own have a `flat` each, and their parts lie
    apart: those of stages always do.
    """

    _reads: torch.cuda.Stream | None = None

    def __init__(
        self,
        layout: KvLayout,
        blocks: int,
        device: torch.device | str,
        allocate: Allocate | None = None,
        *,
        ranks: int = 1,
    ) -> None:
        nbytes = PoolMap(layout=layout, blocks=blocks, ranks=ranks).nbytes
        if allocate is None:
            flat = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        else:
            flat = allocate(nbytes)
        self._lay_out(PoolMap(layout=layout, blocks=blocks, ranks=ranks), flat)

    @classmethod
    def over(cls, pool: PoolMap, flat: torch.Tensor) -> KvMemory:
        """A pool that is in `flat` already, such as a peer's seen through a window."""
        memory = cls.__new__(cls)
        memory._lay_out(pool, flat)
        return memory

    @classmethod
    def of_parts(cls, pool: PoolMap, flats: Sequence[torch.Tensor]) -> KvMemory:
        """# rank |-> memory of its own KV, all seen from the device of the first"""
        memory = cls.__new__(cls)
        memory._say(pool, flats[0].device)
        memory._flat = None
        memory._parts = tuple(
            KvMemory.over(part, flat) for part, flat in zip(pool.parts, flats, strict=True)
        )
        return memory

    def _lay_out(self, pool: PoolMap, flat: torch.Tensor) -> None:
        assert not pool.stages, "the parts of stages lie apart"
        self._say(pool, flat.device)
        self._flat: torch.Tensor | None = flat
        assert flat.numel() == pool.nbytes, (flat.numel(), pool.nbytes)
        self._parts: tuple[KvMemory, ...] = ()
        if pool.ranks > 1:
            self._parts = tuple(self._part(rank) for rank in range(pool.ranks))
        if self._parts:
            return
        # layer group |-> plane |-> [layers, slots, heads, dim]
        self.planes: list[list[torch.Tensor]] = [
            [self._plane(group, plane) for plane in range(len(spec.planes))]
            for group, spec in enumerate(pool.layout.groups)
        ]

    def of_layers(self, layers: range) -> KvMemory:
        """A view of the KV of these layers of the model. Its memory has gaps, so it has no
        `flat`."""
        shard = Shard(layers=layers)
        local = ShardLayout(model=self.layout, shard=shard).local
        view = KvMemory.__new__(KvMemory)
        view._say(PoolMap(layout=local, blocks=self.blocks), self.device)
        view._flat, view._parts = None, ()
        members = [shard.members(group) for group in self.layout.groups]
        view.planes = [
            [plane[inside.start : inside.stop] for plane in planes]
            for planes, inside in zip(self.planes, members, strict=True)
        ]
        return view

    def _say(self, pool: PoolMap, device: torch.device) -> None:
        self.layout = pool.layout
        self.blocks = pool.blocks
        self.device = device
        self.map = pool

    @property
    def lies_apart(self) -> bool:
        return self._flat is None

    @property
    def flat(self) -> torch.Tensor:
        assert self._flat is not None, "each rank's part has its own"
        return self._flat

    @property
    def parts(self) -> tuple[KvMemory, ...]:
        """# rank |-> its own KV"""
        return self._parts or (self,)

    def _part(self, rank: int) -> KvMemory:
        pool = self.map.parts[rank]
        start = self.map.part_offset(rank)
        return KvMemory.over(pool, self.flat[start : start + pool.nbytes])

    def _plane(self, group: int, plane: int) -> torch.Tensor:
        spec = self.layout.groups[group]
        start, nbytes = self.map.offset(group, plane), self.map.plane_bytes(group, plane)
        values = self.flat[start : start + nbytes].view(getattr(torch, self.layout.dtype))
        shape = spec.planes[plane]
        return values.view(len(spec.layers), self.map.slots, shape.heads, shape.dim)

    def layer(self, group: int, index: int) -> list[torch.Tensor]:
        """The planes `[slots, heads, dim]` of the group's `index`-th layer."""
        return [plane[index] for plane in self.planes[group]]

    @property
    def queues(self) -> bool:
        """Work is queued for a device, which does it later."""
        return self.device.type == "cuda"

    def mark(self) -> Callable[[], None]:
        """Waits until the device has done what this thread has queued up to now."""
        if not self.queues:
            return _no_wait
        event = torch.cuda.Event(blocking=True)
        event.record(torch.cuda.current_stream(self.device))
        return event.synchronize

    def settle(self) -> None:
        """Returns once everything that this thread has queued for the device is done."""
        if self.queues:
            torch.cuda.current_stream(self.device).synchronize()

    def beside(self) -> AbstractContextManager[object]:
        """Within the context, this thread's work runs in parallel with other threads' work on the
        device. Only blocks that the device has finished with may be touched. `settle` ends it."""
        if not self.queues:
            return nullcontext()
        return torch.cuda.stream(torch.cuda.Stream(self.device))

    def reading(self) -> AbstractContextManager[object]:
        """Within the context, a read doesn't wait for what threads have queued on their streams."""
        if not self.queues:
            return nullcontext()
        if self._reads is None:
            self._reads = torch.cuda.Stream(self.device)
        return torch.cuda.stream(self._reads)

    def copy_blocks(self, pairs: CopyPairs) -> None:
        """Copy-on-write: `pairs[group]` are (source, destination) blocks. Done on return."""
        for part in self.parts:
            part._copy_blocks(pairs)
        self.settle()

    def _copy_blocks(self, pairs: CopyPairs) -> None:
        size = self.layout.block_size
        for planes, group_pairs in zip(self.planes, pairs, strict=True):
            for source, target in group_pairs:
                for plane in planes:
                    plane[:, target * size : (target + 1) * size] = plane[
                        :, source * size : (source + 1) * size
                    ]


def _no_wait() -> None:
    pass
