"""How much noise in step times swings admission: simulated goodput, and how much of what was
admitted kept its objectives, for each noise, correlation and load.

    python -m bench.router.damping [--seeds 5] [--loads 1 2 4] [--shape roomy]

One prefill and one decode worker, KV blocks of 16 tokens, Poisson arrivals, outputs of unknown
lengths. Prefill is the bottleneck, as in `bench.serving.overload` with the bundled model. `roomy`:
objectives are 8 and 6 times what a request takes alone, as there. `tight`: 8 and 3 times, so that a
token may take 2.3 times what is usual under load, as live tokens may there. The capacity is what is
done without noise and without admission.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from math import log
from random import Random
from statistics import mean, median

from cluster.config.load import load_config
from cluster.config.overrides import Override
from cluster.sim.results.output import simulate
from cluster.sim.results.report import Report, is_good
from cluster.sim.simulation import Scale
from cluster.sim.trace import Outcome, TraceRequest
from kvrelay.types import value

SIGMAS = (0.0, 0.1, 0.2, 0.4)
CORRELATIONS_S = (0.0, 0.1, 1.0)
LOADS = (1.0, 2.0, 4.0)
SECONDS, LEARNING_S, BIN_S = 24.0, 6.0, 6.0
"""Of arrivals; what comes in the first of them only teaches the router."""
SETTINGS = (
    "workers.0.replicas=1",
    "workers.1.replicas=1",
    "scheduler.max_running_requests=32",
    "scheduler.prefill_chunk_tokens=256",
    "simulation.most_steps=16",
    "simulation.slo.told=false",
    "simulation.blocks=6000",
    "simulation.kv={layers: 8, heads: 2, head_dim: 64}",
    "simulation.fabric={latency: 0.1ms, bandwidth: 5GB, router_latency: 0.5ms}",
)


PREFILL = "prefill_overhead_s: 0.0015, prefill_token_s: 0.00004, prefill_pair_s: 0.000000012, "


@value
class Shape:
    """Of prompts: uniform. Of outputs: log-normal, `most` at most, which is what all ask for."""

    prompt: tuple[int, int]
    output: float
    spread: float
    most: int
    ttft_s: float
    tpot_s: float
    profile: str
    """Keys of a linear one."""

    def settings(self) -> Iterator[str]:
        ttft, tpot = f"{1000 * self.ttft_s:g}ms", f"{1000 * self.tpot_s:g}ms"
        yield from SETTINGS
        yield f"simulation.profile={{kind: linear, {self.profile}}}"
        yield f"simulation.max_tokens={self.most}"
        yield f"simulation.slo.ttft={ttft}"
        yield f"simulation.slo.tpot={tpot}"
        yield f"qos.tiers={{default: {{default: true, ttft: {ttft}, tpot: {tpot}}}}}"

    def requests(self, per_s: float, seconds: float, seed: int) -> list[TraceRequest]:
        rng, made = Random(seed), []
        at_s = rng.expovariate(per_s)
        while at_s < seconds:
            output = min(
                self.most, max(2, round(rng.lognormvariate(log(self.output), self.spread)))
            )
            prompt = rng.randint(*self.prompt)
            made.append(TraceRequest(arrival_s=at_s, input_tokens=prompt, output_tokens=output))
            at_s += rng.expovariate(per_s)
        return made


ROOMY = Shape(
    prompt=(1024, 1792),
    output=45,
    spread=0.9,
    most=256,
    ttft_s=0.64,
    tpot_s=0.0186,
    profile=PREFILL + "decode_knots: [[1, 0.003], [4, 0.0045], [16, 0.009], [32, 0.016]], "
    "decode_kv_token_s: 0.00000008",
)
SHAPES = {"roomy": ROOMY, "tight": replace(ROOMY, tpot_s=0.0095)}


@value
class Noise:
    sigma: float
    correlation_s: float

    @property
    def text(self) -> str:
        return f"{self.sigma:g}/{self.correlation_s:g}s" if self.sigma else "none"

    def settings(self) -> Iterator[str]:
        yield f"simulation.noise.sigma={self.sigma}"
        if self.correlation_s:
            yield f"simulation.noise.correlation={1000 * self.correlation_s:g}ms"


NOISES = (
    Noise(sigma=0.0, correlation_s=0.0),
    *(
        Noise(sigma=sigma, correlation_s=correlation_s)
        for sigma, correlation_s in product(SIGMAS[1:], CORRELATIONS_S)
    ),
)


@value
class Ran:
    """After the router has learnt. `swing`: the range of its bins' goodput, by their median."""

    goodput_per_s: float
    kept: float
    late_first: float
    swing: float
    level_changes: int


