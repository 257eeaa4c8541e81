"""A recorded trace through the tree of runs and its eviction policies, in one thread.

Requests come in the order of the trace, each done before the next comes: the longest cached prefix
of its blocks is held, the missing blocks are put in, room is made by eviction, all is released.
Then what a worker's tree takes (`bench.kvpool.device_blocks`).
"""

from __future__ import annotations

import argparse
import json
import time
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

from bench.kvpool import device_blocks
from bench.report import Reading, Row, interleave, print_table, write_json
from kvpool.core.blocks.eviction import DEFAULT_POLICY, open_policy, policies
from kvpool.core.blocks.pool import BlockPool
from kvpool.core.blocks.runs import RunTree
from kvpool.core.layout.hashes import BlockHashes, block_hashes, cache_salt
from kvpool.core.layout.layout import BlockId

SIZES_BLOCKS = (1_000, 10_000, 30_000, 50_000, 100_000)
SPEED_SIZE_BLOCKS = 30_000
SPEED_GOAL_PER_S = 200_000
REUSE_COST_GOAL = 1.5
HASHED_BLOCK_TOKENS = 16
_SALT = cache_salt(fingerprint="bench", physical_format="bench", tenant="bench")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """What others found for a trace, known by its size. Hit rates are percent of blocks."""

    requests: int
    blocks: int
    infinite_percent: float
    lru_percent: Mapping[int, float]


CONVERSATION = Reference(
    requests=12_031,
    blocks=288_500,
    infinite_percent=36.64,
    lru_percent={1_000: 4.5, 10_000: 21.1, 30_000: 32.6, 50_000: 35.5, 100_000: 36.4},
)


@dataclass(frozen=True)
class Trace:
    """The block ids of each request, from the prompt's start."""

    requests: list[list[int]]

    @classmethod
    def read(cls, path: Path) -> Trace:
        with path.open() as lines:
            return cls([json.loads(line)["hash_ids"] for line in lines])

    @cached_property
    def chains(self) -> list[BlockHashes]:
        """The ids stand for their blocks' tokens: hashed like blocks of one token."""
        return [_chain(ids) for ids in self.requests]

    @property
    def blocks(self) -> int:
        return sum(map(len, self.requests))

    @property
    def reference(self) -> Reference | None:
        size = len(self.requests), self.blocks
        return CONVERSATION if size == (CONVERSATION.requests, CONVERSATION.blocks) else None


def _chain(ids: Sequence[int]) -> BlockHashes:
    return block_hashes(ids, block_size=1, salt=_SALT)


class Replay:
    """One cache of `size_blocks` blocks and what it was asked."""

    def __init__(self, policy: str, size_blocks: int) -> None:
        self.tree = RunTree(open_policy(policy))
        self.pool = BlockPool(size_blocks)
        self.asked_blocks = self.found_blocks = 0

    @property
    def hit_percent(self) -> float:
        return 100 * self.found_blocks / self.asked_blocks

    def run(self, chains: Sequence[BlockHashes]) -> None:
        for chain in chains:
            run, length = self.tree.find(chain)
            tail = self.tree.hold(run, length) if run is not None else None
            self.asked_blocks += len(chain)
            self.found_blocks += length
            if missing := chain[length:]:
                tail = self.tree.append(tail, missing.packed, (self._take(len(missing)),))
            if tail is not None:
                self.tree.release(tail)

    def _take(self, blocks: int) -> array[int]:
        """Evicts as many as have no room."""
        if (over := blocks - self.pool.free) > 0:
            for gone in self.tree.evict(over):
                self.pool.give_back(list(map(BlockId, gone.columns[0])))
        taken = self.pool.try_allocate(blocks)
        assert taken is not None
        return array("i", taken)

    def validate(self) -> None:
        self.tree.validate()
        self.pool.validate()
        assert self.tree.blocks + self.pool.free == self.pool.count


def replay(trace: Trace, policy: str, size_blocks: int) -> Replay:
    done = Replay(policy, size_blocks)
    done.run(trace.chains)
    done.validate()
    return done


def hit_rows(trace: Trace) -> list[Row]:
    """The infinite cache, then every policy at every size beside the default one."""
    infinite = replay(trace, DEFAULT_POLICY, trace.blocks).hit_percent
    found = {
        (policy, size): replay(trace, policy, size).hit_percent
        for policy in policies()
        for size in SIZES_BLOCKS
    }
    method = "blocks found in the longest cached prefix / blocks asked for"
    rows = [Row(name="hit rate, infinite cache", value=infinite, unit="%", method=method)]
    rows += _policy_rows(found)
    if trace.reference is not None:
        rows += _reference_rows(infinite, found, trace.reference)
    return rows


