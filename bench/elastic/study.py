"""Elastic workers in the simulator, beside every static split of the same fleet.

    python -m bench.elastic.study swing --rate 10 [--minutes 20] [--seeds 1]
    python -m bench.elastic.study conversation --trace conversation_trace.jsonl --rate 3
    python -m bench.elastic.study step
    python -m bench.elastic.study day --minutes 60
    python -m bench.elastic.study steady --workers 4 --rate 2.5 --minutes 60
    python -m bench.elastic.study hopeless --rate 10 --minutes 8

For each cell: the share of offered requests that met their objectives, goodput, flips, and hours of
workers, over those of the whole fleet. `roles` begins with an even split, and flips; `elastic` also
adds and removes workers, of which it has `--begin` at first. bench/elastic/served.py and
bench/elastic/published.py say what the other ways do.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from statistics import fmean

from bench.elastic import loads
from bench.elastic.loads import H200_70B, SEEDS, START_UP, TPOT, TTFT, Fleet
from bench.elastic.published import FlipsByPrediction, as_arrow, as_xllm
from bench.elastic.served import (
    ScalesByLatency,
    ScalesByUse,
    Scaling,
    ServedLatency,
)
from cluster.config.schema import Config
from cluster.core.elastic.controller import ElasticPolicy
from cluster.sim.elastic import Life
from cluster.sim.results.report import is_good, report
from cluster.sim.simulation import ClusterSimulation, Scale, Simulated
from cluster.sim.trace import Outcome, TraceRequest

LOADS = ("swing", "conversation", "step", "day", "steady", "hopeless")
NUMBERS = ("elastic", "use", "latency")
"""Ways that change the number of workers."""
WAYS = ("static", "roles", *NUMBERS, "xllm", "arrow", "xllm, no admission", "arrow, no admission")
COOLDOWN = "120s"
MINUTE = 6
"""In tens of seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    load: str
    way: str
    prefill: int
    workers: int = H200_70B.workers
    begin: int | None = None
    rate: float = 1.0
    seed: int = 1
    minutes: float = 20.0
    trace: Path | None = None

    def requests(self) -> Sequence[TraceRequest]:
        match self.load:
            case "conversation":
                assert self.trace is not None
                return loads.conversation(self.trace)
            case "step":
                return loads.step(self.minutes, self.seed)
            case "day":
                return loads.day(self.minutes, self.seed)
            case "steady":
                return loads.steady(self.rate, self.minutes, self.seed)
            case "hopeless":
                return loads.hopeless(self.rate, self.minutes, self.seed)
            case _:
                return loads.swing(self.rate, self.minutes, self.seed)

    def scale(self) -> Scale:
        """The others have their rate already."""
        return Scale() if self.trace is None else Scale(rate=self.rate)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """`halves`: attainment of the earlier and of the later half of all requests; of a swing of
    twenty minutes these are its phases, and the best of each over all splits is what roles could
    reach that change at once. `late_flips`: after ten minutes. `hours`: of workers, over those of
    the whole fleet. `refused_late`: the share of the later half. `calm_s`: from when on no minute
    has more than a twentieth refused; `calm_tens_s`: no ten seconds, in which chance has a part."""

    cell: Cell
    offered: int
    attainment: float
    halves: tuple[float, float]
    goodput_per_s: float
    flips: int
    late_flips: int
    hours: float
    added: int
    left: int
    refused_late: float
    calm_s: float
    calm_tens_s: float
    took_s: float

    def line(self) -> str:
        cell = self.cell
        return (
            f"{cell.way:20s} {cell.prefill:2d} + {_began(cell) - cell.prefill:2d}  seed "
            f"{cell.seed}  {self.offered:6d} offered  attainment {100 * self.attainment:5.1f} %  "
            f"({100 * self.halves[0]:.1f}, {100 * self.halves[1]:.1f})  goodput "
            f"{self.goodput_per_s:6.2f}/s  flips {self.flips:3d}, after ten minutes "
            f"{self.late_flips:3d}  hours {self.hours:4.2f}, {self.added} came, {self.left} left  "
            f"refused in the later half {100 * self.refused_late:.1f} %, "
            f"a twentieth of a minute until {self.calm_s:.0f} s, of ten seconds until "
            f"{self.calm_tens_s:.0f} s  ({self.took_s:.0f} s)"
        )


def config_of(cell: Cell, fleet: Fleet) -> Config:
    began = _began(cell)
    bounds = {"min": began, "max": cell.workers} if cell.way == "elastic" else began
    pools: list[dict[str, object]] = [{"role": "auto", "replicas": bounds}]
    if cell.way not in ("roles", "elastic"):
        pools = [
            {"role": "prefill", "replicas": cell.prefill},
            {"role": "decode", "replicas": began - cell.prefill},
        ]
    simulation = {
        "seed": cell.seed,
        "profile": fleet.profile,
        "blocks": fleet.blocks,
        "block_size": 512,
        "kv": {"layers": fleet.kv_layers},
        "slo": {"ttft": TTFT, "tpot": TPOT},
        "start_up": START_UP,
    }
    file = {
        "workers": pools,
        "scheduler": {"prefill_chunk_tokens": 2048, "max_running_requests": 256},
        "simulation": simulation,
        "elastic": {"cooldown": COOLDOWN, "start_up": START_UP},
    }
    if cell.way.endswith("no admission"):
        file["router"] = {"admission": {"policy": "none"}}
    return Config.model_validate(file, strict=False)


