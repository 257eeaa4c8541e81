"""Work that swings between the two pools of a live cluster, beside its simulation.

    python -m bench.live.simulated.swing [--runs 7] [--seconds 30]

One prefill worker and one decode worker of the bundled model, each on a core. First both kinds of
requests at half of what the cluster can do, which calibrates the simulator as
`bench.live.simulated.fidelity` does. Then at 1.5 times that rate long prompts with short answers,
of which the prefill pool has too many, and then short prompts with long answers. Goodput counts
both phases; each run has other arrivals. Needs a machine with nothing else on it.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from statistics import median

from bench.live.calibrate import Calibration, calibrate
from bench.live.offered import Mix
from bench.live.points import Point
from bench.live.runs import Plan, run
from bench.live.stack import Policy
from bench.live.subject import Subject, of_bundled
from bench.serving.overload import corpus

BOTH = Mix(prompt_tokens=(128, 1792), output_tokens=(16, 224))
LONG_PROMPTS = Mix(prompt_tokens=(1024, 1792), output_tokens=(16, 48))
LONG_ANSWERS = Mix(prompt_tokens=(128, 256), output_tokens=(160, 224))
MIXES = (BOTH, LONG_PROMPTS, LONG_ANSWERS)
FACTORS = (0.5, 1.5, 1.5)
"""Times the capacity for both kinds together."""
GOAL = 0.15


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=30.0, help="of each phase")
    options = parser.parse_args()
    subject, text = of_bundled(BOTH), corpus()
    known = calibrate(subject, text)
    print(f"{subject.text}: capacity {known.capacity_per_s:.1f}/s", flush=True)
    print("goodput/s live, simulated: long prompts; long answers; both", flush=True)
    lived, beside = [], []
    for live, simulated in runs(subject, known, text, options.runs, options.seconds):
        lived.append(live)
        beside.append(simulated)
    ratio = median(lived) / median(beside)
    reached = "reached" if abs(ratio - 1) <= GOAL else "NOT reached"
    print(
        f"median live {median(lived):.2f} ({min(lived):.2f} to {max(lived):.2f}), simulated "
        f"{median(beside):.2f} ({min(beside):.2f} to {max(beside):.2f}): {ratio:.2f}, {reached}"
    )


def runs(
    subject: Subject, known: Calibration, text: Sequence[int], count: int, seconds: float
) -> Iterator[tuple[float, float]]:
    """Goodput of both phases, live and simulated; printed as it comes."""
    for seed in range(count):
        plan = Plan(
            policy=Policy(admission="predictive", ladder=True),
            factors=FACTORS,
            mixes=MIXES,
            seconds=seconds,
            subject=subject,
            seed=seed,
            patience_s=8.0,
            simulates=True,
        )
        pairs = [_goodput(one) for one in run(plan, known, text).points[1:]]
        both = tuple(sum(each) / len(pairs) for each in zip(*pairs, strict=True))
        told = "; ".join(f"{live:.2f}, {simulated:.2f}" for live, simulated in (*pairs, both))
        print(f"run {seed}: {told}", flush=True)
        yield both


def _goodput(point: Point) -> tuple[float, float]:
    assert point.simulated is not None
    return point.goodput_per_s, point.simulated.goodput_per_s


if __name__ == "__main__":
    main()
