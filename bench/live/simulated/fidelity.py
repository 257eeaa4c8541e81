"""Does the simulator predict? Real processes under 0.5, 1, 2 and 4 times what they can do; the
simulator is calibrated with the first stretch only, and serves the same arrivals.

    python -m bench.live.simulated.fidelity [--model bundled smollm] [--seeds 5] [--seconds 30]

Calibrated are: step times as each worker measured them at its start; by how much its steps at 0.5 x
differed from them, replayed in stretches; the processor time of the router, of turns of a worker's
loop and of jobs of its transfer thread; and the lengths of answers. Blocks have 16 tokens, outputs
end by themselves (bundled model; random weights never do). Each seed is a run of its own: other
arrivals, and other stretches. Needs a machine with nothing else on it.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median

from bench.live.calibrate import calibrate
from bench.live.points import Point
from bench.live.runs import Phases, Plan, run
from bench.live.stack import Policy
from bench.live.subject import SUBJECTS
from bench.serving.overload import corpus

FACTORS = (0.5, 1.0, 2.0, 4.0)
"""Times the capacity. The simulator is told what was measured at the first."""
GOALS = {"goodput/s": 0.10, "TTFT p50": 0.15, "TTFT p99": 0.30}
FIGURES: dict[str, tuple[Callable[[Point], float | None], Callable[[Point], float | None]]] = {
    "goodput/s": (
        lambda one: one.goodput_per_s,
        lambda one: None if one.simulated is None else one.simulated.goodput_per_s,
    ),
    "TTFT p50": (
        lambda one: one.ttft_p50_s,
        lambda one: None if one.simulated is None else one.simulated.ttft_p50_s,
    ),
    "TTFT p99": (
        lambda one: one.ttft_p99_s,
        lambda one: None if one.simulated is None else one.simulated.ttft_p99_s,
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", nargs="+", choices=SUBJECTS, default=[*SUBJECTS])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=30.0, help="at each rate")
    parser.add_argument("--json", type=Path, help="also write all figures to this file")
    options = parser.parse_args()
    found = {name: list(runs(name, options.seeds, options.seconds)) for name in options.model}
    if options.json:
        plain = {
            name: [[asdict(one) for one in each[0]] for each in of] for name, of in found.items()
        }
        options.json.write_text(json.dumps(plain) + "\n")


def runs(model: str, seeds: int, seconds: float) -> Iterator[tuple[list[Point], list[Phases]]]:
    """Printed as they come, and all together at the end."""
    own_ends, text = model == "bundled", corpus()
    points: list[Point] = []
    phases: list[Phases] = []
    with SUBJECTS[model](own_ends=own_ends) as subject:
        known = calibrate(subject, text)
        print(f"\n{subject.text}: capacity {known.capacity_per_s:.1f}/s", flush=True)
        for seed in range(seeds):
            plan = Plan(
                policy=Policy(admission="predictive", ladder=True),
                factors=FACTORS,
                seconds=seconds,
                subject=subject,
                seed=seed,
                patience_s=8.0,
                simulates=True,
            )
            done = run(plan, known, text)
            points += done.points
            phases += done.phases
            show_points(f"seed {seed}", done.points)
            yield done.points, done.phases
    show_points(f"{model}, medians of {seeds} seeds", points)
    show_phases(phases)


def show_points(title: str, points: Sequence[Point]) -> None:
    heads = [f"{name}: live, simulated, ratio" for name in FIGURES]
    print(f"\n{title}\n\n| load | {' | '.join(heads)} | kept: live, simulated |")
    print("|---" * (len(FIGURES) + 2) + "|")
    for factor in dict.fromkeys(one.factor for one in points):
        of = [one for one in points if one.factor == factor]
        cells = [_compared(name, of) for name in FIGURES]
        live = median(one.attainment for one in of)
        beside = median(one.simulated.attainment for one in of if one.simulated is not None)
        print(f"| {factor:g} x | {' | '.join(cells)} | {live:.1%}, {beside:.1%} |", flush=True)


def _compared(name: str, points: Sequence[Point]) -> str:
    """Bold where the goal is missed."""
    lived, simulated = FIGURES[name]
    pairs = [(lived(one), simulated(one)) for one in points]
    known = [(a, b) for a, b in pairs if a is not None and b is not None]
    if not known:
        return ""
    live, beside = (median(each) for each in zip(*known, strict=True))
    ratio = beside / live if live else float("nan")
    scale = 1.0 if name == "goodput/s" else 1000.0
    mark = "" if abs(ratio - 1) <= GOALS[name] else "**"
    return f"{scale * live:.3g}, {scale * beside:.3g}, {mark}{ratio:.2f}{mark}"


def show_phases(phases: Sequence[Phases]) -> None:
    """Which part of the way explains a difference."""
    names = dict.fromkeys(name for one in phases for name in one.live)
    factors = [*dict.fromkeys(one.factor for one in phases)]
    print("\nMedians of the ledger's phases, ms: live, simulated\n")
    print(f"| phase | {' | '.join(f'{factor:g} x' for factor in factors)} |")
    print("|---" * (len(factors) + 1) + "|")
    for name in names:
        cells = [
            _phase(name, [one for one in phases if one.factor == factor]) for factor in factors
        ]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


def _phase(name: str, phases: Sequence[Phases]) -> str:
    live = [one.live[name] for one in phases if name in one.live]
    beside = [one.simulated[name] for one in phases if name in one.simulated]
    return ", ".join(f"{1000 * median(each):.1f}" if each else "-" for each in (live, beside))


if __name__ == "__main__":
    main()
