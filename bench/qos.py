"""Does premium keep its 99th percentile while free offers four times what the machine can do?

Real processes with the tiers of `deploy/configs/qos.yaml` and the bundled model; one prefill and
one decode worker; Poisson arrivals, whatever the server does. Premium sends the same alone,
beside free's, and without tiers: when all are judged alike, by premium's objectives or by free's.
`--append FILE` keeps results, so that phases can be measured one by one.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench.live.calibrate import Calibration, calibrate
from bench.live.offered import Mix, Offered, poisson
from bench.live.stack import load
from bench.live.tier_points import Phase, TierPoint, tier_points
from bench.live.tiers import TierFile
from bench.overload import corpus
from bench.plain_cluster import PlainCluster
from bench.report import Row, print_table, write_json

PREMIUM, FREE = "premium", "free"
ALONE, TIERS, AS_PREMIUM, AS_FREE = "alone", "tiers", "all-premium", "all-free"
PHASES = (ALONE, TIERS, AS_PREMIUM, AS_FREE)
ALIKE = {AS_PREMIUM: PREMIUM, AS_FREE: FREE}
PREMIUM_FACTOR, FREE_FACTOR = 0.08, 4.0
"""Of the capacity; premium's share is 0.10."""
WARM_S = 6.0
PATIENCE_S = 20.0
PREEMPTIONS = "kvrelay:num_preemptions_total"


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    capacity_per_s: float
    seconds: float
    seed: int
    corpus: tuple[int, ...]
    mix: Mix

    def arrivals(self, phase: str) -> list[Offered]:
        found = self._of(PREMIUM, PREMIUM_FACTOR, self.seed)
        if phase != ALONE:
            found += self._of(FREE, FREE_FACTOR, 1000 + self.seed)
        return sorted(found, key=lambda one: one.at_s)

    def warm_up(self) -> list[Offered]:
        return replace(self, seconds=WARM_S)._of(FREE, 1.0, 2000 + self.seed)

    def _of(self, tier: str, factor: float, seed: int) -> list[Offered]:
        rate = factor * self.capacity_per_s
        arrivals = poisson(self.mix, self.corpus, rate_per_s=rate, seconds=self.seconds, seed=seed)
        return [replace(one, tier=tier) for one in arrivals]


@dataclass(slots=True)
class Results:
    calibration: Calibration | None
    phases: dict[str, Phase]

    @staticmethod
    def read(path: Path | None) -> Results:
        if path is None or not path.exists():
            return Results(None, {})
        raw = json.loads(path.read_text())
        known = Calibration(**raw["calibration"]) if raw["calibration"] else None
        return Results(known, {name: _phase(one) for name, one in raw["phases"].items()})

    def write(self, path: Path | None) -> None:
        if path is not None:
            path.write_text(json.dumps(asdict(self)) + "\n")


def _phase(raw: dict[str, object]) -> Phase:
    tiers = raw.pop("tiers")
    assert isinstance(tiers, list)
    return Phase(tiers=[TierPoint(**one) for one in tiers], **raw)  # type: ignore[arg-type]


def measure(name: str, tiers: TierFile, offers: Load) -> Phase:
    with tiers.serve(ALIKE.get(name)) as cluster:
        load(cluster, offers.warm_up(), patience_s=PATIENCE_S)
        return _measure(name, cluster, tiers, offers)


def _measure(name: str, cluster: PlainCluster, tiers: TierFile, offers: Load) -> Phase:
    before, offered = cluster.metric(PREEMPTIONS), offers.arrivals(name)
    outcomes = load(cluster, offered, patience_s=PATIENCE_S)
    objectives = {tier: tiers.objectives(tier) for tier in (PREMIUM, FREE)}
    return Phase(
        name=name,
        seconds=offers.seconds,
        preemptions=round(cluster.metric(PREEMPTIONS) - before),
        tiers=tier_points(offered, outcomes, objectives),
    )


# --- shown --------------------------------------------------------------------------------------

_HEADINGS = (
    *("phase", "tier", "offered", "served", "lost", "kept", "goodput/s", "TTFT p50", "p99"),
    *("TPOT p50", "p99", "preemptions", "refused"),
)


