"""A live run's arrivals through the simulator: the same policies and lengths, and step times as the
live workers told and corrected them."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from bench.live.outcome import Objectives
from bench.live.points import Simulated, quantile
from bench.live.stack import Policy, cluster_file, durations
from bench.live.told import Told
from cluster.config.load import load_config
from cluster.config.schema import Config
from cluster.sim.output import simulate
from cluster.sim.readers import read_trace
from cluster.sim.simulation import Scale
from cluster.sim.trace import Outcome
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


def replay(
    record: Path,
    told: Told,
    policy: Policy,
    objectives: Objectives,
    window: Window,
    kv: Mapping[str, int],
) -> list[tuple[float, Outcome]]:
    """Each request with the live time of its arrival. Those before the window teach the router;
    workers are as fast all the time as they were in it."""
    result = simulate(_config(told, policy, objectives, window, kv), read_trace(record), Scale())
    first_s = told.submitted_s[0]
    return [(first_s + one.request.arrival_s, one) for one in result.outcomes]


def simulated(
    outcomes: list[tuple[float, Outcome]], window: Window, objectives: Objectives
) -> Simulated:
    """Of those that arrived in a window."""
    inside = [one for at_s, one in outcomes if at_s in window]
    good = sum(
        one.done
        and one.ttft_s is not None
        and one.ttft_s <= objectives.ttft_s
        and (one.tpot_s is None or one.tpot_s <= objectives.tpot_s)
        for one in inside
    )
    return Simulated(
        goodput_per_s=good / window.seconds,
        admitted=sum(not one.refused for one in inside),
        ttft_p50_s=quantile((one.ttft_s for one in inside), 0.5),
    )


def _config(
    told: Told, policy: Policy, objectives: Objectives, window: Window, kv: Mapping[str, int]
) -> Config:
    """The live cluster's file, with its machines' measures."""
    by_role = {hello.role: hello for hello in told.hellos.values()}
    pools = [by_role[role] for role in (Role.PREFILL, Role.DECODE)]
    placed = told.predictions()
    reserve_s = median(one.phases_s["reserve"] for one in placed if "reserve" in one.phases_s)
    raw = cluster_file(policy, objectives) | {
        "simulation": {
            "pools": [{"profile": _profile(hello, told, window)} for hello in pools],
            "blocks": pools[0].total_blocks,
            "kv": dict(kv),
            "fabric": {
                "latency": "0.1ms",
                "bandwidth": "5GB",
                "router_latency": f"{500 * reserve_s:.3f}ms",
            },
            "slo": {**durations(objectives), "told": False},
            "max_model_len": pools[0].max_model_len,
        }
    }
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "cluster.yaml"
        path.write_text(json.dumps(raw))
        return load_config(path)


def _profile(hello: WorkerHello, told: Told, window: Window) -> dict[str, object]:
    """As corrected while it was measured; of the other kind of step as it was fitted."""
    factor = told.correction(hello.role, window)
    prefill, decode = (factor, 1.0) if hello.role is Role.PREFILL else (1.0, factor)
    times = asdict(LinearTimes.of(hello.step_times).scaled(prefill, decode))
    del times["error"]
    return {"kind": "linear", **times}
