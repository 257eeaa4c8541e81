"""What a worker's cached blocks take: memory of each, time of a full hit, and the pause of Python's
garbage collector.

Prompts of 16-token blocks are opened, filled and released in a worker's block tables. No byte of KV
is there. Memory and pauses are measured in processes of their own.

python -m bench.kvpool.device_blocks [--trace conversation_trace.jsonl]
    [--pause-blocks 2000000 10000000]
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from bench.report import Row, print_table, write_json
from kvpool.core.blocks.holding import Holder
from kvpool.core.blocks.tables import BlockTables
from kvpool.core.layout.block_names import ChainNames
from kvpool.core.layout.hashes import HASH_BYTES, BlockHashes
from kvpool.core.layout.layout import KvLayout, LayerGroup, Plane
from kvrelay.types import RequestKey

BLOCK_TOKENS = 16
PROMPT_BLOCKS = 200
FORKS, COMMON_BLOCKS, OWN_BLOCKS = 40, 100, 20
MEMORY_BLOCKS = 400_000
LONG_TOKENS = 1_048_576
PAUSE_BLOCKS = (2_000_000, 10_000_000)
GOAL_BYTES = 100
GOAL_HIT_MS = 20
GOAL_PAUSE_MS = 20

_PLANES = tuple(Plane(name=name, heads=8, dim=128) for name in ("k", "v"))
_LAYOUT = KvLayout(
    groups=(LayerGroup(layers=tuple(range(32)), planes=_PLANES),),
    dtype="bfloat16",
    block_size=BLOCK_TOKENS,
)


class Worker:
    """Its block tables, and prompts that go through them one after the other."""

    def __init__(self, blocks: int) -> None:
        self.tables = BlockTables(_LAYOUT, blocks)
        self._prompts = 0

    @property
    def cached(self) -> int:
        return self.tables.device.tree.blocks

    def serve(self, names: BlockHashes | ChainNames) -> None:
        self._prompts += 1
        holder = Holder("prefill", RequestKey(str(self._prompts), 0))
        tokens = len(names) * BLOCK_TOKENS
        assert self.tables.try_open(holder, tokens, now_s=0.0, hashes=names) is not None
        self.tables.fill(holder, names)
        self.tables.release(holder)


# --- prompts -------------------------------------------------------------------------------------


def prompts(blocks: int) -> Iterator[BlockHashes]:
    """Prompts of 200 blocks that share nothing."""
    for _ in range(blocks // PROMPT_BLOCKS):
        yield _names(PROMPT_BLOCKS)


def forks(blocks: int) -> Iterator[BlockHashes]:
    """Each prefix of 100 blocks is continued by 40 prompts with 20 blocks of their own."""
    for _ in range(blocks // (COMMON_BLOCKS + FORKS * OWN_BLOCKS)):
        prefix = _names(COMMON_BLOCKS).packed
        for _ in range(FORKS):
            yield BlockHashes(prefix + _names(OWN_BLOCKS).packed)


def trace(path: Path) -> Iterator[BlockHashes]:
    """Its blocks of 512 tokens."""
    with path.open() as lines:
        for line in lines:
            ids = json.loads(line)["hash_ids"]
            yield BlockHashes(b"".join(number.to_bytes(HASH_BYTES, "big") for number in ids))


def _names(blocks: int) -> BlockHashes:
    return BlockHashes(os.urandom(blocks * HASH_BYTES))


# --- in a process of its own ---------------------------------------------------------------------


def print_memory(kind: str, blocks: int, trace_path: Path | None) -> None:
    """How much the process grows for each cached block of a device that is full of them."""
    empty = _resident_bytes()
    worker = Worker(blocks)
    for names in _prompts_of(kind, blocks, trace_path):
        worker.serve(names)
    gc.collect()
    taken = _resident_bytes() - empty
    print(taken / worker.cached, worker.cached, sum(1 for _ in worker.tables.device.tree))


def _prompts_of(kind: str, blocks: int, trace_path: Path | None) -> Iterator[BlockHashes]:
    if kind == "trace":
        assert trace_path is not None
        return trace(trace_path)
    return forks(blocks) if kind == "forks" else prompts(blocks)


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def print_pause(blocks: int) -> None:
    """What the process has loaded is frozen, as in a worker."""
    gc.collect()
    gc.freeze()
    worker = Worker(blocks)
    for names in prompts(blocks):
        worker.serve(names)
    assert worker.cached == blocks
    gc.collect()
    print(statistics.median(_took_ms(gc.collect, time.thread_time) for _ in range(5)))


def _child(*arguments: str) -> list[float]:
    command = [sys.executable, "-m", "bench.kvpool.device_blocks", *arguments]
    found = subprocess.run(command, check=True, capture_output=True, text=True)
    return [float(word) for word in found.stdout.split()]


# --- rows ----------------------------------------------------------------------------------------


def _goal_row(name: str, value: float, unit: str, goal: float, spread: str) -> Row:
    return Row(
        name=name,
        value=value,
        unit=unit,
        against="goal",
        against_value=goal,
        goal=1.0,
        lower_is_better=True,
        spread=spread,
    )


def memory_row(name: str, kind: str, blocks: int, *more: str) -> Row:
    taken, cached, runs = _child("--only-memory", kind, "--memory-blocks", str(blocks), *more)
    spread = f"{cached:,.0f} blocks in {runs:,.0f} runs; resident size before and after"
    return _goal_row(f"memory of a cached block, {name}", taken, "bytes", GOAL_BYTES, spread)


def pause_row(blocks: int) -> Row:
    (pause_ms,) = _child("--only-pause", str(blocks))
    name = f"the collector's pause, {blocks:,} blocks, prompts of {PROMPT_BLOCKS}"
    return _goal_row(name, pause_ms, "ms", GOAL_PAUSE_MS, "CPU time, median of 5")


def new_row(repeats: int = 5) -> Row:
    """CPU time of new prompts on a full device: each evicts another one."""
    worker, times_us = Worker(MEMORY_BLOCKS), []
    for names in prompts(MEMORY_BLOCKS):
        worker.serve(names)
    for _ in range(repeats):
        given = [*prompts(MEMORY_BLOCKS // 10)]

        def serve(given: Sequence[BlockHashes] = given) -> None:
            for names in given:
                worker.serve(names)

        times_us.append(_took_ms(serve, time.thread_time) * 1e3 / (MEMORY_BLOCKS // 10))
    return Row(
        name=f"a new block on a full device, prompts of {PROMPT_BLOCKS}, names given",
        value=statistics.median(times_us),
        unit="us",
        spread=f"median of {repeats}, {min(times_us):.3g} to {max(times_us):.3g}",
    )


def hit_rows(repeats: int = 7) -> list[Row]:
    """A prompt of 1,048,576 tokens that is cached: opened, filled, released. CPU time."""
    worker = Worker(LONG_TOKENS // BLOCK_TOKENS)
    ids = tuple(number * 7919 % 100_000 for number in range(LONG_TOKENS))

    def named() -> ChainNames:
        chain = worker.tables.chain("", LONG_TOKENS)
        chain.extend(ids, LONG_TOKENS)
        return chain.full(LONG_TOKENS)

    given = named().hashes()
    worker.serve(given)
    hits: dict[str, Callable[[], object]] = {
        "names made on the way": lambda: worker.serve(named()),
        "names given": lambda: worker.serve(given),
    }
    rows = [
        _goal_row(f"a full hit of 1 M tokens, {name}", *_times(hit, repeats))
        for name, hit in hits.items()
    ]
    assert worker.cached == len(given) and worker.tables.hit_tokens == LONG_TOKENS * 2 * repeats
    alone_ms, unit, _, spread = _times(lambda: named().hashes(), repeats)
    naming = Row(name="all its names made, apart", value=alone_ms, unit=unit, spread=spread)
    return [*rows, naming]


def _times(work: Callable[[], object], repeats: int) -> tuple[float, str, float, str]:
    """Value, unit, goal and spread of a row."""
    times_ms = [_took_ms(work, time.thread_time) for _ in range(repeats)]
    spread = f"median of {repeats}, {min(times_ms):.3g} to {max(times_ms):.3g}"
    return statistics.median(times_ms), "ms", GOAL_HIT_MS, spread


def _took_ms(work: Callable[[], object], clock: Callable[[], float]) -> float:
    began_s = clock()
    work()
    return (clock() - began_s) * 1e3


def measure(trace_path: Path | None, pause_blocks: Sequence[int]) -> list[Row]:
    rows = [
        memory_row(f"prompts of {PROMPT_BLOCKS}", "prompts", MEMORY_BLOCKS),
        memory_row(f"{FORKS} forks of each prefix", "forks", MEMORY_BLOCKS),
    ]
    if trace_path is not None:
        blocks = len({name for names in trace(trace_path) for name in names})
        rows.append(memory_row("the trace", "trace", blocks, "--trace", str(trace_path)))
    return [*rows, new_row(), *hit_rows(), *map(pause_row, pause_blocks)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    parser.add_argument("--trace", type=Path, help="Mooncake's conversation_trace.jsonl")
    parser.add_argument("--pause-blocks", type=int, nargs="*", default=PAUSE_BLOCKS)
    parser.add_argument("--memory-blocks", type=int, default=MEMORY_BLOCKS)
    parser.add_argument("--only-memory", help=argparse.SUPPRESS)
    parser.add_argument("--only-pause", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.only_memory:
        return print_memory(args.only_memory, args.memory_blocks, args.trace)
    if args.only_pause:
        return print_pause(args.only_pause)
    rows = measure(args.trace, args.pause_blocks)
    print_table("Device: a worker's cached blocks", rows)
    if args.json:
        write_json(args.json, rows)
    return None


if __name__ == "__main__":
    main()
