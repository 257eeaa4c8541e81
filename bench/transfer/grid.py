"""How often the cost model chooses the better way, over sizes and fragmentations."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import fmean

import torch

from bench.report import Row
from bench.transfer.link import link
from bench.transfer.sender import Sender
from bench.transfer.shape import Shape
from kvpool.link_cost import LinkCost, Way

GRID_TOKENS = (64, 256, 512, 1024, 2048, 4096, 7500)
_RUN_BLOCKS = (1, 4, 32)  # and all


@dataclass(slots=True, kw_only=True)
class GridPoint:
    """`taken_s` are those of all rounds."""

    tokens: int
    run_blocks: int
    taken_s: dict[Way, list[float]] = field(default_factory=lambda: {way: [] for way in Way})
    expected_s: dict[Way, float] = field(default_factory=dict)

    def measure(self, sender: Sender, cost: LinkCost, ways: Iterable[Way]) -> None:
        self.expected_s = sender.expected_s(cost, self.tokens)
        moves = {Way.COLLATED: sender.collated, Way.DIRECT: sender.direct_pieces}
        for way in ways:
            self.taken_s[way].append(moves[way](self.tokens))

    def seconds(self, way: Way) -> float:
        """What disturbs a transfer makes it slower, never faster. The first one warmed up."""
        return min(self.taken_s[way][1:])

    @property
    def too_long(self) -> float:
        """The way chosen by the better one."""
        chosen = min(self.expected_s, key=self.expected_s.__getitem__)
        return self.seconds(chosen) / min(map(self.seconds, Way))

    def __str__(self) -> str:
        each = "; ".join(
            f"{way} {1e3 * self.seconds(way):.2f} ms, expected {1e3 * self.expected_s[way]:.2f}"
            for way in Way
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
        _measure(sender, points, repeats)
    for point in points:
        if not _is_right(point):
            print(f"{scheme}: {point}", file=sys.stderr)
    return _rows(scheme, points, repeats)


def _measure(sender: Sender, points: Sequence[GridPoint], repeats: int) -> None:
    """All of them in turn, so that what disturbs the machine for a while spoils none; what comes
    second finds blocks in the cache, so each way does every other time."""
    cost, ways = sender.cost(), list(Way)
    for _ in range(1 + repeats):
        ways.reverse()
        for point in points:
            if point.run_blocks != sender.shape.run_blocks:
                sender.lay_out(point.run_blocks)
            point.measure(sender, cost, ways)


def _is_right(point: GridPoint) -> bool:
    """Within 5 % of the better way."""
    return point.too_long <= 1.05


def _rows(scheme: str, points: Sequence[GridPoint], repeats: int) -> list[Row]:
    method = (
        f"{len(points)} transfers of up to {points[-1].tokens} tokens in runs of 1 block to all, "
        f"in turn; least of {repeats} each"
    )
    return [
        Row(
            name=f"{scheme}: the way chosen is within 5 % of the better one",
            value=100 * fmean(map(_is_right, points)),
            unit="%",
            against="all",
            against_value=100.0,
            goal=0.95,
            method=method,
        ),
        Row(
            name=f"{scheme}: the ways chosen take longer by",
            value=100 * (fmean(point.too_long for point in points) - 1),
            unit="%",
            method=method,
        ),
    ]
