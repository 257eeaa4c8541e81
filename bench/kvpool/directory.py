"""What a router's directory takes: memory of each block, and time of what it hears and is asked.

Holders tell it prompts of 2,000 tokens that share their first half with three others. Then one
prompt of a million tokens is stored and looked up.

python -m bench.kvpool.directory [--prompts 2000] [--holders 8]
"""

from __future__ import annotations

import argparse
import gc
import time
import tracemalloc
from collections.abc import Callable, Iterator
from hashlib import blake2b
from random import Random

from bench.report import Row, print_table
from kvpool.core.layout.block_names import BlockNames, ChainNames
from kvpool.core.layout.hashes import HASH_BYTES, BlockHashes
from kvrelay.messages import BlockChanges, CutRun, StoredRun
from kvrelay.types import Incarnation, Tier
from router.core.state.directory import Directory

BLOCK_TOKENS = 16
PROMPT_BLOCKS, SHARED_BLOCKS = 125, 62
SHARING = 4
"""Prompts that have the same first half."""
LONG_TOKENS = 1_000_000
PAGE_BLOCKS = 8192
GOAL_HIT_MS = 5.0
BEFORE_BYTES = 199
"""Of a block of one holder when each block had entries of its own."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=2000)
    parser.add_argument("--holders", type=int, default=8)
    options = parser.parse_args()
    prompts = [*_prompts(options.prompts)]
    rows = [_memory(prompts, holders) for holders in (1, options.holders)]
    rows += _times(prompts, options.holders)
    rows += _long()
    print_table("the router's directory, one thread", rows)


def _prompts(count: int) -> Iterator[bytes]:
    """Their blocks' hashes."""
    draw = Random(1)
    for number in range(count):
        if number % SHARING == 0:
            shared = draw.randbytes(SHARED_BLOCKS * HASH_BYTES)
        yield shared + draw.randbytes((PROMPT_BLOCKS - SHARED_BLOCKS) * HASH_BYTES)


def _strands(prompts: list[bytes], before: int) -> Iterator[StoredRun]:
    """As the tree of a tier numbers them that had some `before`."""
    shared = SHARED_BLOCKS * HASH_BYTES
    for number, hashes in enumerate(prompts, before + 1):
        first = number - (number - 1) % SHARING
        if first == number:
            yield StoredRun(number=number, parent=0, start=0, hashes=hashes)
        else:
            yield StoredRun(
                number=number, parent=first, start=SHARED_BLOCKS, hashes=hashes[shared:]
            )


def _stored(directory: Directory, prompts: list[bytes], holders: int, before: int = 0) -> int:
    """Each holder stores all. Returns how many blocks were reported."""
    reported = 0
    for holder in range(holders):
        for run in _strands(prompts, before):
            changes = BlockChanges(tier=Tier.DEVICE, stored=(run,))
            directory.changed(Incarnation(f"worker-{holder}"), changes)
            reported += len(run.hashes) // HASH_BYTES
    return reported


def _memory(prompts: list[bytes], holders: int) -> Row:
    gc.collect()
    tracemalloc.start()
    directory = Directory()
    _stored(directory, prompts, holders)
    gc.collect()
    taken = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    share = directory.used_bytes / taken
    return Row(
        name=f"memory of a block, holders: {holders}",
        value=taken / directory.blocks,
        unit="bytes",
        against="before",
        against_value=BEFORE_BYTES,
        lower_is_better=True,
        method=f"{directory.blocks} blocks; its own estimate is {share:.2f} of what it takes",
    )


def _times(prompts: list[bytes], holders: int) -> list[Row]:
    directory, reported = Directory(), 0
    asked = [*map(BlockHashes, prompts)]

    def store() -> None:
        nonlocal reported
        reported = _stored(directory, prompts, holders)

    def look_up() -> None:
        for names in asked:
            directory.longest(names)

    def cut() -> None:
        for holder in range(holders):
            for number in range(len(prompts), 0, -1):
                changes = BlockChanges(tier=Tier.DEVICE, cut=(CutRun(number=number, end=0),))
                directory.changed(Incarnation(f"worker-{holder}"), changes)

    stored_s, found_s, cut_s = _took_s(store), _took_s(look_up), _took_s(cut)
    assert directory.blocks == 0
    strands = len(prompts) * holders
    return [
        _row("a strand is stored", stored_s / strands * 1e6, "us"),
        _row("a reported block", stored_s / reported * 1e9, "ns"),
        _row(f"a prompt is looked up, holders: {holders}", found_s / len(prompts) * 1e6, "us"),
        _row("a strand is gone", cut_s / strands * 1e6, "us"),
        _row("a strand is stored, the directory is full", _full_s(prompts) * 1e6, "us"),
        _row("a strand of 1,000 grows by a block", _growth_s() * 1e6, "us"),
    ]


def _full_s(prompts: list[bytes]) -> float:
    """Each strand takes the place of another one."""
    directory, half = Directory(), len(prompts) // 2 // SHARING * SHARING
    _stored(directory, prompts[:half], 1)
    directory.most_bytes = directory.used_bytes
    taken_s = _took_s(lambda: _stored(directory, prompts[half:], 1, half))
    assert directory.dropped_blocks > directory.blocks / 2
    return taken_s / (len(prompts) - half)


def _growth_s() -> float:
    """As sequences that decode: each report tells of one more block."""
    directory, holder, strands, steps = Directory(), Incarnation("worker"), 1000, 20

    def changes(step: int) -> Iterator[BlockChanges]:
        for number in range(1, strands + 1):
            name = blake2b(b"%d %d" % (number, step), digest_size=HASH_BYTES).digest()
            run = StoredRun(number=number, parent=step and number, start=step, hashes=name)
            yield BlockChanges(tier=Tier.DEVICE, stored=(run,))

    told = [one for step in range(steps) for one in changes(step)]

    def tell() -> None:
        for one in told:
            directory.changed(holder, one)

    return _took_s(tell) / len(told)


def _long() -> list[Row]:
    """A prompt of a million tokens, in the pages in which a worker tells it."""
    ids = tuple(number % 50_000 for number in range(LONG_TOKENS))
    names = BlockNames(fingerprint="f", physical_format="p")

    def made() -> ChainNames:
        chain = names.chain("", LONG_TOKENS, BLOCK_TOKENS)
        chain.extend(ids, LONG_TOKENS)
        return chain.full(LONG_TOKENS)

    directory, given = Directory(), made().hashes()
    for at in range(0, len(given), PAGE_BLOCKS):
        page = given[at : at + PAGE_BLOCKS]
        run = StoredRun(number=1, parent=at and 1, start=at, hashes=page.packed)
        directory.changed(Incarnation("w"), BlockChanges(tier=Tier.DEVICE, stored=(run,)))
    assert directory.longest(made()) == {Incarnation("w"): len(given)}
    hit_s = min(_took_s(lambda: directory.longest(given)) for _ in range(20))
    named_s = min(_took_s(lambda: directory.longest(made())) for _ in range(5))
    hit = Row(
        name="a full hit of 1 M tokens, the names given",
        value=hit_s * 1e3,
        unit="ms",
        against="goal",
        against_value=GOAL_HIT_MS,
        goal=1.0,
        lower_is_better=True,
    )
    return [hit, _row("the same, its names made", named_s * 1e3, "ms")]


def _row(name: str, value: float, unit: str) -> Row:
    return Row(name=name, value=value, unit=unit, lower_is_better=True)


def _took_s(work: Callable[[], object]) -> float:
    gc.collect()
    began_s = time.perf_counter()
    work()
    return time.perf_counter() - began_s


if __name__ == "__main__":
    main()