def _began(cell: Cell) -> int:
    """Workers at first."""
    return cell.begin if cell.begin is not None and cell.way in NUMBERS else cell.workers


def policy_of(cell: Cell, simulation: ClusterSimulation) -> ElasticPolicy | None:
    """None: that of the cluster file."""
    served = ServedLatency(simulation)
    match cell.way.partition(",")[0]:
        case "use":
            return ScalesByUse(simulation, Scaling(most=cell.workers))
        case "latency":
            return ScalesByLatency(served, Scaling(most=cell.workers))
        case "xllm":
            return FlipsByPrediction(simulation, as_xllm)
        case "arrow":
            return FlipsByPrediction(simulation, as_arrow)
        case _:
            return None


def run(cell: Cell) -> Shown:
    began_s = time.monotonic()
    simulation = ClusterSimulation(config_of(cell, H200_70B), cell.requests(), cell.scale())
    simulation.elastic.policy = policy_of(cell, simulation) or simulation.elastic.policy
    simulated = simulation.run()
    found, lives = report(simulated), simulation.elastic.lives
    return Shown(
        cell=cell,
        offered=found.offered,
        attainment=found.attainment,
        halves=_halves(simulated),
        goodput_per_s=found.goodput_per_s,
        flips=len(simulated.flips),
        late_flips=sum(flip.at_s > 600 for flip in simulated.flips),
        hours=_worker_s(lives, simulated.ended_s) / simulated.ended_s / cell.workers,
        added=sum(life.since_s > 0 for life in lives),
        left=sum(life.until_s is not None for life in lives),
        refused_late=_refused_late(simulated.outcomes),
        calm_s=calm_s(simulated.outcomes, MINUTE),
        calm_tens_s=calm_s(simulated.outcomes, 1),
        took_s=time.monotonic() - began_s,
    )


def _worker_s(lives: Sequence[Life], ended_s: float) -> float:
    return sum(one.seconds(ended_s) for one in lives)


def _halves(simulated: Simulated) -> tuple[float, float]:
    good = [is_good(one, simulated.config.simulation.slo) for one in simulated.outcomes]
    middle = len(good) // 2
    return fmean(good[:middle]), fmean(good[middle:])


def _refused_late(outcomes: Sequence[Outcome]) -> float:
    late = outcomes[len(outcomes) // 2 :]
    return sum(bool(one.refused) for one in late) / len(late)


def calm_s(outcomes: Sequence[Outcome], tens: int) -> float:
    """One stretch of `tens` begins every ten seconds."""
    refused: dict[int, list[bool]] = {}  # ten seconds |-> their requests
    for one in outcomes:
        refused.setdefault(int(one.request.arrival_s // 10), []).append(bool(one.refused))
    of = {at: [*chain(*(refused.get(at + n, ()) for n in range(tens)))] for at in refused}
    return 10.0 * max((at + 1 for at in of if fmean(of[at]) > 0.05), default=0)


def cells(args: argparse.Namespace) -> Iterable[Cell]:
    one = Cell(
        load=args.load,
        way="",
        prefill=0,
        workers=args.workers,
        begin=args.begin,
        rate=args.rate,
        minutes=args.minutes,
        trace=args.trace,
    )
    splits = args.splits or range(1, args.workers)
    for seed in args.seeds:
        for way in args.ways:
            even = (args.begin if args.begin and way in NUMBERS else args.workers) // 2
            for prefill in splits if way == "static" else (even,):
                yield replace(one, way=way, prefill=prefill, seed=seed)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("load", choices=LOADS)
    parser.add_argument("--trace", type=Path, help="of `conversation`")
    parser.add_argument("--rate", type=float, default=1.0, help="requests/s, or trace x this")
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS[:1])
    parser.add_argument("--workers", type=int, default=H200_70B.workers, help="at most")
    parser.add_argument("--begin", type=int, help="workers at first, where their number changes")
    parser.add_argument("--splits", type=int, nargs="*", help="prefill workers; default: every one")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--processes", type=int, default=2)
    args = parser.parse_args()
    if (args.load == "conversation") != (args.trace is not None):
        parser.error("conversation: give --trace; others: none")
    with ProcessPoolExecutor(args.processes) as pool:
        for shown in pool.map(run, cells(args)):
            print(shown.line(), flush=True)


if __name__ == "__main__":
    main()
