"""What is measured on live processes, and a replay with it: here of a simulated run, which wrote
what live ones would."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from random import Random

import pytest

from bench.live.outcome import Objectives
from bench.live.points import Load, point
from bench.live.runs import Run, _beside
from bench.live.simulated.fidelity import show_phases, show_points
from bench.live.simulated.measured import RouterTime, Stretch, least_squares, measure
from bench.live.simulated.replay import Replay, Window, _with_lengths, replay
from bench.live.stack import Policy, cluster_file
from bench.live.told import Told, read_record
from cluster.config.load import load_config
from cluster.config.overrides import Override
from cluster.sim.simulation import ClusterSimulation, Scale, _beginning
from cluster.sim.trace import TraceRequest
from kvrelay.types import StepCoefficients
from router.core.events import Command, Event, WorkerJoined
from router.core.record import Entry, to_line

ASKED = Objectives(ttft_s=0.5, tpot_s=0.02)
POLICY = Policy(admission="predictive", ladder=True)
KV = {"layers": 4, "heads": 2, "head_dim": 32}
PROFILE = (
    "{kind: linear, prefill_overhead_s: 0.001, prefill_token_s: 0.00004, prefill_pair_s: 0.0, "
    "decode_knots: [[1, 0.001], [32, 0.004]], decode_kv_token_s: 0.0000001}"
)
LAST_S = 12.0
COEFFICIENTS = fields(StepCoefficients)


def recorded(folder: Path) -> Path:
    """A router's record of a run at a rate that can be served."""
    raw = folder / "cluster.yaml"
    raw.write_text(json.dumps(cluster_file(POLICY, ASKED)))
    simulation = (
        f"simulation.profile={PROFILE}",
        f"simulation.kv={json.dumps(KV)}",
        "simulation.slo.told=false",
        "simulation.max_tokens=256",
    )
    config = load_config(raw, map(Override.parse, simulation))
    rng = Random(0)
    requests = [
        TraceRequest(
            arrival_s=number * LAST_S / 60,
            input_tokens=rng.randint(100, 600),
            output_tokens=rng.randint(2, 60),
        )
        for number in range(61)
    ]
    simulated = ClusterSimulation(config, requests, Scale())
    lines = [to_line(_beginning(simulated.config, 0))]
    (router,) = simulated.routers
    for worker in simulated.fleet.workers.values():
        told = worker.hello.step_times
        plain = StepCoefficients(**{one.name: getattr(told, one.name) for one in COEFFICIENTS})
        joined = WorkerJoined(hello=replace(worker.hello, step_times=plain))
        lines.append(to_line(Entry(at_s=0.0, event=joined, commands=())))
    handle = router.core.handle

    def heard(event: Event, now_s: float) -> list[Command]:
        commands = handle(event, now_s)
        lines.append(to_line(Entry(at_s=now_s, event=event, commands=tuple(commands))))
        return commands

    router.core.handle = heard  # type: ignore[method-assign]
    simulated.run()
    record = folder / "record.jsonl"
    record.write_text("\n".join(lines) + "\n")
    return record


def ranged(name: str, at_s: float, seconds: float, **args: object) -> dict[str, object]:
    times = {"ts": 1e6 * at_s, "dur": 1e6 * seconds}
    return {"name": name, "ph": "X", "pid": 1, "tid": 1, **times, "args": args}


def write_traces(folder: Path) -> Path:
    """Steps take 1.5 times what is predicted; a turn 0.3 ms, a copy 0.2 ms and a GB a second."""
    folder.mkdir()
    for kind in ("prefill", "decode"):
        events: list[dict[str, object]] = [{"name": "process_name", "ph": "M", "args": {}}]
        for number in range(400):
            at_s = number * LAST_S / 200
            ratio = 1.5 if at_s < LAST_S else 9.0
            args = {"kind": kind, "steps": 1, "predicted_ns": 1_000_000}
            events.append(ranged("stepped", at_s, 0.001 * ratio, **args))
            events.append(ranged("turn", at_s, 0.0003))
            size = 10_000 * (1 + number % 7)
            events.append(ranged("gather", at_s, 0.0002 + size / 1e9, bytes=size))
            events.append({**ranged("gather", at_s, 0.9, bytes=size), "cat": "device"})
        lines = ",\n".join(map(json.dumps, events))
        (folder / f"{kind}-0-1.json").write_text(f"[\n{lines}")
    return folder


