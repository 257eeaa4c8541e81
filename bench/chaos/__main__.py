"""Faults under load, on one machine.

    python -m bench.chaos --minutes 20 --every-s 10 --streams 64
    python -m bench.chaos --minutes 5 --on-ray

Routers, prefill and decode workers and a pool node have the bundled model in float32. They are
plain processes, or with --on-ray what `kvrelay serve` starts, its controller included. First all
requests are asked twice without any fault: that is the capacity, and these are the expected tokens.
Then 0.8 of that is offered, and every few seconds a fault comes, drawn from the seed. A plain
process that was killed is started again after a second. A fault never takes the last router or the
last worker.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from functools import partial
from pathlib import Path

from bench.chaos.clusters.plain import Shape
from bench.chaos.clusters.processes import go_before_others
from bench.chaos.prompts import Lengths
from bench.chaos.run import Plan, run
from bench.chaos.shown import show, verdict


def _parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=20.0, help="of faults")
    parser.add_argument("--every-s", type=float, default=10.0, help="seconds between two faults")
    parser.add_argument("--streams", type=int, default=64, help="at least so many at each fault")
    parser.add_argument("--share", type=float, default=0.8, help="of capacity that is offered")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", nargs="*", default=[], help="faults whose text has one of these")
    parser.add_argument("--one-host", action="store_true", help="no network namespace")
    parser.add_argument("--on-ray", action="store_true", help="and faults of the controller")
    parser.add_argument("--output", type=int, nargs=2, default=Lengths().output, help="tokens")
    parser.add_argument("--routers", type=int, default=2)
    parser.add_argument("--prefill", type=int, default=2)
    parser.add_argument("--decode", type=int, default=2)
    parser.add_argument("--logs", type=Path, help="a folder; default: one in build/chaos")
    return parser.parse_args()


def main() -> int:
    args = _parsed()
    plan = Plan(
        seed=args.seed,
        minutes=args.minutes,
        every_s=args.every_s,
        streams=args.streams,
        share=args.share,
        lengths=Lengths(output=tuple(args.output)),
        shape=Shape(routers=args.routers, prefill=args.prefill, decode=args.decode),
        only=args.only,
        second_host=not (args.one_host or args.on_ray),
        on_ray=args.on_ray,
        logs=args.logs or Path("build/chaos", time.strftime("%Y%m%d-%H%M%S")).resolve(),
    )
    go_before_others()
    found = asyncio.run(run(plan, partial(print, flush=True)))
    given = verdict(found)
    show(plan, found, given)
    return 0 if given.is_good else 1


if __name__ == "__main__":
    sys.exit(main())