def show(phases: dict[str, Phase]) -> None:
    table = Table(title="Premium beside free: latencies in ms", title_justify="left")
    for heading in _HEADINGS:
        table.add_column(heading, overflow="fold")
    for phase in phases.values():
        for number, one in enumerate(phase.tiers):
            table.add_row(*_cells(phase, one, first=not number))
    Console(width=170).print(table)


def _cells(phase: Phase, one: TierPoint, *, first: bool) -> list[str]:
    times = (one.ttft_p50_s, one.ttft_p99_s, one.tpot_p50_s, one.tpot_p99_s)
    return [
        phase.name if first else "",
        one.tier,
        *map(str, (one.offered, one.served, one.lost, one.good)),
        f"{one.good / phase.seconds:.2f}",
        *("" if s is None else f"{1000 * s:.3g}" for s in times),
        str(phase.preemptions) if first else "",
        ", ".join(f"{count} {reason}" for reason, count in one.refused.items()),
    ]


def rows(results: Results, tiers: TierFile, mix: Mix) -> list[Row]:
    assert results.calibration is not None
    known, objectives = results.calibration, tiers.objectives(PREMIUM)
    method = (
        f"bundled model, {mix.text}; premium {PREMIUM_FACTOR:g} x and free {FREE_FACTOR:g} x of "
        f"a capacity of {known.capacity_per_s:.1f}/s"
    )
    found = []
    for name in PHASES[1:]:
        if (phase := results.phases.get(name)) is None:
            continue
        one, alone = phase.tier(PREMIUM), results.phases.get(ALONE)
        beside = None if alone is None else alone.tier(PREMIUM)
        goal = 1.0 if name == TIERS else None
        found += [
            _latency("TTFT", name, one.ttft_p99_s, objectives.ttft_s, goal, method),
            _latency("TPOT", name, one.tpot_p99_s, objectives.tpot_s, goal, method),
            _served(name, one, goal, method),
        ]
        if beside is not None:
            found.append(_against("TTFT", name, one.ttft_p99_s, beside.ttft_p99_s, method))
            found.append(_against("TPOT", name, one.tpot_p99_s, beside.tpot_p99_s, method))
    return found


def _latency(
    kind: str,
    name: str,
    seconds: float | None,
    objective_s: float,
    goal: float | None,
    method: str,
) -> Row:
    return Row(
        name=f"premium's {kind} p99, {name}",
        value=1000 * (seconds or 0.0),
        unit="ms",
        against="its objective",
        against_value=1000 * objective_s,
        goal=goal,
        lower_is_better=True,
        method=method,
    )


def _against(
    kind: str, name: str, seconds: float | None, alone_s: float | None, method: str
) -> Row:
    return Row(
        name=f"premium's {kind} p99, {name}",
        value=1000 * (seconds or 0.0),
        unit="ms",
        against="alone",
        against_value=1000 * (alone_s or 0.0),
        method=method,
    )


def _served(name: str, one: TierPoint, goal: float | None, method: str) -> Row:
    return Row(
        name=f"premium's requests that were served, {name}",
        value=one.served,
        unit="",
        against="offered",
        against_value=one.offered,
        goal=goal,
        method=method,
    )


def _parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--phase", nargs="*", choices=PHASES, default=[*PHASES])
    parser.add_argument("--seconds", type=float, default=60.0, help="of arrivals in each phase")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--append", type=Path, help="a file of results, taken and kept")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    return parser.parse_args()


def main() -> None:
    args = _parsed()
    results, tiers, text = Results.read(args.append), TierFile.read(), corpus()
    if results.calibration is None:
        results.calibration = calibrate(Mix(), text)
        results.write(args.append)
    known = results.calibration
    print(
        f"without load TTFT {1000 * known.ttft_s:.0f} ms, TPOT {1000 * known.tpot_s:.1f} ms; "
        f"capacity {known.capacity_per_s:.2f}/s",
        flush=True,
    )
    offers = Load(
        capacity_per_s=known.capacity_per_s,
        seconds=args.seconds,
        seed=args.seed,
        corpus=text,
        mix=Mix(),
    )
    for name in args.phase:
        results.phases[name] = measure(name, tiers, offers)
        results.write(args.append)
    show(results.phases)
    found = rows(results, tiers, offers.mix)
    print_table("Tiers", found)
    if args.json:
        write_json(args.json, found)


if __name__ == "__main__":
    main()