def _reference_rows(
    infinite: float, found: Mapping[tuple[str, int], float], reference: Reference
) -> list[Row]:
    published = reference.infinite_percent
    name = f"infinite cache: distance from {published} %"
    method = "the percentage is published for this trace, with two digits"
    return [
        _distance_row(name, infinite - published, limit=0.005, method=method),
        *(
            _distance_row(
                f"lru, {size:,} blocks: distance from {percent} %",
                found["lru", size] - percent,
                limit=1.0,
                method="the percentage is a plain LRU's, computed apart from this code",
            )
            for size, percent in reference.lru_percent.items()
        ),
    ]


def _distance_row(name: str, points: float, *, limit: float, method: str) -> Row:
    return Row(
        name=name,
        value=abs(points),
        unit="points",
        against="limit",
        against_value=limit,
        goal=1.0,
        lower_is_better=True,
        method=method,
    )


def _policy_rows(found: Mapping[tuple[str, int], float]) -> list[Row]:
    return [
        Row(
            name=f"{policy}, {size:,} blocks: hit rate",
            value=percent,
            unit="%",
            against="" if policy == DEFAULT_POLICY else DEFAULT_POLICY,
            against_value=None if policy == DEFAULT_POLICY else found[DEFAULT_POLICY, size],
        )
        for (policy, size), percent in sorted(found.items(), key=lambda item: item[0][1])
    ]


def speed_rows(trace: Trace, repeats: int) -> list[Row]:
    """Blocks per second through tree, policy and pool; and through the hash."""
    names = {policy: partial(_blocks_per_s, trace, policy) for policy in policies()}
    readings = interleave(names, repeats=repeats)
    rows = [
        Row(
            name=f"{policy}, {SPEED_SIZE_BLOCKS:,} blocks: speed",
            value=reading.median,
            unit="blocks/s",
            against="aim",
            against_value=SPEED_GOAL_PER_S,
            goal=1.0,
            method="one thread; per block of a request all of: looked up, held or allocated and "
            f"put in, evicted in its turn, released; CPU time, median of {repeats}",
        )
        for policy, reading in readings.items()
    ]
    rows.append(_cost_row(readings))
    hashed = interleave({"hash": _hashes_per_s}, repeats=repeats)["hash"]
    method = f"one thread, {hashed.spread()}"
    name = f"hashing {HASHED_BLOCK_TOKENS}-token blocks"
    return [*rows, Row(name=name, value=hashed.median, unit="blocks/s", method=method)]


def _cost_row(readings: Mapping[str, Reading]) -> Row:
    speeds = {policy: reading.median for policy, reading in readings.items()}
    return Row(
        name="reuse: time of a block",
        value=1e6 / speeds["reuse"],
        unit="us",
        against=DEFAULT_POLICY,
        against_value=1e6 / speeds[DEFAULT_POLICY],
        goal=REUSE_COST_GOAL,
        lower_is_better=True,
    )


def _blocks_per_s(trace: Trace, policy: str) -> float:
    run = Replay(policy, SPEED_SIZE_BLOCKS)
    chains = trace.chains
    started_s = time.thread_time()
    run.run(chains)
    return run.asked_blocks / (time.thread_time() - started_s)


def _hashes_per_s() -> float:
    tokens = list(range(10_000 * HASHED_BLOCK_TOKENS))
    started_s = time.perf_counter()
    named = block_hashes(tokens, block_size=HASHED_BLOCK_TOKENS, salt=_SALT)
    return len(named) / (time.perf_counter() - started_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--trace",
        type=Path,
        required=True,
        help="JSON lines with hash_ids; the reference is conversation_trace.jsonl from "
        "FAST25-release/traces in the public repository kvcache-ai/Mooncake",
    )
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    parser.add_argument("--repeats", type=int, default=5, help="of the speed measurements")
    parser.add_argument("--pause-blocks", type=int, nargs="*", default=device_blocks.PAUSE_BLOCKS)
    args = parser.parse_args()
    trace = Trace.read(args.trace)
    rows = [*hit_rows(trace), *speed_rows(trace, args.repeats)]
    rows += device_blocks.measure(args.trace, args.pause_blocks)
    print_table(f"Prefix cache, {len(trace.requests):,} requests, {trace.blocks:,} blocks", rows)
    if args.json:
        write_json(args.json, rows)


if __name__ == "__main__":
    main()