def router_time(told: Told) -> RouterTime:
    """0.8 ms for a request, 0.1 ms for a report."""
    found = RouterTime()
    for number in range(60):
        at_s = number / 5
        before = Stretch(first_s=-1.0, last_s=at_s)
        found.at_s.append(at_s)
        found.cpu_s.append(
            0.0008 * before.count(told.submitted_s) + 0.0001 * before.count(told.reported_s)
        )
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fidelity")


def test_a_run_is_measured_and_replayed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = recorded(folder)
    told = read_record(record)
    assert len(told.submitted_s) == 61 and sum(told.tokens) > 500
    stretch = Stretch(first_s=0.0, last_s=LAST_S)
    traces = write_traces(folder / "traces")
    found = measure(told, router_time(told), traces, stretch, folder / "stretch")
    assert found.router_request_s == pytest.approx(0.0008, rel=0.01)
    assert found.router_message_s == pytest.approx(0.0001, rel=0.01)
    assert found.worker_turn_s == pytest.approx(0.0003)
    assert found.mover_job_s == pytest.approx(0.0002)
    assert found.copy_bytes_per_s == pytest.approx(1e9, rel=0.01)
    assert len(found.lengths) == 60
    again = Replay(
        record=record,
        told=told,
        measured=found,
        policy=POLICY,
        objectives=ASKED,
        kv=KV,
        own_ends=True,
    )
    replayed = replay(again)
    assert [one.outcome.request.output_tokens for one in replayed] == told.tokens
    window = Window(first_s=0.0, last_s=LAST_S, seconds=LAST_S)
    load = Load(
        policy="predictive",
        ladder=True,
        own_ends=True,
        routers=1,
        factor=0.5,
        rate_per_s=5.0,
        seconds=LAST_S,
    )
    lived = Run(points=[point(load, (), ASKED, None)], predictions=told.predictions())
    beside = _beside(lived, [window], replayed, ASKED)
    (simulated,) = [one.simulated for one in beside.points]
    assert simulated is not None and simulated.admitted > 50 and simulated.attainment > 0.9
    live, slower = beside.phases[0].live["prefill"], beside.phases[0].simulated["prefill"]
    assert slower / live == pytest.approx(1.5, rel=0.2), "as the recorded steps were"
    show_points("one", beside.points)
    show_phases(beside.phases)
    printed = capsys.readouterr().out
    assert "| 0.5 x |" in printed and "| prefill |" in printed


def test_lengths_that_nobody_knows_are_drawn() -> None:
    """A refused request has got nothing."""
    told = Told(tokens=[0, 7], submitted_s=[0.0, 1.0])

    class Known:
        lengths: Sequence[int] = (40, 41)

    requests = [TraceRequest(arrival_s=0.0, input_tokens=5, output_tokens=256)] * 2
    first, second = _with_lengths(requests, told, Known(), Random(0))  # type: ignore[arg-type]
    assert first.output_tokens in (40, 41) and second.output_tokens == 7


def test_neither_factor_is_below_zero() -> None:
    assert least_squares([(1.0, 2.0), (3.0, 1.0)], [5.0, 5.0]) == pytest.approx((1.0, 2.0))
    assert least_squares([(1.0, 1.0), (1.0, 3.0)], [3.0, 1.0]) == (2.0, 0.0)
    assert least_squares([], []) == (0.0, 0.0)
