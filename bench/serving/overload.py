"""Up to four times what the machine can do, offered to real processes under each admission policy.
`bench.live.simulated.fidelity` compares the simulator.

The bundled model, or with `--model smollm` one whose steps take ten times as long; one prefill and
one decode worker; Poisson arrivals, whatever the server does. Objectives are multiples of the
latencies without load. Outputs are answers that end by themselves, so nobody knows their lengths.
Then `predictive` is measured again as an oracle: every output is exactly as long as it may be, so
admission knows all lengths. The ladder (docs/qos.md)
stands beside `predictive` only: the baselines are without it, unless `--ladder` says otherwise.
`--append FILE` keeps results, so that policies and rates can be measured one by one. With
`--routers N` as many share the workers, and take the arrivals in turn.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
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
from engine.model.checkpoint import find_text_files
from router.text.tokenizer import TextTokenizer

POLICIES = ("none", "queue_limit", "early_rejection", "predictive")
FACTORS = (0.5, 1.0, 2.0, 4.0)
ENDS = ("own", "oracle")
KNOW_LENGTHS = ("predictive",)
"""Policies that an output's length decides for."""
LADDER: dict[str, Callable[[str], bool]] = {
    "auto": lambda policy: policy == "predictive",
    "on": lambda _: True,
    "off": lambda _: False,
}
KEPT_GOAL, GOODPUT_GOAL, REFUSAL_GOAL_S = 0.95, 0.9, 0.01


def corpus() -> tuple[int, ...]:
    """The documentation's text."""
    pages = sorted(Path(__file__).parents[2].glob("docs/*.md"))
    tokenizer = TextTokenizer.load(find_text_files(str(checkpoint_path()), None))
    return tokenizer.encode("\n".join(page.read_text() for page in pages))


def rows(results: Results, texts: Mapping[str, str]) -> list[Row]:
    """The headline first: outputs that end by themselves. `texts`: # ends |-> what was offered"""
    found: list[Row] = []
    for ends, policy, ladder in product(texts, POLICIES, (False, True)):
        own_ends = ends == "own"
        points = [p for p in results.points if (p.policy, p.ladder) == (policy, ladder)]
        points = [p for p in points if p.own_ends == own_ends and p.routers == 1]
        if points:
            beside = "with" if ladder else "without"
            method = f"{_method(results.calibrations[ends], texts[ends])}; {beside} the ladder"
            found += _goodput_rows(points, method)
    return found


def _method(calibration: Calibration, text: str) -> str:
    return (
        f"{text}; capacity {calibration.capacity_per_s:.1f}/s in a "
        f"closed loop; TTFT within {TTFT_FACTOR:g} x and TPOT within {TPOT_FACTOR:g} x of the "
        "median without load"
    )


def _goodput_rows(points: list[Point], method: str) -> list[Row]:
    policy, kind = points[0].policy, points[0].kind
    best = max(p.goodput_per_s for p in points)
    most = max(points, key=lambda p: p.factor)
    worst = min(points, key=lambda p: p.attainment)
    found = [
        Row(
            name=f"goodput at {most.factor:g} x, {kind}",
            value=most.goodput_per_s,
            unit="/s",
            against="its best",
            against_value=best,
            goal=GOODPUT_GOAL if policy == "predictive" else None,
            method=method,
        ),
        Row(
            name=f"admitted that kept their objectives, worst rate ({worst.factor:g} x), {kind}",
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
                name=f"received to refused p99, worst rate, {kind}",
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
    results: Results, ends: str, path: Path | None, subject: Subject, text: tuple[int, ...]
) -> Calibration:
    if ends not in results.calibrations:
        results.calibrations[ends] = calibrate(subject, text)
        if path:
            write(path, results)
    known = results.calibrations[ends]
    print(
        f"{subject.mix.text}: "
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
    parser.add_argument(
        "--ends",
        nargs="+",
        choices=ENDS,
        help="own: the model ends where it will; oracle: as long as it may be, predictive only; "
        "without it both, or what the model can",
    )
    parser.add_argument(
        "--append", type=Path, help="a file of results of this model, taken and kept"
    )
    parser.add_argument("--out", type=Path, help="a folder for the scatter plots")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    args = parser.parse_args()
    if args.ends is None:
        args.ends = [*ENDS] if args.model == "bundled" else ["oracle"]
    if args.model != "bundled" and "own" in args.ends:
        parser.error("random weights have no ends of their own: use --ends oracle")
    return args


def main() -> None:
    args = _parsed()
    results = read(args.append, args.model) if args.append else Results(model=args.model)
    texts: dict[str, str] = {}
    for ends in args.ends:
        with SUBJECTS[args.model](own_ends=ends == "own") as subject:
            texts[ends] = subject.text
            measure(args, ends, subject, results)
    show_points(results.points)
    for policy, predictions in results.predictions.items():
        show_scatter(policy, predictions)
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        draw_scatter(args.out / "predictions.png", results.predictions)
    print_table("Overload", rows(results, texts))
    if args.json:
        write_json(args.json, rows(results, texts))


def measure(args: argparse.Namespace, ends: str, subject: Subject, results: Results) -> None:
    text = corpus()
    policies = [name for name in args.policy if ends == "own" or name in KNOW_LENGTHS]
    if not policies:
        return
    calibration = _calibration(results, ends, args.append, subject, text)
    for name in policies:
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
