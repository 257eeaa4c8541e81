"""Opens what a rank needs to compute with the others of its worker."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.device.group import Group, Line
from engine.parallel.grid import Grid


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnRank:
    """This process, among the ranks of its worker. `group`: those of its stage, if it has several.
    `line`: to other stages, if there are any."""

    rank: int
    grid: Grid
    group: Group | None
    line: Line | None

    @property
    def is_first(self) -> bool:
        """Rank 0 is the worker itself."""
        return self.rank == 0

    def connect(self, board: torch.Tensor | None) -> None:
        """Returns once all ranks have called it. `board`: the memory that its group shares."""
        if self.group is not None:
            assert board is not None, "a group has one"
            self.group.connect(board)
            self.group.sum(torch.zeros(1))  # all of this stage have met
        if self.line is not None:
            self.line.connect()
        if self.line is not None and self.group is not None:
            self.group.sum(torch.zeros(1)).item()  # and those before each of them

    def bound(self, timeout_s: float) -> None:
        """A stage waits for all the work of those before it. On a GPU so do its sums: they are
        queued behind the hidden states."""
        for one in self._ways:
            one.bound(timeout_s * self.grid.stages)

    def give_up(self) -> None:
        """Another rank is gone: nobody waits for it any more. All at the same time, because NCCL
        ends what one group has queued only when what it is queued behind has ended."""
        threads = [threading.Thread(target=one.give_up, daemon=True) for one in self._ways]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def close(self) -> None:
        """Work that still runs, after an error, is given up."""
        self.give_up()
        for one in self._ways:
            one.close()

    @property
    def _ways(self) -> list[Group | Line]:
        return [one for one in (self.group, self.line) if one is not None]


def open_rank(device: str, rank: int, grid: Grid, meeting: Path) -> OwnRank:
    """NCCL between GPUs, shared memory and gloo between processes that compute on CPUs. `meeting`
    is a folder that all ranks see."""
    return OwnRank(
        rank=rank,
        grid=grid,
        group=_open_group(device, rank, grid, meeting) if grid.tensor > 1 else None,
        line=_open_line(device, rank, grid, meeting) if grid.stages > 1 else None,
    )


def _open_group(device: str, rank: int, grid: Grid, meeting: Path) -> Group:
    file = meeting / f"stage-{grid.stage(rank)}"
    if torch.device(device).type == "cuda":
        from engine.parallel.nccl_group import NcclGroup

        return NcclGroup(torch.device(device), grid.tensor_rank(rank), grid.tensor, file)
    from engine.parallel.host_group import HostGroup

    return HostGroup(grid.tensor_rank(rank), grid.tensor, file)


def _open_line(device: str, rank: int, grid: Grid, meeting: Path) -> Line:
    if torch.device(device).type == "cuda":
        from engine.parallel.nccl_line import NcclLine

        return NcclLine(torch.device(device), grid, rank, meeting / "line")
    from engine.parallel.host_line import HostLine

    return HostLine(grid, rank, meeting / "line")
