"""How the ranks of one worker share its model: by heads, by layers, or both. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from kvpool.core.layout.shards import Shard


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """`tensor` ranks in each of `stages`. Rank 0 is the first of the last stage, which has the
    logits."""

    tensor: int = 1
    stages: int = 1

    @property
    def size(self) -> int:
        return self.tensor * self.stages

    def stage(self, rank: int) -> int:
        return self.stages - 1 - rank // self.tensor

    def tensor_rank(self, rank: int) -> int:
        return rank % self.tensor

    def before(self, rank: int) -> int | None:
        """The rank that hands over hidden states to this one; None in the first stage."""
        return rank + self.tensor if self.stage(rank) else None

    def after(self, rank: int) -> int | None:
        """The rank that takes this one's hidden states; None in the last stage."""
        return rank - self.tensor if rank >= self.tensor else None

    def layers(self, stage: int, total: int) -> range:
        """Of `total`, even; the first stages have one more, because the last has the head."""
        first, stop = (-(-total * at // self.stages) for at in (stage, stage + 1))
        return range(first, stop)

    def shard(self, rank: int, layers: range | None) -> Shard:
        """The KV of a rank whose stage has these layers."""
        return Shard(rank=self.tensor_rank(rank), size=self.tensor, layers=layers)

    def __str__(self) -> str:
        by_heads = f"{self.tensor} ranks" if self.tensor > 1 else ""
        by_layers = f"{self.stages} stages" if self.stages > 1 else ""
        return " in each of ".join(filter(None, (by_heads, by_layers)))
