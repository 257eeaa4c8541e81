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

All are timed in turn, and medians compared; with --grid the least. With `--device cuda` both
processes are on the one device, over cuda_ipc; nixl and ucx then have slabs and pools in its memory
and move them by UCX's own CUDA transport, as they would by RDMA between hosts.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

import psutil
import torch

from bench.report import Row, print_table, write_json
from bench.transfer.apart import apart, usable
from bench.transfer.grid import grid_rows
from bench.transfer.handoff import handoff_rows
from bench.transfer.pair import PAIRS, REHEARSAL
from bench.transfer.sender import MESSAGE_LINKS
from bench.transfer.shape import Shape
from bench.transfer.speed import rows_of
from bench.transfer.steady import steady_row
from bench.transfer.timeline.profile import profile_rows

WORKER_LINKS = ("shm", "cuda_ipc", *MESSAGE_LINKS)


def main() -> None:
    args = _arguments()
    torch.set_num_threads(1)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    shape = Shape(
        layers=args.layers, tokens=args.tokens, device=args.device, chunk_tokens=args.chunk_tokens
    )
    rows = _rows(args, shape, args.only or usable(args.device))
    if args.format == "json":
        print(json.dumps([row.as_json() for row in rows], indent=2))
    else:
        print_table("Transfer", rows)
    if args.json:
        write_json(args.json, rows)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    parser.add_argument("--format", choices=["table", "json"], default="table")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=7500)
    parser.add_argument("--layers", type=int, default=32, help="of 32; fewer need less memory")
    parser.add_argument("--chunk-tokens", type=int, default=512, help="what a slab holds on CUDA")
    parser.add_argument("--only", nargs="+", metavar="TRANSPORT", help="measure these alone")
    parser.add_argument("--steady", type=int, metavar="N", help="N small transfers instead")
    parser.add_argument("--grid", action="store_true", help="how often the right way is chosen")
    parser.add_argument("--handoff", action="store_true", help="two real workers instead")
    parser.add_argument(
        "--profile",
        type=Path,
        metavar="FILE.json",
        help="two real workers instead, and a Chrome trace of what they do",
    )
    parser.add_argument("--rehearse", action="store_true", help="workers have a tiny model")
    return parser.parse_args()


def _rows(args: argparse.Namespace, shape: Shape, names: list[str]) -> list[Row]:
    if not names:
        sys.exit(f"KV on {args.device} can't be moved here")
    pair = REHEARSAL if args.rehearse else PAIRS[args.device]
    between_workers = [name for name in names if name in WORKER_LINKS]
    if args.profile:
        return profile_rows(args.profile, pair, between_workers, args.repeats)
    if args.handoff:
        return handoff_rows(pair, between_workers, args.repeats)
    _check_room(shape)
    rows: list[Row] = []
    for scheme in names:
        if args.steady:
            rows.append(apart(steady_row, scheme, args.steady, args.device))
        elif args.grid:
            rows += apart(grid_rows, scheme, shape, args.repeats)
        else:
            rows += apart(rows_of, scheme, shape, args.repeats)
    return rows


def _check_room(shape: Shape) -> None:
    needed = 3 * shape.nbytes + 2**30
    room = psutil.virtual_memory().available
    if shape.device == "cpu" and needed > room:
        fewer = int(shape.layers * (room - 2**30) / (3 * shape.nbytes))
        sys.exit(
            f"{needed / 2**30:.1f} GiB are needed and {room / 2**30:.1f} are free: --layers {fewer}"
        )


if __name__ == "__main__":
    main()
