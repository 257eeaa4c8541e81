"""KV between two processes over every link of this machine: collated, direct, and their limits.

7,500 tokens of Llama-3.1-8B's layout in scattered 16-token blocks; the code is the workers' own.

What is measured, one thread at each end:

collated   gather into a slab, checksum, write, check, scatter, in pieces as the workers cut them,
           SLABS at most on their way; until the receiver has scattered the last one.
direct     the receiver reads every run of blocks, of each layer and plane, as one descriptor. Over
           nixl and ucx it makes and posts all 30,000 of a transfer as one batch, the kindest case
           for many descriptors; where memory is mapped it copies piece by piece, as workers do.
one write  the same bytes in one piece, contiguous and registered at both ends.
memcpy     the same bytes within the sender, pages touched before.

All are timed in turn, and medians compared.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import psutil
import torch

from bench.report import Reading, Row, interleave, print_table, write_json
from bench.transfer_end import (
    FINGERPRINT,
    End,
    Message,
    Shape,
    receiver_in_thread,
)
from bench.transfer_handoff import handoff_rows
from kvpool.link_cost import LinkCost, TransferShape, Way, fit
from kvpool.memory_collate import write_slab
from kvpool.memory_probe import measure_copies
from kvpool.piece import Piece, transfer_shape
from kvpool.transfer_plan import Side
from kvpool.transport import probe
from kvpool.transport.base import RegionName
from kvpool.transport.registry import schemes
from kvrelay.errors import ConfigError

T = TypeVar("T")

MESSAGE_LINKS = ("nixl", "ucx")
WORKER_LINKS = ("shm", *MESSAGE_LINKS)
GRID_TOKENS = (64, 256, 512, 1024, 2048, 4096, 7500)
PATIENCE_S = 120.0
STEADY_TOKENS = 32
STEADY_WARM_UP = 0.1
GROWTH_ALLOWED_MIB = 8.0
COLLATED, DIRECT, WRITE, MEMCPY = "collated", "direct", "one write", "memcpy"


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


class Sender(End):
    """The prefill worker's side; `address` is the receiver's."""

    def __init__(self, scheme: str, shape: Shape, address: str) -> None:
        super().__init__(scheme, shape, seed=1)
        self.scheme = scheme
        self.memory.flat.random_()
        self._staging = self.endpoint.register(shape.staging.slab_bytes)
        self._plain = torch.zeros_like(self.memory.flat[: shape.nbytes])
        self.connection = self.endpoint.connect(address)
        self.say(say="hello", kv=self.kv.name, blocks=shape.blocks)
        hello = self.hear("hello")
        self._slabs = [RegionName(name) for name in hello["slabs"]]
        self._kv_there, self._probe_there = hello["kv"], hello["probe"]

    def hear(self, what: str) -> Message:
        message = self.messages.get(timeout=PATIENCE_S)
        assert message["say"] == what, message
        return message

    def collated(self, tokens: int | None = None) -> float:
        """Gather, write, scatter; the receiver scatters one slab while the next is on its way."""
        count = self.shape.tokens if tokens is None else tokens
        started_s = time.monotonic()
        free = list(range(len(self._slabs)))
        for index, write in enumerate(self.shape.cut(count)):
            slab = free.pop() if free else int(self.hear("free")["slab"])
            self._send(slab, Piece(span=self.shape.span(count), index=index), write)
            self.say(say="filled", slab=slab, index=index, tokens=count)
        while len(free) < len(self._slabs):
            free.append(int(self.hear("free")["slab"]))
        return time.monotonic() - started_s

    def _send(self, slab: int, piece: Piece, write) -> None:  # type: ignore[no-untyped-def]
        region = self._slabs[slab]
        window = self.peer.window(region)
        with self.trace.span("gather"):
            size = write_slab(
                self.memory,
                self.tables,
                piece,
                write,
                fingerprint=FINGERPRINT,
                lease_id=piece.index,
                window=self._staging.memory if window is None else window,
            )
        if window is None:
            with self.trace.span("write"):
                self.peer.write(region, 0, self._staging.memory[:size])

    def direct(self, tokens: int | None = None) -> float:
        """The receiver reads each block, layer and plane."""
        count = self.shape.tokens if tokens is None else tokens
        return self._direct(count, at_once=self.scheme in MESSAGE_LINKS)

    def direct_pieces(self, tokens: int) -> float:
        """As workers do, who tell each other twice more than about slabs: kvpool.handoff."""
        started_s = time.monotonic()
        self._ping()
        self._direct(tokens, at_once=False)
        return time.monotonic() - started_s

    def _direct(self, tokens: int, *, at_once: bool) -> float:
        started_s = time.monotonic()
        self.say(say="read", tokens=tokens, at_once=at_once)
        self.hear("read")
        return time.monotonic() - started_s

    def lay_out(self, run_blocks: int) -> None:
        """Anew, at both ends."""
        self.shape = replace(self.shape, run_blocks=run_blocks)
        self.tables = self.shape.tables(seed=1)
        self.say(say="runs", blocks=run_blocks)
        self.hear("runs")

    def one_write(self) -> float:
        """The same bytes in one piece, from registered memory to registered memory."""
        started_s = time.monotonic()
        self.peer.write(RegionName(self._kv_there), 0, self.memory.flat[: self.shape.nbytes])
        return time.monotonic() - started_s

    def memcpy(self) -> float:
        started_s = time.monotonic()
        self._plain.copy_(self.memory.flat[: self.shape.nbytes])
        return time.monotonic() - started_s

    def check(self, move: Callable[[], float]) -> None:
        """Nothing but the very bytes may have arrived."""
        self.say(say="digest")
        self.hear("digest")
        move()
        self.say(say="digest")
        assert self.hear("digest")["digest"] == self.digest(), "other bytes arrived"

    def cost(self) -> LinkCost:
        """As the workers measure it."""
        region = RegionName(self._probe_there)
        samples = probe.measure(self.peer, region, self.probe.memory, self._ping)
        mapped = self.peer.window(region) is not None
        copies = measure_copies(self.shape.layout, "cpu")
        return fit(self.endpoint.address.partition(":")[0], [*samples, *copies], mapped=mapped)

    def _ping(self) -> None:
        self.say(say="ping")
        self.hear("pong")

    def pieces(self, tokens: int | None = None) -> list[TransferShape]:
        target = Side(tables=self.shape.tables(seed=2), block_size=self.side.block_size)
        return [transfer_shape(write, self.side, target) for write in self.shape.cut(tokens)]

    def expected_s(self, cost: LinkCost, tokens: int | None = None) -> dict[Way, float]:
        """Piece by piece, as workers choose."""
        pieces = self.pieces(tokens)
        return {way: sum(cost.seconds(way, piece) for piece in pieces) for way in Way}

    def rss_bytes(self) -> int:
        """Of both ends."""
        self.say(say="rss")
        return int(self.hear("rss")["bytes"]) + psutil.Process().memory_info().rss

    def traced(self, move: Callable[[], float]) -> dict[str, list[tuple[str, float, float]]]:
        """# end |-> its spans of one transfer"""
        self.say(say="trace", on=True)
        self.hear("traced")
        self.trace.enabled = True
        move()
        self.trace.enabled = False
        self.say(say="trace", on=False)
        theirs = []
        while (message := self.messages.get(timeout=PATIENCE_S))["say"] == "span":
            theirs.append(tuple(message["span"]))
        ours, self.trace.spans = self.trace.spans, []
        return {"prefill": ours, "decode": theirs}


