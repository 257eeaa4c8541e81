"""Up to four times what the machine can do, offered to real processes under each admission policy;
then the same arrivals in the simulator.

The bundled model, or with `--model smollm` one whose steps take ten times as long; one prefill and
one decode worker; Poisson arrivals, whatever the server does. Objectives are multiples of the
latencies without load. The ladder (docs/qos.md) stands beside `predictive` only: the baselines are
without it, unless `--ladder` says otherwise. `--append FILE` keeps results, so that policies and
rates can be measured one by one. With `--routers N` as many share the workers, and take the
arrivals in turn.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from itertools import product
from pathlib import Path

from bench.live.calibrate import TPOT_FACTOR, TTFT_FACTOR, Calibration, calibrate
from bench.live.points import Point
from bench.live.results import Results, read, write
from bench.live.runs import Plan, run
from bench.live.shown import draw_scatter, show_points, show_scatter
from bench.live.stack import Policy
from bench.live.subject import SUBJECTS, Subject
from bench.report import Row, print_table, write_json
from engine.bundled import checkpoint_path
from engine.checkpoint import find_text_files
from router.tokenizer import TextTokenizer

POLICIES = ("none", "queue_limit", "early_rejection", "predictive")
FACTORS = (0.5, 1.0, 2.0, 4.0)
LADDER: dict[str, Callable[[str], bool]] = {
    "auto": lambda policy: policy == "predictive",
    "on": lambda _: True,
    "off": lambda _: False,
}
KEPT_GOAL, GOODPUT_GOAL, REFUSAL_GOAL_S, SIMULATED_GOAL = 0.95, 0.9, 0.01, 0.15


def corpus() -> tuple[int, ...]:
    """The documentation's text."""
    pages = sorted(Path(__file__).parents[1].glob("docs/*.md"))
    tokenizer = TextTokenizer.load(find_text_files(str(checkpoint_path()), None))
    return tokenizer.encode("\n".join(page.read_text() for page in pages))


def rows(results: Results, subject: Subject) -> list[Row]:
    assert results.calibration is not None
    method = (
        f"{subject.text}; capacity {results.calibration.capacity_per_s:.1f}/s in a "
        f"closed loop; TTFT within {TTFT_FACTOR:g} x and TPOT within {TPOT_FACTOR:g} x of the "
        "median without load"
    )
    found: list[Row] = []
    for policy, ladder in product(POLICIES, (False, True)):
        points = [p for p in results.points if (p.policy, p.ladder) == (policy, ladder)]
        points = [p for p in points if not p.own_ends and p.routers == 1]
        if points:
            beside = "with" if ladder else "without"
            found += _goodput_rows(policy, points, f"{method}; {beside} the ladder")
    return found


def _goodput_rows(policy: str, points: list[Point], method: str) -> list[Row]:
    best = max(p.goodput_per_s for p in points)
    most = max(points, key=lambda p: p.factor)
    worst = min(points, key=lambda p: p.attainment)
    found = [
        Row(
            name=f"goodput at {most.factor:g} x, {policy}",
            value=most.goodput_per_s,
            unit="/s",
            against="its best",
            against_value=best,
            goal=GOODPUT_GOAL if policy == "predictive" else None,
            method=method,
        ),
        Row(
            name=f"admitted that kept their objectives, worst rate ({worst.factor:g} x), {policy}",
            value=100 * worst.attainment,
            unit="%",
            against="all",
            against_value=100.0,
            goal=KEPT_GOAL if policy == "predictive" else None,
            method=method,
        ),
    ]
    refusals = [p.refusal_p99_s for p in points if p.refusal_p99_s is not None]
    if refusals:
        found.append(
            Row(
                name=f"received to refused p99, worst rate, {policy}",
                value=1000 * max(refusals),
                unit="ms",
                against="limit",
                against_value=1000 * REFUSAL_GOAL_S,
                goal=1.0,
                lower_is_better=True,
                method=method,
            )
        )
    return found


def _calibration(
    results: Results, path: Path | None, subject: Subject, text: tuple[int, ...]
) -> Calibration:
    if results.calibration is None:
        results.calibration = calibrate(subject, text)
        if path:
            write(path, results)
    known = results.calibration
    print(
        f"without load TTFT {1000 * known.ttft_s:.0f} ms, TPOT {1000 * known.tpot_s:.1f} ms; "
        f"objectives {1000 * known.objectives.ttft_s:.0f} ms, "
        f"{1000 * known.objectives.tpot_s:.1f} ms; capacity {known.capacity_per_s:.2f}/s",
        flush=True,
    )
    return known


def _parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--policy", nargs="*", choices=POLICIES, default=[*POLICIES])
    parser.add_argument(
        "--model",
        choices=SUBJECTS,
        default="bundled",
        help="smollm: random weights of SmolLM-135M's shape",
    )
    parser.add_argument("--rate", nargs="+", type=float, default=[*FACTORS], help="x capacity")
    parser.add_argument("--seconds", type=float, default=20.0, help="of arrivals at each rate")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--ladder", choices=(*LADDER,), default="auto", help="auto: beside predictive only"
    )
    parser.add_argument("--patience", type=float, default=8.0, help="of clients, after the last")
    parser.add_argument("--routers", type=int, default=1)
    parser.add_argument("--own-ends", action="store_true", help="the model ends where it will")
    parser.add_argument(
        "--append", type=Path, help="a file of results of this model, taken and kept"
    )
    parser.add_argument("--out", type=Path, help="a folder for the scatter plots")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    return parser.parse_args()


def main() -> None:
    args = _parsed()
    results = read(args.append, args.model) if args.append else Results(model=args.model)
    with SUBJECTS[args.model](own_ends=args.own_ends) as subject:
        measure(args, subject, results)
    show_points(results.points)
    for policy, predictions in results.predictions.items():
        show_scatter(policy, predictions)
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        draw_scatter(args.out / "predictions.png", results.predictions)
    print_table("Overload", rows(results, subject))
    if args.json:
        write_json(args.json, rows(results, subject))


def measure(args: argparse.Namespace, subject: Subject, results: Results) -> None:
    text = corpus()
    calibration = _calibration(results, args.append, subject, text)
    for name in args.policy:
        plan = Plan(
            policy=Policy(admission=name, ladder=LADDER[args.ladder](name)),
            factors=tuple(args.rate),
            seconds=args.seconds,
            subject=subject,
            seed=args.seed,
            patience_s=args.patience,
            routers=args.routers,
        )
        found = run(plan, calibration, text)
        results.add(found.points, found.predictions)
        if args.append:
            write(args.append, results)


if __name__ == "__main__":
    main()
