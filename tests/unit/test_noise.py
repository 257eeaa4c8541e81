"""Steps that don't last as long as predicted: the same seed, the same noise, of mean 1."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from math import exp, log
from pathlib import Path
from random import Random
from statistics import mean, stdev

import pytest

from cluster.config.load import load_config
from cluster.config.overrides import Override
from cluster.sim.device import noisy_ends
from cluster.sim.machines.clock import Clock, Server
from cluster.sim.machines.noise import STRETCH_STEPS, DrawnNoise, ReplayedNoise
from cluster.sim.machines.recorded import read_recorded
from cluster.sim.results.output import Result, as_json, simulate
from cluster.sim.simulation import Scale
from cluster.sim.trace import TraceRequest
from engine.core.step_times import LinearTimes, decode_work
from kvrelay.errors import ConfigError

TIMES = LinearTimes(decode_knots=((1, 0.01), (64, 0.02)), decode_kv_token_s=1e-6)


def gauss(seed: int = 0) -> Callable[[], float]:
    rng = Random(seed)
    return lambda: rng.gauss(0.0, 1.0)


def drawn(sigma: float, correlation_s: float, seed: int = 0) -> DrawnNoise:
    return DrawnNoise(sigma=sigma, correlation_s=correlation_s, gauss=gauss(seed))


def factors(noise: DrawnNoise | ReplayedNoise, count: int, every_s: float) -> list[float]:
    noise.begin()
    return [noise.factor("decode", number * every_s) for number in range(count)]


def correlation(values: list[float], lag: int) -> float:
    middle, spread = mean(values), stdev(values)
    pairs = zip(values, values[lag:], strict=False)
    return mean((a - middle) * (b - middle) for a, b in pairs) / spread**2


@pytest.mark.parametrize("sigma", [0.1, 0.2, 0.4])
@pytest.mark.parametrize("correlation_s", [0.0, 0.1, 1.0])
def test_its_mean_is_one_and_its_spread_as_asked(sigma: float, correlation_s: float) -> None:
    every_s = max(0.01, correlation_s)
    found = factors(drawn(sigma, correlation_s), 20_000, every_s)
    assert mean(found) == pytest.approx(1.0, abs=0.02)
    assert stdev(map(log, found)) == pytest.approx(sigma, rel=0.04)


def test_what_is_near_in_time_is_alike() -> None:
    logs = [*map(log, factors(drawn(0.4, 0.1), 50_000, 0.01))]
    assert correlation(logs, 1) == pytest.approx(exp(-0.1), abs=0.03)
    assert correlation(logs, 10) == pytest.approx(exp(-1), abs=0.06)
    each = [*map(log, factors(drawn(0.4, 0.0), 20_000, 0.01))]
    assert correlation(each, 1) == pytest.approx(0.0, abs=0.03)


def test_a_run_that_is_cut_goes_on_where_it_was() -> None:
    """Steps that were drawn ahead and not run leave nothing behind."""
    noise, single = drawn(0.4, 1.0, seed=3), drawn(0.4, 1.0, seed=3)
    first = factors(noise, 5, 0.01)
    noise.cut(2)
    assert factors(single, 2, 0.01) == first[:2]
    assert (noise._value, noise._at_s) == (single._value, single._at_s)


def test_steps_in_a_row_each_have_their_own_noise() -> None:
    work = decode_work(8, 800)
    ends = noisy_ends(TIMES, drawn(0.2, 0.0), work, 4, 0.0)
    steps = [ends[0], *(b - a for a, b in pairwise(ends))]
    plain = [TIMES.step_s(decode_work(8, 800 + 8 * number)) for number in range(4)]
    ratios = [step / alone for step, alone in zip(steps, plain, strict=True)]
    assert ratios == pytest.approx(factors(drawn(0.2, 0.0), 4, 0.01))


# --- recorded -------------------------------------------------------------------------------------


def stepped(kind: str, ratio: float, steps: int = 1) -> dict[str, object]:
    args = {"kind": kind, "steps": steps, "predicted_ns": 1_000_000 * steps}
    return {"name": "stepped", "ph": "X", "ts": 0, "dur": 1000 * ratio * steps, "args": args}


def write_trace(folder: Path, name: str, *events: dict[str, object], ended: bool = True) -> None:
    named = {"name": "process_name", "ph": "M", "args": {"name": name}}
    text = ",\n".join(map(json.dumps, (named, *events)))
    (folder / f"{name}.json").write_text(f"[\n{text}" + ("]\n" if ended else ",\n"))


def test_traces_tell_by_how_much_steps_differed(tmp_path: Path) -> None:
    write_trace(tmp_path, "decode-0", stepped("decode", 1.5), stepped("decode", 0.5, steps=2))
    write_trace(
        tmp_path, "prefill-0", {"name": "turn", "dur": 3}, stepped("prefill", 2.0), ended=False
    )
    found = read_recorded(tmp_path)
    assert found["decode"] == pytest.approx((1.5, 0.5, 0.5))
    assert found["prefill"] == pytest.approx((2.0,))


def test_recorded_steps_come_as_they_followed_one_another() -> None:
    recorded = [float(number) for number in range(2000)]
    noise = ReplayedNoise(recorded={"decode": recorded, "prefill": ()}, uniform=Random(0).random)
    found = factors(noise, 4 * STRETCH_STEPS, 0.01)
    jumps = [b - a for a, b in pairwise(found) if b - a not in (1.0, -1999.0)]
    assert len(jumps) == 3, "from stretch to stretch"
    assert noise.factor("prefill", 0.0) == 1.0, "nothing is known of these"
    noise.begin()
    ahead = [noise.factor("decode", 0.0) for _ in range(10)]
    noise.cut(4)
    assert noise.factor("decode", 0.0) == ahead[4]


@pytest.mark.parametrize("text", ["", "not a trace", '[{"name": "stepped"}]'])
def test_what_is_no_trace_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match="no traces in it"):
        read_recorded(tmp_path)
    (tmp_path / "worker.json").write_text(text)
    with pytest.raises(
        ConfigError, match=r"simulation\.noise\.recorded: .*(not a worker|no steps)"
    ):
        read_recorded(tmp_path)


# --- in a simulation ------------------------------------------------------------------------------

PLAIN = (
    "workers.0.replicas=1",
    "workers.1.replicas=1",
    "simulation.slo={ttft: 2s, tpot: 25ms, told: true}",
    "simulation.max_tokens=200",
)


def run(*settings: str) -> Result:
    rng = Random(0)
    requests = [
        TraceRequest(
            arrival_s=0.05 * number,
            input_tokens=rng.randint(100, 1500),
            output_tokens=rng.randint(2, 100),
        )
        for number in range(40)
    ]
    return simulate(load_config(None, map(Override.parse, (*PLAIN, *settings))), requests, Scale())


NOISE = "simulation.noise={sigma: 0.3, correlation: 100ms}"


def test_the_same_seed_the_same_report() -> None:
    assert as_json([run(NOISE).report]) == as_json([run(NOISE).report])
    assert as_json([run(NOISE).report]) != as_json([run(NOISE, "simulation.seed=1").report])


def test_no_noise_changes_nothing() -> None:
    assert as_json([run().report]) == as_json([run("simulation.noise.sigma=0").report])


def test_recorded_steps_are_replayed(tmp_path: Path) -> None:
    """All took twice as long as predicted."""
    steps = [stepped("decode", 2.0)] * 40 + [stepped("prefill", 2.0)] * 40
    write_trace(tmp_path, "worker", *steps)
    taken = ("simulation.slo.told=false", "router.admission.policy=none")
    slow, plain = run(*taken, f"simulation.noise.recorded={tmp_path}"), run(*taken)
    for once, twice in zip(plain.report.pools, slow.report.pools, strict=True):
        busy_s = once.prefill_busy_s + once.decode_busy_s
        assert (twice.prefill_busy_s + twice.decode_busy_s) / busy_s == pytest.approx(2.0, rel=0.25)


def test_a_server_does_one_thing_after_another() -> None:
    clock, done = Clock(), []
    server = Server(clock)
    for number in range(3):
        server.serve(1.0, lambda one: done.append((one, clock.now_s)), number)
    clock.at(10.0, lambda _: server.serve(1.0, lambda one: done.append((one, clock.now_s)), 3))
    clock.run()
    assert done == [(0, 1.0), (1, 2.0), (2, 3.0), (3, 11.0)]


@pytest.mark.parametrize("key", ["router_request", "router_message", "worker_turn", "mover_job"])
def test_what_takes_time_makes_requests_take_longer(key: str) -> None:
    plain, slower = run().report.e2e_s, run(f"simulation.service.{key}=2ms").report.e2e_s
    assert plain is not None and slower is not None
    assert 0.001 < slower.mean - plain.mean < 0.2
