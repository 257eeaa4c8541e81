"""How often the cost model chooses the better way, over sizes and fragmentations."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch

from bench.report import Row, interleave
from bench.transfer.link import link
from bench.transfer.sender import Sender
from bench.transfer.shape import Shape
from kvpool.link_cost import LinkCost, Way

GRID_TOKENS = (64, 256, 512, 1024, 2048, 4096, 7500)


@dataclass(frozen=True, slots=True, kw_only=True)
class GridPoint:
    tokens: int
    run_blocks: int
    seconds: dict[Way, float]
    expected_s: dict[Way, float]

    @property
    def right(self) -> bool:
        """Within 5 % of the better way."""
        chosen = min(self.expected_s, key=self.expected_s.__getitem__)
        return self.seconds[chosen] <= 1.05 * min(self.seconds.values())

    def __str__(self) -> str:
        each = "; ".join(
            f"{way} {1e3 * self.seconds[way]:.2f} ms, expected {1e3 * self.expected_s[way]:.2f}"
            for way in self.seconds
        )
        return f"{self.tokens} tokens, runs of {self.run_blocks} blocks: {each}"


def grid_row(scheme: str, shape: Shape, repeats: int) -> Row:
    """Both ways, over sizes and fragmentations, against what the cost model says; prints misses."""
    torch.set_num_threads(1)
    with link(scheme, shape) as sender:
        cost = sender.cost()
        points = [
            point
            for run_blocks in (1, 4, 32, shape.blocks)
            for point in _points(sender, cost, run_blocks, repeats)
        ]
    missed = [point for point in points if not point.right]
    for point in missed:
        print(f"{scheme}: {point}", file=sys.stderr)
    return Row(
        name=f"{scheme}: the way chosen is within 5 % of the better one",
        value=100 * (len(points) - len(missed)) / len(points),
        unit="%",
        against="all",
        against_value=100.0,
        goal=0.95,
        method=f"{len(points)} transfers of up to {shape.tokens} tokens in runs of 1 block to all; "
        f"least of {repeats} each",
    )


def _points(sender: Sender, cost: LinkCost, run_blocks: int, repeats: int) -> Iterator[GridPoint]:
    sender.lay_out(run_blocks)
    for tokens in GRID_TOKENS:
        if tokens <= sender.shape.tokens:
            move: dict[str, Callable[[], float]] = {
                Way.COLLATED: partial(sender.collated, tokens),
                Way.DIRECT: partial(sender.direct_pieces, tokens),
            }
            found = interleave(move, repeats=repeats + 1)
            yield GridPoint(
                tokens=tokens,
                run_blocks=run_blocks,
                seconds={way: min(found[way].values[1:]) for way in Way},
                expected_s=sender.expected_s(cost, tokens),
            )
