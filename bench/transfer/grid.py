"""How often the cost model chooses the better way, over sizes and fragmentations."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean

import torch

from bench.report import Row
from bench.transfer.link import link
from bench.transfer.sender import Sender
from bench.transfer.shape import Shape
from kvpool.core.transfer.link_cost import TransferWay

GRID_TOKENS = (64, 256, 512, 1024, 2048, 4096, 7500)
_RUN_BLOCKS = (1, 4, 32)  # and all


@dataclass(slots=True, kw_only=True)
class GridPoint:
    """`taken_s[way]` are all rounds' times, of which the first warmed up."""

    tokens: int
    run_blocks: int
    chosen: TransferWay = TransferWay.COLLATED
    expected_s: dict[TransferWay, float] = field(default_factory=dict)
    taken_s: dict[TransferWay, list[float]] = field(
        default_factory=lambda: {way: [] for way in TransferWay}
    )

    def seconds(self, way: TransferWay) -> float:
        """What disturbs a transfer makes it slower, never faster."""
        return min(self.taken_s[way][1:])

    @property
    def times_the_better(self) -> float:
        """What the way chosen takes, by what the better one does."""
        return self.seconds(self.chosen) / min(map(self.seconds, TransferWay))

    @property
    def right(self) -> bool:
        """Within 5 % of the better way."""
        return self.times_the_better <= 1.05

    def __str__(self) -> str:
        each = "; ".join(
            f"{way} {1e3 * self.seconds(way):.2f} ms, expected {1e3 * self.expected_s[way]:.2f}"
            for way in TransferWay
        )
        return f"{self.tokens} tokens, runs of {self.run_blocks} blocks: {each}"


def grid_rows(scheme: str, shape: Shape, repeats: int) -> list[Row]:
    """Both ways, over sizes and fragmentations, against what the cost model says; prints misses."""
    torch.set_num_threads(1)
    points = [
        GridPoint(tokens=tokens, run_blocks=run_blocks)
        for run_blocks in (*_RUN_BLOCKS, shape.blocks)
        for tokens in GRID_TOKENS
        if tokens <= shape.tokens
    ]
    with link(scheme, shape) as sender:
        measure(sender, points, repeats)
    for point in points:
        if not point.right:
            print(f"{scheme}: {point}", file=sys.stderr)
    return _rows(scheme, points, repeats)


def measure(sender: Sender, points: Sequence[GridPoint], repeats: int) -> None:
    """All points one way, then all the other way, and so on: so that what disturbs the machine for
    a while spoils none, and no transfer finds its blocks in the cache."""
    cost = sender.cost()
    for point in points:
        _lay_out(sender, point)
        point.chosen = sender.way(cost, point.tokens)
        point.expected_s = sender.expected_s(cost, point.tokens)
    moves = {TransferWay.COLLATED: sender.collated, TransferWay.DIRECT: sender.direct_pieces}
    for _ in range(1 + repeats):
        for way, move in moves.items():
            for point in points:
                _lay_out(sender, point)
                point.taken_s[way].append(move(point.tokens))


def _lay_out(sender: Sender, point: GridPoint) -> None:
    if point.run_blocks != sender.shape.run_blocks:
        sender.lay_out(point.run_blocks)


def _rows(scheme: str, points: Sequence[GridPoint], repeats: int) -> list[Row]:
    method = (
        f"{len(points)} transfers of up to {points[-1].tokens} tokens in runs of 1 block to all, "
        f"all of them one way, then the other; least of {repeats} each"
    )
    return [
        Row(
            name=f"{scheme}: the way chosen is within 5 % of the better one",
            value=100 * fmean(point.right for point in points),
            unit="%",
            against="all",
            against_value=100.0,
            goal=0.95,
            method=method,
        ),
        Row(
            name=f"{scheme}: the ways chosen take longer by",
            value=100 * (fmean(point.times_the_better for point in points) - 1),
            unit="%",
            method=method,
        ),
    ]
