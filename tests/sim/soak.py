"""Random schedules of whole clusters with new seeds, for as long as one likes: `make soak-sim`.

python -m tests.sim.soak --minutes 60
python -m tests.sim.soak --seed 17      one seed, with a look at all laws after each event
"""

from __future__ import annotations

import argparse
import logging
import random
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from multiprocessing import get_context

from tests.sim import replays, simulation
from tests.sim.fleet import Result
from tests.sim.replays import REPLAY
from tests.sim.scale import small

LIVES = 50
"""A process runs so many worlds: what they leave in caches goes with it."""
MOST_FAILURES = 10

Outcome = tuple[int, Result | None, str]
"""seed, result, and what was raised"""


def try_seed(seed: int) -> Outcome:
    logging.disable()
    try:
        with small():
            return seed, replays.run(seed), ""
    except AssertionError:
        return seed, None, traceback.format_exc()


def outcomes(first: int, until_s: float, processes: int) -> Iterator[Outcome]:
    """Of one seed after the other, until then."""
    with get_context("spawn").Pool(processes, maxtasksperchild=LIVES) as pool:
        seed = first
        while time.monotonic() < until_s:
            batch = range(seed, seed + 4 * processes)
            yield from pool.imap_unordered(try_seed, batch)
            seed = batch.stop


def soak(first: int, minutes: float, processes: int) -> int:
    """Returns the number of seeds that have failed."""
    happened: Counter[str] = Counter()
    ends: Counter[str] = Counter()
    failed: list[int] = []
    events = worlds = 0
    for seed, result, raised in outcomes(first, time.monotonic() + 60 * minutes, processes):
        worlds += 1
        if result is None:
            failed.append(seed)
            print(raised, flush=True)
            if len(failed) == MOST_FAILURES:
                break
            continue
        events += result.events
        happened += result.happened
        ends += Counter({end.split(":")[0]: number for end, number in result.ends.items()})
    for name, number in sorted(happened.items()):
        print(f"{number:9} {name}")
    print(f"{worlds} worlds from seed {first}, {events} events, requests: {dict(ends)}")
    for seed in failed:
        print("failed: " + REPLAY.format(seed=seed))
    return len(failed)


def replay(seed: int, every: int) -> int:
    simulation.VALIDATE_EVERY = every
    with small():
        result = replays.run(seed)
    print(f"seed {seed} is well: {result.events} events, requests: {dict(result.ends)}")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--first", type=int, help="the first seed; without it any")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--seed", type=int, help="only this one, here")
    parser.add_argument("--every", type=int, default=1, help="events between two looks, at --seed")
    asked = parser.parse_args()
    if asked.seed is not None:
        return replay(asked.seed, asked.every)
    first = random.SystemRandom().randrange(1_000, 10**9) if asked.first is None else asked.first
    return min(1, soak(first, asked.minutes, asked.processes))


if __name__ == "__main__":
    sys.exit(main())