def ran(report: Report, outcomes: Sequence[Outcome], slo: object) -> Ran:
    late = [one for one in outcomes if one.request.arrival_s >= LEARNING_S]
    good = [one for one in late if is_good(one, slo)]  # type: ignore[arg-type]
    admitted = [one for one in late if not one.refused]
    counts = [0] * round((SECONDS - LEARNING_S) / BIN_S)
    for one in good:
        counts[int((one.request.arrival_s - LEARNING_S) / BIN_S)] += 1
    late_first = sum((one.ttft_s or 9.0) > report.ttft_slo_s for one in admitted)
    return Ran(
        goodput_per_s=len(good) / (SECONDS - LEARNING_S),
        kept=len(good) / len(admitted) if admitted else 1.0,
        late_first=late_first / len(admitted) if admitted else 0.0,
        swing=(max(counts) - min(counts)) / max(1, median(counts)),
        level_changes=report.level_changes,
    )


def run(shape: Shape, noise: Noise, per_s: float, seed: int, *settings: str) -> Ran:
    chosen = (*shape.settings(), *noise.settings(), f"simulation.seed={seed}", *settings)
    config = load_config(None, map(Override.parse, chosen))
    result = simulate(config, shape.requests(per_s, SECONDS, seed), Scale())
    return ran(result.report, result.outcomes, config.simulation.slo)


def capacity_per_s(shape: Shape) -> float:
    """Done per second where far too many are taken."""
    chosen = (*shape.settings(), "router.admission.policy=none")
    config = load_config(None, map(Override.parse, chosen))
    return simulate(config, shape.requests(30.0, 20.0, 0), Scale()).report.completed_per_s


HEAD = (
    *("load", "noise", "goodput/s", "lowest, highest", "kept", "lowest"),
    *("late first", "swing", "level changes"),
)


@value
class Row:
    """All seeds of one noise at one load."""

    noise: Noise
    load: float
    runs: tuple[Ran, ...]

    @property
    def goodput_per_s(self) -> float:
        return mean(one.goodput_per_s for one in self.runs)

    @property
    def kept(self) -> float:
        return mean(one.kept for one in self.runs)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--loads", type=float, nargs="+", default=[*LOADS])
    parser.add_argument("--shape", choices=SHAPES, default="roomy")
    parser.add_argument("--noises", nargs="+", help="only these: none 0.4/0.1s")
    parser.add_argument("--set", action="append", default=[], help="key=value of the cluster file")
    options = parser.parse_args()
    shape = SHAPES[options.shape]
    capacity = capacity_per_s(shape)
    print(f"{options.shape}: capacity {capacity:.2f}/s\n")
    rows = []
    for load in options.loads:
        print(f"| {' | '.join(HEAD)} |\n{'|---' * len(HEAD)}|")
        for noise in NOISES:
            if options.noises is None or noise.text in options.noises:
                runs = (
                    run(shape, noise, load * capacity, seed, *options.set)
                    for seed in range(options.seeds)
                )
                rows.append(Row(noise=noise, load=load, runs=tuple(runs)))
                show(rows[-1])
        summarise([row for row in rows if row.load == load])


def show(row: Row) -> None:
    goodputs = [one.goodput_per_s for one in row.runs]
    cells = (
        f"{row.load:g} x",
        row.noise.text,
        f"{row.goodput_per_s:.2f}",
        f"{min(goodputs):.2f}, {max(goodputs):.2f}",
        f"{row.kept:.1%}",
        f"{min(one.kept for one in row.runs):.1%}",
        f"{mean(one.late_first for one in row.runs):.1%}",
        f"{mean(one.swing for one in row.runs):.2f}",
        f"{mean(one.level_changes for one in row.runs):.1f}",
    )
    print(f"| {' | '.join(cells)} |", flush=True)


def summarise(rows: Sequence[Row]) -> None:
    goodputs = [row.goodput_per_s for row in rows]
    runs = [one.goodput_per_s for row in rows for one in row.runs]
    kept = min(row.kept for row in rows)
    print(
        f"\ngoodput over all noises {min(goodputs):.2f} to {max(goodputs):.2f}: "
        f"{(max(goodputs) - min(goodputs)) / median(goodputs):.1%} of the median (single runs "
        f"{(max(runs) - min(runs)) / median(runs):.1%}); kept at least {kept:.1%}\n"
    )


if __name__ == "__main__":
    main()
