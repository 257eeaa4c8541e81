"""What a host tier takes: memory of each block, time of each stored one, and the pause of Python's
garbage collector.

Blocks are stored as workers store them, in batches of 64. No byte of KV is there.

python -m bench.kvpool.tier_blocks [--trace conversation_trace.jsonl] [--pause-blocks 10000000]
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterable, Iterator
from hashlib import blake2b
from itertools import count
from pathlib import Path
from random import Random

from bench.report import Row, print_table, write_json
from kvpool.core.blocks.eviction import open_policy
from kvpool.core.layout.hashes import HASH_BYTES, BlockHash
from kvpool.core.node.events import FromPoolWorker, PoolWorkerJoined, TellWorker
from kvpool.core.node.host_tier import HostTier
from kvpool.core.node.messages import ChainBlock, Stored, StoreGranted, StoreWanted
from kvpool.core.node.tier_blocks import TierBlocks
from kvrelay.types import Incarnation

Chain = list[BlockHash]

BATCH_BLOCKS = 64
PROMPT_BLOCKS = 200
FORKS = 40
DEPTHS = (200, 8_000, 62_500)
"""The last: a prompt of a million tokens."""
PAUSE_BLOCKS = 10_000_000
GOAL_BYTES = 100
GOAL_US = 15
GOAL_PAUSE_MS = 20
_WORKER = Incarnation("bench")


class Node:
    """A host tier that one worker writes to."""

    def __init__(self, places: int) -> None:
        policy = open_policy
        self.host = TierBlocks(places, policy("lru"))
        self._core = HostTier(self.host, TierBlocks(0, policy("lru")), lease_ttl_s=30.0)
        self._core.handle(PoolWorkerJoined(worker=_WORKER, looks_up=True), 0.0)
        self._requests = 0

    def store(self, chain: Chain, start: int = 0) -> None:
        """The blocks of the chain from depth `start` on."""
        parents = [None, *chain]
        for first in range(start, len(chain), BATCH_BLOCKS):
            batch = slice(first, first + BATCH_BLOCKS)
            pairs = zip(chain[batch], parents[batch], strict=False)
            self.store_blocks(tuple(ChainBlock(name, parent) for name, parent in pairs))

    def store_blocks(self, blocks: tuple[ChainBlock, ...]) -> None:
        self._requests += 1
        wanted = StoreWanted(request_no=self._requests, blocks=blocks)
        (told,) = self._core.handle(FromPoolWorker(worker=_WORKER, message=wanted), 0.0)
        assert isinstance(told, TellWorker) and isinstance(told.message, StoreGranted)
        sums = tuple(place * 0x9E3779B97F4A7C15 % 2**64 for place in told.message.places)
        done = Stored(request_no=self._requests, checksums=sums)
        self._core.handle(FromPoolWorker(worker=_WORKER, message=done), 0.0)


# --- prompts -------------------------------------------------------------------------------------


def prompts(blocks: int) -> Iterator[Chain]:
    """Prompts of 200 blocks that share nothing."""
    draw = Random(1)
    for _ in range(blocks // PROMPT_BLOCKS):
        yield _names(draw, PROMPT_BLOCKS)


def forks(times: int) -> Iterator[Chain]:
    """40 prompts of 200 blocks that leave one of 2,000 blocks, each after 50 blocks more."""
    draw = Random(2)
    for _ in range(times):
        trunk = _names(draw, FORKS * 50)
        yield trunk
        for fork in range(1, FORKS + 1):
            yield trunk[: fork * 50] + _names(draw, PROMPT_BLOCKS)


def trace(path: Path, copy: int = 0) -> Iterator[Chain]:
    """Its blocks of 512 tokens."""
    with path.open() as lines:
        for line in lines:
            yield [_named(copy, number) for number in json.loads(line)["hash_ids"]]


def _names(draw: Random, blocks: int) -> Chain:
    data = draw.randbytes(blocks * HASH_BYTES)
    return [BlockHash(data[at : at + HASH_BYTES]) for at in range(0, len(data), HASH_BYTES)]


def _named(copy: int, number: int) -> BlockHash:
    return BlockHash(blake2b(b"%d %d" % (copy, number), digest_size=HASH_BYTES).digest())


def _distinct(chains: Iterable[Chain]) -> int:
    return len({name for chain in chains for name in chain})


# --- memory --------------------------------------------------------------------------------------


def memory(name: str, make: Callable[[], Iterable[Chain]]) -> Row:
    blocks = _distinct(make())
    gc.collect()
    tracemalloc.start()
    node = Node(blocks)
    empty = tracemalloc.get_traced_memory()[0]
    for chain in make():
        node.store(chain)
    del chain
    gc.collect()
    full = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert node.host.cached == blocks
    return Row(
        name=f"memory of a block, {name}",
        value=(full - empty) / blocks,
        unit="bytes",
        against="goal",
        against_value=GOAL_BYTES,
        goal=1.0,
        lower_is_better=True,
        spread=f"{blocks:,} blocks; beside them {empty / blocks:.0f} bytes for each place",
    )


# --- time ----------------------------------------------------------------------------------------


def store_time(depth: int) -> Row:
    """CPU time of the last batches of a prompt. From the third on, each makes room for itself."""
    node, draw, times_us = Node(2 * depth + 20_000), Random(3), []
    for _ in range(5):
        chain = _names(draw, depth)
        measured = max(0, depth - 16 * BATCH_BLOCKS)
        node.store(chain[:measured])
        begin = time.thread_time()
        node.store(chain, measured)
        times_us.append((time.thread_time() - begin) / (depth - measured) * 1e6)
    times_us.sort()
    return Row(
        name=f"a block is stored, at depth {depth:,}",
        value=times_us[2],
        unit="us",
        against="goal",
        against_value=GOAL_US,
        goal=1.0,
        lower_is_better=True,
        spread=f"median of 5, {times_us[0]:.3g} to {times_us[-1]:.3g}",
    )


# --- the collector's pause -----------------------------------------------------------------------


def pause(blocks: int, trace_path: Path | None = None) -> Row:
    """In a process of its own."""
    command = [sys.executable, "-m", "bench.kvpool.tier_blocks", "--only-pause", "--pause-blocks"]
    command += [str(blocks), *(("--trace", str(trace_path)) if trace_path else ())]
    found = subprocess.run(command, check=True, capture_output=True, text=True)
    pause_ms, objects = found.stdout.split()
    name = "the conversation trace" if trace_path else f"prompts of {PROMPT_BLOCKS}"
    return Row(
        name=f"the collector's pause, {blocks:,} blocks, {name}",
        value=float(pause_ms),
        unit="ms",
        against="goal",
        against_value=GOAL_PAUSE_MS,
        goal=1.0,
        lower_is_better=True,
        spread=f"median of 5; {int(objects):,} tracked objects",
    )


def print_pause(blocks: int, trace_path: Path | None) -> None:
    """Its CPU time. The trace is stored again and again under other names."""
    gc.collect()
    gc.freeze()
    node = Node(blocks)
    chains = _copies(trace_path) if trace_path is not None else prompts(blocks)
    for chain in chains:
        node.store(chain)
        if node.host.free < PROMPT_BLOCKS:
            break
    del chain, chains
    gc.collect()
    pauses_ms = []
    for _ in range(5):
        begin = time.thread_time()
        gc.collect()
        pauses_ms.append((time.thread_time() - begin) * 1e3)
    print(sorted(pauses_ms)[2], len(gc.get_objects()))


def _copies(path: Path) -> Iterator[Chain]:
    for copy in count():
        yield from trace(path, copy)


def measure(trace_path: Path | None, pause_blocks: int) -> list[Row]:
    rows = [
        memory(f"prompts of {PROMPT_BLOCKS}", lambda: prompts(200_000)),
        memory(f"{FORKS} forks of one prefix", lambda: forks(20)),
    ]
    if trace_path is not None:
        rows.append(memory("the conversation trace", lambda: trace(trace_path)))
    rows += [store_time(depth) for depth in DEPTHS]
    rows.append(pause(pause_blocks))
    if trace_path is not None:
        rows.append(pause(pause_blocks, trace_path))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    parser.add_argument("--trace", type=Path, help="Mooncake's conversation_trace.jsonl")
    parser.add_argument("--pause-blocks", type=int, default=PAUSE_BLOCKS)
    parser.add_argument("--only-pause", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.only_pause:
        return print_pause(args.pause_blocks, args.trace)
    rows = measure(args.trace, args.pause_blocks)
    print_table("Pool: the host tier's blocks", rows)
    if args.json:
        write_json(args.json, rows)
    return None


if __name__ == "__main__":
    main()
