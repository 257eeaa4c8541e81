"""Elastic roles in the simulator, beside every static split of the same fleet.

    python -m bench.elastic.study swing --rate 10 [--minutes 20] [--seeds 1]
    python -m bench.elastic.study conversation --trace conversation_trace.jsonl --rate 3

For each cell: the share of offered requests that met their objectives, goodput, flips. `auto`
begins with an even split. `served` flips by served latencies over their objectives (one worker at a
time), as controllers do that don't see what is refused; with admission, and with none.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from bench.elastic.loads import H200_70B, SEEDS, TPOT, TTFT, Fleet, conversation, swing
from bench.elastic.served import ServedLatency
from cluster.config.schema import Config
from cluster.sim.report import report
from cluster.sim.simulation import ClusterSimulation, Scale
from cluster.sim.trace import TraceRequest

WAYS = ("static", "auto", "served", "served, no admission")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    way: str
    prefill: int
    rate: float
    seed: int
    minutes: float
    trace: Path | None

    def requests(self) -> Sequence[TraceRequest]:
        if self.trace is not None:
            return conversation(self.trace)
        return swing(self.rate, self.minutes, self.seed)

    def scale(self) -> Scale:
        """A swing has its rate already."""
        return Scale() if self.trace is None else Scale(rate=self.rate)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    cell: Cell
    offered: int
    attainment: float
    goodput_per_s: float
    flips: int
    late_flips: int  # after ten minutes
    took_s: float

    def line(self) -> str:
        cell = self.cell
        return (
            f"{cell.way:22s} {cell.prefill:2d} + {H200_70B.workers - cell.prefill:2d}  seed "
            f"{cell.seed}  {self.offered:6d} offered  attainment {100 * self.attainment:5.1f} %  "
            f"goodput {self.goodput_per_s:6.2f}/s  flips {self.flips:3d}, after ten minutes "
            f"{self.late_flips:3d}  ({self.took_s:.0f} s)"
        )


def config_of(cell: Cell, fleet: Fleet) -> Config:
    decode = fleet.workers - cell.prefill
    pools = [{"role": "auto", "replicas": fleet.workers}]
    if cell.way == "static":
        pools = [
            {"role": "prefill", "replicas": cell.prefill},
            {"role": "decode", "replicas": decode},
        ]
    simulation = {
        "seed": cell.seed,
        "profile": fleet.profile,
        "blocks": fleet.blocks,
        "block_size": 512,
        "kv": {"layers": fleet.kv_layers},
        "slo": {"ttft": TTFT, "tpot": TPOT},
    }
    file = {
        "workers": pools,
        "scheduler": {"prefill_chunk_tokens": 2048, "max_running_requests": 256},
        "simulation": simulation,
    }
    if cell.way == "served, no admission":
        file["router"] = {"admission": {"policy": "none"}}
    return Config.model_validate(file, strict=False)


def run(cell: Cell) -> Shown:
    began_s = time.monotonic()
    simulation = ClusterSimulation(config_of(cell, H200_70B), cell.requests(), cell.scale())
    if cell.way.startswith("served"):
        simulation.elastic.policy = ServedLatency(simulation)
    simulated = simulation.run()
    found = report(simulated)
    return Shown(
        cell=cell,
        offered=found.offered,
        attainment=found.attainment,
        goodput_per_s=found.goodput_per_s,
        flips=len(simulated.flips),
        late_flips=sum(flip.at_s > 600 for flip in simulated.flips),
        took_s=time.monotonic() - began_s,
    )


def cells(args: argparse.Namespace) -> Iterable[Cell]:
    workers = H200_70B.workers
    splits = args.splits or range(1, workers)
    for seed in args.seeds:
        for way in args.ways:
            for prefill in splits if way == "static" else (workers // 2,):
                yield Cell(
                    way=way,
                    prefill=prefill,
                    rate=args.rate,
                    seed=seed,
                    minutes=args.minutes,
                    trace=args.trace,
                )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("swing", "conversation"))
    parser.add_argument("--trace", type=Path, help="of `conversation`")
    parser.add_argument("--rate", type=float, required=True, help="requests/s, or trace x this")
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS[:1])
    parser.add_argument("--splits", type=int, nargs="*", help="prefill workers; default: every one")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--processes", type=int, default=2)
    args = parser.parse_args()
    if (args.what == "conversation") != (args.trace is not None):
        parser.error("conversation: give --trace; swing: none")
    with ProcessPoolExecutor(args.processes) as pool:
        for shown in pool.map(run, cells(args)):
            print(shown.line(), flush=True)


if __name__ == "__main__":
    main()
