"""The part of a model's KV on one rank: layers of its stage, heads of its tensor slice. Pure.

Heads are split evenly over the tensor ranks. With fewer heads than ranks each head is replicated
on consecutive ranks, so MLA's single latent head is whole on every one of them.

`reslice` tells which layers, planes and heads one source rank sends to one target rank. Every head
of a target rank comes from exactly one source rank: among the holders of its replicas, the one
whose share of the replicas covers the target's.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

from kvpool.core.layout.layout import KvLayout, LayerGroup, Plane
from kvrelay.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """Tensor rank `rank` of `size`, in the pipeline stage that runs `layers` (None: all)."""

    rank: int = 0
    size: int = 1
    layers: range | None = None

    def __post_init__(self) -> None:
        assert 0 <= self.rank < self.size, (self.rank, self.size)

    def heads(self, total: int) -> range:
        """The heads of a plane with `total` heads that this rank holds. Raises ConfigError."""
        if total % self.size == 0:
            each = total // self.size
            return range(self.rank * each, (self.rank + 1) * each)
        if self.size % total == 0:
            head = self.rank * total // self.size
            return range(head, head + 1)
        raise ConfigError(
            f"tensor parallel degree {self.size} can't split {total} KV heads; choose one that "
            f"divides {total} or is a multiple of it"
        )

    def members(self, group: LayerGroup) -> range:
        """Indices of this stage's layers in `group.layers`; they are consecutive."""
        if self.layers is None:
            return range(len(group.layers))
        inside = [i for i, layer in enumerate(group.layers) if layer in self.layers]
        return range(inside[0], inside[-1] + 1) if inside else range(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardLayout:
    """`model` is the whole model's KV in this side's dtype and block size."""

    model: KvLayout
    shard: Shard

    @property
    def local(self) -> KvLayout:
        """The layout that the rank allocates. All groups stay, some maybe without layers, so that a
        group's index means the same on every rank."""
        groups = tuple(self._local_group(group) for group in self.model.groups)
        return replace(self.model, groups=groups)

    def _local_group(self, group: LayerGroup) -> LayerGroup:
        members = self.shard.members(group)
        return replace(
            group,
            layers=group.layers[members.start : members.stop],
            planes=tuple(self._local_plane(plane) for plane in group.planes),
        )

    def _local_plane(self, plane: Plane) -> Plane:
        return replace(plane, heads=len(self.shard.heads(plane.heads)))


class End(Enum):
    """The rank of a plan that this worker is."""

    SOURCE = "source"
    TARGET = "target"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaneSlice:
    """`heads` heads of the local plane `plane`, from `source_head` on there to `target_head`."""

    plane: int
    source_head: int
    target_head: int
    heads: int
    dim: int

    @property
    def elements(self) -> int:
        return self.heads * self.dim

    def first_head(self, end: End) -> int:
        return self.source_head if end is End.SOURCE else self.target_head


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSlice:
    """`layers` layers of a group, from local index `source_layer` on there to `target_layer`."""

    group: int
    source_layer: int
    target_layer: int
    layers: int
    planes: tuple[PlaneSlice, ...]

    @property
    def elements_per_token_layer(self) -> int:
        return sum(plane.elements for plane in self.planes)

    def first_layer(self, end: End) -> int:
        return self.source_layer if end is End.SOURCE else self.target_layer


def reslice(source: ShardLayout, target: ShardLayout) -> tuple[GroupSlice, ...]:
    """The slices that `source` sends to `target`; none for a group without a common layer or head.

    Raises ConfigError if a tensor parallel degree can't split the heads.
    """
    assert source.model.groups == target.model.groups, "the two sides hold different models"
    slices: list[GroupSlice] = []
    for index, group in enumerate(source.model.groups):
        ours, theirs = source.shard.members(group), target.shard.members(group)
        shared = range(max(ours.start, theirs.start), min(ours.stop, theirs.stop))
        planes = _plane_slices(group.planes, source.shard, target.shard)
        if shared and planes:
            slices.append(
                GroupSlice(
                    group=index,
                    source_layer=shared.start - ours.start,
                    target_layer=shared.start - theirs.start,
                    layers=len(shared),
                    planes=planes,
                )
            )
    return tuple(slices)


def _plane_slices(
    planes: tuple[Plane, ...], source: Shard, target: Shard
) -> tuple[PlaneSlice, ...]:
    slices: list[PlaneSlice] = []
    for index, plane in enumerate(planes):
        ours, theirs = source.heads(plane.heads), target.heads(plane.heads)
        shared = range(max(ours.start, theirs.start), min(ours.stop, theirs.stop))
        if shared and _sends(source, target, plane.heads):
            slices.append(
                PlaneSlice(
                    plane=index,
                    source_head=shared.start - ours.start,
                    target_head=shared.start - theirs.start,
                    heads=len(shared),
                    dim=plane.dim,
                )
            )
    return tuple(slices)


def _sends(source: Shard, target: Shard, heads: int) -> bool:
    """True if, of the replicas of a shared head, `target` gets that of `source`."""
    ours, theirs = max(1, source.size // heads), max(1, target.size // heads)
    return source.rank % ours == target.rank % theirs * ours // theirs
