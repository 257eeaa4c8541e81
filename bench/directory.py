"""Block operations per second of the router's directory, in one thread: stored, looked up, removed.

python -m bench.directory [--blocks 100000] [--holders 8]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from hashlib import blake2b

from kvrelay.messages import BlockChanges
from kvrelay.types import Incarnation, Tier
from router.core.state.directory import Directory

_BATCH_BLOCKS = 64
_PROMPT_BLOCKS = 512


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, default=100_000, help="of each holder")
    parser.add_argument("--holders", type=int, default=8)
    options = parser.parse_args()
    hashes = tuple(blake2b(i.to_bytes(8), digest_size=32).digest() for i in range(options.blocks))
    holders = [Incarnation(f"worker-{i}") for i in range(options.holders)]
    directory, operations = Directory(), options.blocks * options.holders

    def change(**kinds: bool) -> None:
        for some in _batches(hashes, _BATCH_BLOCKS):
            for holder in holders:
                stored, removed = (some, ()) if kinds["stored"] else ((), some)
                directory.changed(holder, _changes(stored, removed))

    def look_up() -> None:
        for prompt in _batches(hashes, _PROMPT_BLOCKS):
            found = directory.longest(prompt)
            assert set(found.values()) == {len(prompt)}

    _report("stored", operations, lambda: change(stored=True))
    _report("looked up", operations, look_up)
    _report("removed", operations, lambda: change(stored=False))
    assert directory.entries == 0


def _changes(stored: tuple[bytes, ...], removed: tuple[bytes, ...]) -> BlockChanges:
    return BlockChanges(tier=Tier.DEVICE, stored=stored, removed=removed)


def _batches(hashes: tuple[bytes, ...], size: int) -> Iterator[tuple[bytes, ...]]:
    return (hashes[at : at + size] for at in range(0, len(hashes), size))


def _report(name: str, operations: int, work: Callable[[], None]) -> None:
    started_s = time.perf_counter()
    work()
    rate = operations / (time.perf_counter() - started_s)
    print(f"{name:10} {rate / 1e6:6.2f} M blocks/s (aim: 0.2)")


if __name__ == "__main__":
    main()