@contextmanager
def link(scheme: str, shape: Shape) -> Iterator[Sender]:
    """Two ends, in two processes but for loopback."""
    with _receiver(scheme, shape) as address:
        sender = Sender(scheme, shape, address)
        try:
            yield sender
        finally:
            sender.endpoint.close()


@contextmanager
def _receiver(scheme: str, shape: Shape) -> Iterator[str]:
    """Its address; it ends when its peer is gone."""
    if scheme == "loopback":
        address, join = receiver_in_thread(scheme, shape)
        yield address
        join()
        return
    command = [sys.executable, "-m", "bench.transfer_end", scheme]
    arguments = [str(shape.layers), str(shape.tokens)]
    with subprocess.Popen([*command, *arguments], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            lines = (line.strip() for line in process.stdout)  # UCX may warn before it
            yield next((line for line in lines if line.startswith(f"{scheme}:")), "")
            process.wait(timeout=PATIENCE_S)
        finally:
            process.kill()


# --- rows ---------------------------------------------------------------------------------------


def rows_of(scheme: str, shape: Shape, repeats: int) -> list[Row]:
    torch.set_num_threads(1)
    with link(scheme, shape) as sender:
        sender.check(sender.collated)
        sender.check(sender.direct)
        expected_s = sender.expected_s(sender.cost())
        way = min(expected_s, key=expected_s.__getitem__)
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
    note = (
        f"{shape.tokens} tokens, {shape.layers} layers, {shape.nbytes / 1e6:.0f} MB, bf16, "
        "scattered 16-token blocks, process to process, one thread at each end; checksums included"
    )
    return list(_rows(scheme, speeds, way, note))


def _speed(times: Reading, nbytes: int) -> Reading:
    return Reading(values=tuple(nbytes / 1e9 / seconds for seconds in times.values))


def _rows(scheme: str, speeds: dict[str, Reading], way: Way, note: str) -> Iterator[Row]:
    chosen = COLLATED if way is Way.COLLATED else DIRECT
    better = max((COLLATED, DIRECT), key=lambda name: speeds[name].median)

    def row(name: str, what: str, against: str, goal: float | None) -> Row:
        return Row(
            name=f"{scheme}: {name}",
            value=speeds[what].median,
            unit="GB/s",
            against=against,
            against_value=speeds[against].median,
            goal=goal,
            method=note,
            spread=speeds[what].spread(),
        )

    if scheme in MESSAGE_LINKS:
        yield row("collated, end to end", COLLATED, DIRECT, 2.0)
        yield row("collated, end to end", COLLATED, WRITE, 0.6)
    else:
        yield row("collated, end to end", COLLATED, DIRECT, None)
        yield row(f"chosen: {chosen}; {better} is better", chosen, better, 0.9)
        yield row(f"chosen: {chosen}", chosen, MEMCPY, 0.6)
    yield row("one write", WRITE, MEMCPY, None)


def steady_row(scheme: str, transfers: int) -> Row:
    """Small transfers, both ways in turn; the resident memory of both processes together."""
    with link(scheme, Shape(layers=2, tokens=STEADY_TOKENS)) as sender:

        def run(count: int) -> None:
            for number in range(count):
                sender.direct() if number % 2 else sender.collated()

        run(max(2, int(transfers * STEADY_WARM_UP)))
        before = sender.rss_bytes()
        run(transfers)
        growth_mib = (sender.rss_bytes() - before) / 2**20
    return Row(
        name=f"{scheme}: memory grown in {transfers} transfers",
        value=growth_mib,
        unit="MiB",
        against="allowed",
        against_value=GROWTH_ALLOWED_MIB,
        goal=1.0,
        lower_is_better=True,
        method=f"{STEADY_TOKENS} tokens of 2 layers each, collated and direct in turn, "
        "after a tenth as many to warm up",
    )


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


# --- trace --------------------------------------------------------------------------------------


def write_trace(path: Path, names: list[str], shape: Shape) -> None:
    """Chrome's format: chrome://tracing and Perfetto show it. Prints what the spans overlap."""
    events: list[dict[str, object]] = []
    for number, scheme in enumerate(names):
        with link(scheme, shape) as sender:
            sender.collated()
            spans = sender.traced(sender.collated)
        for side, end in enumerate(spans):
            pid = 2 * number + side
            args = {"name": f"{end} over {scheme}"}
            events.append({"name": "process_name", "ph": "M", "pid": pid, "args": args})
            events += [_event(pid, *span) for span in spans[end]]
        hidden = _hidden(spans["decode"], spans["prefill"])
        print(f"{scheme}: {hidden:.0%} of scatter is hidden behind gather and write")
    path.write_text(json.dumps({"traceEvents": events}))


def _event(pid: int, name: str, started_s: float, ended_s: float) -> dict[str, object]:
    times = {"ts": started_s * 1e6, "dur": (ended_s - started_s) * 1e6}
    return {"name": name, "ph": "X", "pid": pid, "tid": 0, **times}


def _hidden(inner: list[tuple[str, float, float]], outer: list[tuple[str, float, float]]) -> float:
    """The share of `inner` spans' time that lies within `outer` ones, which don't overlap."""
    total = sum(end - start for _, start, end in inner)
    both = (min(a[2], b[2]) - max(a[1], b[1]) for a in inner for b in outer)
    return sum(max(0.0, overlap) for overlap in both) / total if total else 0.0


# --- command line -------------------------------------------------------------------------------


def apart(function: Callable[..., T], *arguments: object) -> T:
    """In a process of its own: two transports' UCX in one would disturb each other."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(function, arguments)


def usable() -> list[str]:
    """The transports whose ends can be opened here."""
    return [scheme for scheme in schemes() if apart(opens, scheme)]


def opens(scheme: str) -> bool:
    try:
        End(scheme, Shape(layers=1, tokens=16), seed=1).endpoint.close()
    except (ConfigError, OSError, RuntimeError) as error:
        print(f"{scheme}: not measured: {error}", file=sys.stderr)
        return False
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    parser.add_argument("--format", choices=["table", "json"], default="table")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=7500)
    parser.add_argument("--layers", type=int, default=32, help="of 32; fewer need less memory")
    parser.add_argument("--only", nargs="+", metavar="TRANSPORT", help="measure these alone")
    parser.add_argument("--steady", type=int, metavar="N", help="N small transfers instead")
    parser.add_argument("--grid", action="store_true", help="how often the right way is chosen")
    parser.add_argument("--handoff", action="store_true", help="two real workers instead")
    parser.add_argument("--profile", type=Path, help="write a Chrome trace to this file instead")
    args = parser.parse_args()
    torch.set_num_threads(1)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    shape = Shape(layers=args.layers, tokens=args.tokens)
    _check_room(shape)
    names = args.only or usable()
    if args.profile:
        write_trace(args.profile, names, shape)
        return
    rows: list[Row] = []
    if args.handoff:
        rows = handoff_rows([name for name in names if name in WORKER_LINKS], args.repeats)
        names = []
    for scheme in names:
        if args.steady:
            rows.append(apart(steady_row, scheme, args.steady))
        elif args.grid:
            rows.append(apart(grid_row, scheme, shape, args.repeats))
        else:
            rows += apart(rows_of, scheme, shape, args.repeats)
    if args.format == "json":
        print(json.dumps([row.as_json() for row in rows], indent=2))
    else:
        print_table("Transfer", rows)
    if args.json:
        write_json(args.json, rows)


def _check_room(shape: Shape) -> None:
    needed = 3 * shape.nbytes + 2**30
    room = psutil.virtual_memory().available
    if needed > room:
        fewer = int(shape.layers * (room - 2**30) / (3 * shape.nbytes))
        sys.exit(
            f"{needed / 2**30:.1f} GiB are needed and {room / 2**30:.1f} are free: --layers {fewer}"
        )


if __name__ == "__main__":
    main()
