"""A live run's arrivals through the simulator: the same policies and lengths, with what was
measured in one stretch of it, and how much steps varied there."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from random import Random
from statistics import median

import yaml

from bench.live.offered import LIMIT
from bench.live.outcome import Objectives
from bench.live.points import Simulated, quantile
from bench.live.simulated.measured import Measured, milliseconds
from bench.live.stack import Policy, cluster_file, durations
from bench.live.told import Told
from cluster.config.load import load_config
from cluster.config.schema import Config
from cluster.sim.readers import read_trace
from cluster.sim.results.output import simulate
from cluster.sim.simulation import Scale
from cluster.sim.trace import Outcome, TraceRequest
from engine.core.step_times import LinearTimes
from kvrelay.messages import WorkerHello
from kvrelay.types import Role

EARLY_S, LATE_S = 0.05, 0.3
"""A request arrives a little later than it is sent; the next rate begins a second later."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Of the arrivals from one to another, on the live clock, in `seconds` of load."""

    first_s: float
    last_s: float
    seconds: float

    def __contains__(self, at_s: float) -> bool:
        return self.first_s - EARLY_S <= at_s < self.last_s + LATE_S


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """What became of a request that came at `at_s` on the live clock."""

    at_s: float
    outcome: Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """A live run: what its router recorded, and what was measured in a stretch of it. `kv` is the
    shape of a token's KV; with `own_ends` nobody knew how long outputs get."""

    record: Path
    told: Told
    measured: Measured
    policy: Policy
    objectives: Objectives
    kv: Mapping[str, int]
    own_ends: bool
    seed: int = 0


def replay(live: Replay) -> list[Replayed]:
    """All requests of the live run, which teach the router as they did there."""
    requests = read_trace(live.record)
    if live.own_ends:
        requests = _with_lengths(requests, live.told, live.measured, Random(live.seed))
    outcomes = simulate(_config(live), requests, Scale()).outcomes
    first_s = live.told.submitted_s[0]
    return [Replayed(at_s=first_s + one.request.arrival_s, outcome=one) for one in outcomes]


def _with_lengths(
    requests: Sequence[TraceRequest], told: Told, measured: Measured, rng: Random
) -> list[TraceRequest]:
    """Of those that got no answer nobody knows the length: theirs is drawn from the stretch."""
    return [
        replace(one, output_tokens=tokens or rng.choice(measured.lengths))
        for one, tokens in zip(requests, told.tokens, strict=True)
    ]


def simulated(replayed: Sequence[Replayed], window: Window, objectives: Objectives) -> Simulated:
    """Of those that arrived in a window."""
    inside = [one.outcome for one in replayed if one.at_s in window]
    admitted = [one for one in inside if not one.refused]
    good = sum(_is_good(one, objectives) for one in admitted)
    return Simulated(
        goodput_per_s=good / window.seconds,
        admitted=len(admitted),
        attainment=good / len(admitted) if admitted else 1.0,
        ttft_p50_s=quantile((one.ttft_s for one in admitted), 0.5),
        ttft_p99_s=quantile((one.ttft_s for one in admitted), 0.99),
    )


def phases(replayed: Sequence[Replayed], window: Window) -> dict[str, float]:
    """# phase of the ledger |-> its median in seconds"""
    inside = [one.outcome for one in replayed if one.at_s in window]
    return median_phases([one.ledger.phases() for one in inside if one.ledger is not None])


def median_phases(each: Sequence[Mapping[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for one in each for name in one)
    return {name: median(one[name] for one in each if name in one) for name in names}


def _is_good(one: Outcome, objectives: Objectives) -> bool:
    if not one.done or one.ttft_s is None or one.ttft_s > objectives.ttft_s:
        return False
    return one.tpot_s is None or one.tpot_s <= objectives.tpot_s


def _config(live: Replay) -> Config:
    """The live cluster's file, with its machines' measures."""
    measured, objectives = live.measured, live.objectives
    by_role = {hello.role: hello for hello in live.told.hellos.values()}
    pools = [by_role[role] for role in (Role.PREFILL, Role.DECODE)]
    raw = cluster_file(live.policy, objectives) | {
        "simulation": {
            "seed": live.seed,
            "pools": [{"profile": _profile(hello)} for hello in pools],
            "blocks": pools[0].total_blocks,
            "kv": dict(live.kv),
            "fabric": {
                "latency": "0.1ms",
                "bandwidth": "50GB",
                "copy_bandwidth": f"{measured.copy_bytes_per_s / 1e9:.3f}GB",
                "router_latency": milliseconds(measured.latency_s),
            },
            "noise": {"recorded": str(measured.traces)},
            "service": measured.service(),
            "slo": {**durations(objectives), "told": False},
            "max_model_len": pools[0].max_model_len,
            "max_tokens": LIMIT if live.own_ends else "auto",
            "balancing": "random",
            "most_steps": 8,
        }
    }
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "cluster.yaml"
        path.write_text(yaml.safe_dump(raw))
        return load_config(path)


def _profile(hello: WorkerHello) -> dict[str, object]:
    """As it was measured when the worker started: what it was off by since is replayed."""
    times = asdict(LinearTimes.of(hello.step_times))
    del times["error"]
    return {"kind": "linear", **times}
