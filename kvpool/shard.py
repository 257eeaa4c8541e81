"""Which part of a model's KV one rank holds: layers of its stage, heads of its tensor slice. Pure.

Heads are split evenly over the tensor ranks; with fewer heads than ranks each head is replicated
on consecutive ranks, so MLA's single latent head is whole on every one of them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvpool.layout import KvLayout, LayerGroup, Plane
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
        """Indices into `group.layers` of this stage's layers; they follow one another."""
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
        """What the rank allocates. All groups stay, some maybe without layers, so that a group's
        index means the same on every rank."""
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
