"""How fast a link moves KV each way, beside its limits."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from bench.report import Reading, Row, interleave
from bench.transfer.link import link
from bench.transfer.sender import MESSAGE_LINKS
from bench.transfer.shape import Shape
from kvpool.core.transfer.link_cost import TransferWay

COLLATED, DIRECT, WRITE, MEMCPY = "collated", "direct", "one write", "memcpy"
PASSES = 2
"""A collated transfer reads and writes its bytes once to gather and once to scatter."""


def rows_of(scheme: str, shape: Shape, repeats: int) -> list[Row]:
    torch.set_num_threads(1)
    with link(scheme, shape) as sender:
        sender.check(sender.collated)
        sender.check(sender.direct)
        way = sender.way(sender.cost())
        times = interleave(
            {
                COLLATED: sender.collated,
                DIRECT: sender.direct,
                WRITE: sender.one_write,
                MEMCPY: sender.memcpy,
            },
            repeats=repeats,
        )
    speeds = {name: _speed(found, shape.nbytes) for name, found in times.items()}
    return list(_rows(scheme, speeds, way, _note(shape)))


def _note(shape: Shape) -> str:
    moved = (
        f"{shape.tokens} tokens, {shape.layers} layers, {shape.nbytes / 1e6:.0f} MB, bf16, "
        "scattered 16-token blocks, process to process"
    )
    if shape.device == "cuda":
        return f"{moved}, on {torch.cuda.get_device_name()}, chunks of {shape.chunk_tokens} tokens"
    return f"{moved}, one thread at each end; checksums included"


def _speed(times: Reading, nbytes: int) -> Reading:
    return Reading(values=tuple(nbytes / 1e9 / seconds for seconds in times.values))


def _rows(scheme: str, speeds: dict[str, Reading], way: TransferWay, note: str) -> Iterator[Row]:
    chosen = COLLATED if way is TransferWay.COLLATED else DIRECT
    better = max((COLLATED, DIRECT), key=lambda name: speeds[name].median)

    def row(name: str, what: str, against: str, goal: float | None, passes: int = 1) -> Row:
        counted = Reading(values=tuple(passes * value for value in speeds[what].values))
        return Row(
            name=f"{scheme}: {name}",
            value=counted.median,
            unit="GB/s",
            against=against,
            against_value=speeds[against].median,
            goal=goal,
            method=note,
            spread=counted.spread(),
        )

    if scheme in MESSAGE_LINKS:
        yield row("collated, end to end", COLLATED, DIRECT, 2.0)
        yield row("collated, end to end", COLLATED, WRITE, 0.6)
    else:
        yield row("collated, end to end", COLLATED, DIRECT, None)
        yield row(f"chosen: {chosen}; {better} is better", chosen, better, 0.9)
    if scheme == "cuda_ipc":
        yield row("collated, both its passes counted", COLLATED, MEMCPY, 0.8, PASSES)
    elif scheme not in MESSAGE_LINKS:
        yield row(f"chosen: {chosen}", chosen, MEMCPY, 0.6)
    yield row("one write", WRITE, MEMCPY, None)
