"""Does premium keep its 99th percentile while free offers four times what the machine can do?

Real processes with the tiers of `deploy/configs/qos.yaml` and the bundled model; one prefill and
one decode worker; Poisson arrivals, whatever the server does. Premium sends the same alone,
beside free's, and without tiers: when all are judged alike, by premium's objectives or by free's.
`--append FILE` keeps results, so that phases can be measured one by one.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.live.calibrate import Calibration, calibrate
from bench.live.stack import load
from bench.live.subject import of_bundled
from bench.live.tiers.load import (
    ALIKE,
    FREE,
    FREE_FACTOR,
    MIXES,
    PHASES,
    PREMIUM,
    PREMIUM_FACTOR,
    Load,
)
from bench.live.tiers.points import Phase, TierPoint, tier_points
from bench.live.tiers.run import TierFile
from bench.live.tiers.shown import rows, show
from bench.report import print_table, write_json
from bench.serving.overload import corpus
from bench.serving.plain_cluster import PlainCluster

PATIENCE_S = 20.0
AT_ONCE = {"prompts": 16, "outputs": 40}
"""Clients of the closed loop that measures the capacity: enough to fill the bottleneck."""
PREEMPTIONS = "kvrelay:num_preemptions_total"


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


def _parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--load", choices=MIXES, default="prompts", help="free's bottleneck")
    parser.add_argument("--phase", nargs="*", choices=PHASES, default=[*PHASES])
    parser.add_argument("--seconds", type=float, default=60.0, help="of arrivals in each phase")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--append", type=Path, help="a file of results of this load")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    return parser.parse_args()


def main() -> None:
    args = _parsed()
    results, tiers, text = Results.read(args.append), TierFile.read(), corpus()
    mix = MIXES[args.load]
    if results.calibration is None:
        results.calibration = calibrate(of_bundled(mix), text, AT_ONCE[args.load])
        results.write(args.append)
    known = results.calibration
    print(f"capacity for free's load {known.capacity_per_s:.2f}/s", flush=True)
    offers = Load(
        free=mix,
        capacity_per_s=known.capacity_per_s,
        seconds=args.seconds,
        seed=args.seed,
        corpus=text,
    )
    for name in args.phase:
        results.phases[name] = measure(name, tiers, offers)
        results.write(args.append)
    show(results.phases)
    method = (
        f"bundled model, {mix.text}; premium {PREMIUM_FACTOR:g} x and free {FREE_FACTOR:g} x of "
        f"a capacity of {known.capacity_per_s:.1f}/s"
    )
    found = [*rows(results.phases, tiers.objectives(PREMIUM), method)]
    print_table("Tiers", found)
    if args.json:
        write_json(args.json, found)


if __name__ == "__main__":
    main()
