"""Simulated clusters: the same cores as live ones, and laws that hold whatever the trace."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
import yaml
from typer.testing import CliRunner
from typer.testing import Result as Answer

import cluster.sim.simulation
import cluster.sim.worker
import cluster.worker.build
import router.live.dispatcher
from bench.router.promises import BOTTLENECKS, SHARES, Became, Offer, offer
from cluster.cli.main import app
from cluster.config.load import load_config
from cluster.config.overrides import Override
from cluster.core.worker.core import WorkerCore
from cluster.sim.results import output
from cluster.sim.results.output import Result, as_json, simulate, simulate_rates
from cluster.sim.results.report import Report
from cluster.sim.simulation import ClusterSimulation, Scale
from cluster.sim.trace import Outcome, TracePrompt, TraceRequest
from kvrelay.errors import ConfigError
from router.core.start import Beginning

PLAIN = (
    "workers.0.replicas=2",
    "workers.1.replicas=2",
    "scheduler.prefill_chunk_tokens=2048",
    "simulation.block_size=512",
    "simulation.slo.told=false",
)
SHARED = (
    "build_worker_core",
    "plan_staging",
    "WorkerHello",
)
LINEAR = {
    "kind": "linear",
    "prefill_overhead_s": 0.01,
    "prefill_token_s": 2e-5,
    "prefill_pair_s": 0.0,
    "decode_knots": [[1, 0.01], [256, 0.01]],
    "decode_kv_token_s": 0.0,
}


def trace(requests: int, *, seed: int = 0, every_s: float = 0.1) -> list[TraceRequest]:
    """Some prompts begin alike."""
    rng, at_s, made = Random(seed), 0.0, []
    for number in range(requests):
        tokens = rng.randint(1, 6000)
        blocks = -(-tokens // 512)
        shared = rng.randint(0, min(4, blocks - 1))
        own = (1000 * (number + 1) + i for i in range(blocks - shared))
        made.append(
            TraceRequest(
                arrival_s=at_s,
                input_tokens=tokens,
                output_tokens=rng.randint(1, 400),
                hash_ids=(*range(shared), *own),
            )
        )
        at_s += rng.expovariate(1 / every_s)
    return made


def run(requests: list[TraceRequest], *settings: str, rate: float = 1.0) -> Result:
    config = load_config(None, map(Override.parse, (*PLAIN, *settings)))
    return simulate(config, requests, Scale(rate=rate))


def done(outcomes: list[Outcome]) -> list[bool]:
    return [one.done and one.tokens == one.request.output_tokens for one in outcomes]


@pytest.mark.parametrize(
    "settings",
    [
        (),
        ("transfer.handoff=pull",),
        ("simulation.block_size=16",),
        ("simulation.kv.layers=1", "transfer.staging_slabs=2"),
        ("engine.prefix_caching=false",),
        ("engine.eviction=reuse", "simulation.blocks=60", "simulation.retries=1000"),
        ("simulation.max_tokens=500",),
        ("router.dispatch=shared_queue",),
        ("router.dispatch=shared_queue", "transfer.handoff=pull"),
        ("router.replicas=2", "router.placement.policy=local_cache"),
        ("router.dispatch=shared_queue", "router.placement.policy=round_robin"),
        ("simulation.fabric.bandwidth=1GB",),
    ],
)
def test_every_request_gets_its_tokens_and_nothing_stays_held(settings: tuple[str, ...]) -> None:
    """The simulation itself asserts the conservation laws at its end."""
    result = run(trace(120), *settings)
    assert all(done([*result.outcomes]))


FAILING = (
    "simulation.failures=[{worker: prefill-0, at: 2s, back_after: 3s}, "
    "{worker: decode-1, at: 4s, back_after: 1s}, {worker: prefill-0, at: 8s}]",
)


@pytest.mark.parametrize("handoff", ["push", "pull"])
@pytest.mark.parametrize("dispatch", ["direct", "shared_queue"])
def test_who_was_on_workers_that_die_goes_on_elsewhere(dispatch: str, handoff: str) -> None:
    settings = (f"router.dispatch={dispatch}", f"transfer.handoff={handoff}")
    calm = run(trace(120), *settings).report
    result = run(trace(120), *settings, *FAILING)
    assert all(done([*result.outcomes]))
    report = result.report
    assert [pool.workers for pool in report.pools] == [2, 2]
    assert report.ttft_s and calm.ttft_s and report.ttft_s.most > calm.ttft_s.most
    computed, once = (sum(p.prompt_tokens for p in one.pools) for one in (report, calm))
    assert computed > once, "what was lost is computed again"


def test_without_any_prefill_worker_decode_workers_do_it_all() -> None:
    dies = "simulation.failures=[{worker: prefill-0, at: 3s}]"
    auto = "router.placement.local_prefill=auto"
    alone = run(trace(120), "workers.0.replicas=1", dies, auto)
    assert all(done([*alone.outcomes])) and alone.report.local_prefills > 50
    off = run(trace(120), "workers.0.replicas=1", dies)
    assert all(done([*off.outcomes])) and off.report.local_prefills > 50


def test_prefill_workers_decode_once_no_decode_worker_is_left() -> None:
    dies = "simulation.failures=[{worker: decode-0, at: 3s, back_after: 4s}]"
    result = run(trace(120), "workers.1.replicas=1", dies)
    assert all(done([*result.outcomes]))
    prefill, _ = result.report.pools
    assert prefill.generated_tokens > 1000


def test_who_has_no_worker_left_waits_for_one() -> None:
    """All are gone for a while: nobody who was admitted fails."""
    dies = "{worker: prefill-0, at: 3s, back_after: 5s}, {worker: decode-0, at: 3s, back_after: 9s}"
    fleet = ("workers.0.replicas=1", "workers.1.replicas=1", "simulation.retries=100")
    result = run(trace(120), *fleet, f"simulation.failures=[{dies}]")
    assert all(done([*result.outcomes]))
    dies = "{worker: prefill-0, at: 3s}, {worker: decode-0, at: 3s}"
    patience = "router.failover_patience=5s"
    ended = run(trace(120), *fleet, f"simulation.failures=[{dies}]", patience)
    failed = [one for one in ended.outcomes if one.failed]
    assert failed and not any(one.done for one in failed)


@pytest.mark.parametrize("caching", [True, False])
def test_workers_of_role_both_serve_alone(caching: bool) -> None:
    """They hand nothing over, but pull prefixes from each other: at most what begins alike."""
    settings = ["workers=[{role: both, replicas: 3}]", f"engine.prefix_caching={caching}".lower()]
    config = load_config(None, map(Override.parse, settings))
    result = simulate(config, trace(120), Scale())
    assert all(done([*result.outcomes]))
    cached = sum(one.cached_tokens for one in result.outcomes)
    kv = config.simulation.kv
    most = cached * kv.layers * kv.heads * kv.head_dim * 2 * 2
    moved = result.report.moved_bytes
    assert 0 < moved <= most if caching else moved == 0


def test_a_cluster_that_is_full_refuses_and_preempts() -> None:
    result = run(
        trace(150, every_s=0.001), "simulation.blocks=30", "scheduler.max_running_requests=4"
    )
    report = result.report
    assert report.refused and set(report.refused) <= {"slots_exhausted", "kv_exhausted"}
    assert report.completed + sum(report.refused.values()) + sum(report.failed.values()) == 150
    assert report.attainment <= report.completed / 150


def test_refused_clients_come_back_when_told_to() -> None:
    full = ("scheduler.max_running_requests=4",)
    once = run(trace(100, every_s=0.01), *full).report
    again = run(trace(100, every_s=0.01), *full, "simulation.retries=50").report
    assert sum(once.refused.values()) > 0 and again.refusals > 0
    assert again.completed > once.completed


def test_the_same_seed_is_the_same_report() -> None:
    reports = [as_json([run(trace(80), f"simulation.seed={seed}").report]) for seed in (1, 1)]
    assert reports[0] == reports[1]


def test_replicas_come_at_times_of_the_seed() -> None:
    config = load_config(None, map(Override.parse, PLAIN))
    first, same = (simulate(config, trace(40), Scale(replicas=3)).report for _ in range(2))
    seeded = config.model_copy(
        update={"simulation": config.simulation.model_copy(update={"seed": 7})}
    )
    other = simulate(seeded, trace(40), Scale(replicas=3)).report
    assert first.offered == 120
    assert as_json([first]) == as_json([same])
    assert first.ttft_s != other.ttft_s


def test_runs_of_steps_tell_the_same_as_single_ones() -> None:
    """To a router whose placement doesn't depend on how much of them it has heard."""
    blind = "router.placement.policy=round_robin"
    single = run(trace(60), "simulation.most_steps=1", blind)
    runs = run(trace(60), "simulation.most_steps=256", blind)
    for one, other in zip(single.outcomes, runs.outcomes, strict=True):
        assert one.ttft_s == pytest.approx(other.ttft_s, abs=1e-5)
        assert one.e2e_s == pytest.approx(other.e2e_s, abs=1e-5)


@pytest.mark.parametrize(("every_s", "told"), [(0.4, True), (0.05, False), (0.05, True)])
def test_runs_of_steps_tell_the_same_by_the_default_policies(every_s: float, told: bool) -> None:
    """Exactly, unless requests bring objectives and come too often: with runs the router hears less
    often how far each has come, and what it predicts from that moves some ends by a few percent."""
    off = 0.05 if told and every_s < 0.1 else 1e-4
    asked = f"simulation.slo.told={str(told).lower()}"
    single, runs = (
        run(trace(60, every_s=every_s), f"simulation.most_steps={most}", asked) for most in (1, 256)
    )
    for one, other in zip(single.outcomes, runs.outcomes, strict=True):
        assert one.ttft_s == pytest.approx(other.ttft_s, rel=1e-4)
        assert one.e2e_s == pytest.approx(other.e2e_s, rel=off)
    assert single.report.refused == runs.report.refused
    assert single.report.e2e_s and runs.report.e2e_s
    assert single.report.e2e_s.mean == pytest.approx(runs.report.e2e_s.mean, rel=off / 5)


def test_one_request_takes_what_its_profile_says(tmp_path: Path) -> None:
    """TTFT: both hops, twice over, and the prefill; then a step for each token."""
    profile = tmp_path / "flat.yaml"
    profile.write_text(yaml.safe_dump(LINEAR))
    request = TraceRequest(arrival_s=0.0, input_tokens=3000, output_tokens=11)
    result = run([request], f"simulation.profile={profile}", "simulation.kv.layers=1")
    (outcome,) = result.outcomes
    prefill_s = 2 * 0.01 + 3000 * 2e-5
    assert outcome.ttft_s == pytest.approx(prefill_s + 4 * 200e-6, abs=1e-9)
    assert outcome.tpot_s == pytest.approx(0.01, rel=0.1)


def test_a_slower_fabric_delays_decode_but_not_the_first_token() -> None:
    fast = run(trace(40)).report
    slow = run(trace(40), "simulation.fabric.bandwidth=200MB").report
    assert fast.ttft_s and slow.ttft_s and fast.e2e_s and slow.e2e_s
    assert slow.e2e_s.mean > fast.e2e_s.mean + 0.3


@pytest.mark.parametrize("output_tokens", [5, 1])
def test_shared_prefixes_are_found(output_tokens: int) -> None:
    same = [
        TraceRequest(
            arrival_s=float(i),
            input_tokens=2048,
            output_tokens=output_tokens,
            hash_ids=(1, 2, 3, 4),
        )
        for i in range(10)
    ]
    report = run(same, "workers.0.replicas=1").report
    assert report.hit_rate == pytest.approx(9 * 1536 / (10 * 2048))
    strangers = [
        TraceRequest(arrival_s=float(i), input_tokens=2048, output_tokens=5) for i in range(10)
    ]
    assert run(strangers).report.hit_rate == 0


def test_prompts_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """But for the block in which the output begins."""
    read: list[int] = []
    iterate = TracePrompt.iterate

    def counted(prompt: TracePrompt, positions: range) -> Iterator[int]:
        read.append(len(positions))
        return iterate(prompt, positions)

    monkeypatch.setattr(TracePrompt, "iterate", counted)
    run(trace(50))
    assert 0 < sum(read) < 50 * 512


def test_the_report_counts_what_was_offered() -> None:
    strict = run(trace(60), "simulation.slo.ttft=1ms").report
    lax = run(trace(60), "simulation.slo.ttft=100s", "simulation.slo.tpot=10s").report
    assert (strict.good, strict.attainment, strict.goodput_per_s) == (0, 0.0, 0.0)
    assert lax.good == lax.offered == 60 and lax.attainment == 1.0
    assert lax.ttft_s is not None and lax.ttft_s.p50 <= lax.ttft_s.p90 <= lax.ttft_s.most


def test_pools_tell_how_busy_they_were_and_what_that_cost(tmp_path: Path) -> None:
    priced = LINEAR | {"price_per_hour": 3.6, "power_w": {"idle": 100.0, "peak": 500.0}}
    profile = tmp_path / "priced.yaml"
    profile.write_text(yaml.safe_dump(priced))
    report = run(trace(50), f"simulation.profile={profile}").report
    prefill, decode = report.pools
    assert (prefill.role, prefill.workers, decode.role) == ("prefill", 2, "decode")
    assert 0 < prefill.utilisation < 1 and decode.prefill_busy_s == 0
    assert report.cost.price == pytest.approx(4 * report.duration_s * 0.001)
    assert report.cost.energy_j is not None
    assert 400 < report.cost.energy_j / report.duration_s < 2000


def test_simulator_and_shells_run_the_same_classes() -> None:
    shells = vars(cluster.worker.build)
    simulated = vars(cluster.sim.worker)
    for name in SHARED:
        assert simulated[name] is shells[name]
    assert cluster.sim.simulation.begin is router.live.dispatcher.begin
    simulation = ClusterSimulation(load_config(None), trace(1), Scale())
    assert type(simulation.routers[0].core) is type(router.live.dispatcher.begin(Beginning()))
    for worker in simulation.fleet.workers.values():
        assert type(worker.core) is WorkerCore


def test_a_router_that_knows_the_objectives_keeps_them_for_those_it_takes() -> None:
    crowd = trace(200, every_s=0.004)
    slo = ("simulation.slo.ttft=500ms", "simulation.slo.tpot=50ms")
    blind = run(crowd, *slo, "router.admission.policy=none").report
    aware = run(crowd, *slo, "simulation.slo.told=true").report
    assert "ttft_unreachable" in aware.refused and not blind.refused
    assert aware.admitted_attainment > 0.9 > blind.admitted_attainment


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (("simulation.pools=[{}, {}, {}]",), "simulation.pools: got 3, but workers has 2"),
        (("simulation.block_size=100",), "simulation.block_size: got 100, expected a divisor"),
        (("simulation.block_size=auto", "engine.block_size=24"), "engine.block_size: got 24"),
        (("simulation.blocks=0",), "simulation.blocks: got 0"),
        (
            ("simulation.failures=[{worker: decode-7, at: 1s}]",),
            "simulation.failures.0.worker: got decode-7, expected one of prefill-0, prefill-1, dec",
        ),
        (("simulation.fabric.bandwith=1GB",), "unknown key, did you mean bandwidth"),
        (("simulation.profile={kind: fast}",), "simulation.profile: kind: got fast"),
        (("simulation.pools=[{profile: nowhere.yaml}]",), "nowhere.yaml: can't read it"),
    ],
)
def test_what_cannot_be_simulated_is_named(settings: tuple[str, ...], says: str) -> None:
    with pytest.raises(ConfigError, match=says.replace(".", r"\.")):
        run(trace(2), *settings)


def test_a_profile_without_coverage_says_so(tmp_path: Path) -> None:
    profile = tmp_path / "small.yaml"
    profile.write_text(yaml.safe_dump(LINEAR | {"decode_knots": [[1, 0.01]]}))
    crowd = trace(60, every_s=0.001)
    with pytest.raises(ConfigError, match=r"simulation\.profile: .*decode was measured up to 1"):
        run(crowd, f"simulation.profile={profile}")


# --- the command --------------------------------------------------------------------------------

SMALL = "name: small\nsimulation: {block_size: 512}\n"
EXAMPLE = Path(__file__).parents[2] / "deploy/configs/simulation.yaml"


def command(folder: Path, *options: str, config: str = SMALL) -> tuple[int, str]:
    result = run_command(folder, *options, config=config)
    return result.exit_code, result.stdout


def run_command(folder: Path, *options: str, config: str = SMALL) -> Answer:
    """Raises what the command raises."""
    lines = (
        json.dumps(
            {
                "timestamp": round(one.arrival_s * 1000),
                "input_length": one.input_tokens,
                "output_length": one.output_tokens,
                "hash_ids": one.hash_ids,
            }
        )
        for one in trace(30)
    )
    (folder / "trace.jsonl").write_text("\n".join(lines))
    (folder / "cluster.yaml").write_text(config)
    files = [str(folder / "cluster.yaml"), "--trace", str(folder / "trace.jsonl")]
    arguments = ["simulate", *files, *options]
    return CliRunner().invoke(app, arguments, catch_exceptions=False)


def test_the_command_prints_a_table(tmp_path: Path) -> None:
    code, text = command(tmp_path)
    assert code == 0
    assert "30 requests" in text and "goodput" in text and "TTFT ms" in text


def test_the_command_prints_json_and_draws(tmp_path: Path) -> None:
    out = tmp_path / "out"
    rates = ("--rate-scale", "1", "--rate-scale", "4")
    code, text = command(tmp_path, *rates, "--format", "json", "--limit", "20", "--out", str(out))
    reports = json.loads(text)
    assert code == 0
    assert [(one["rate_scale"], one["offered"]) for one in reports] == [(1.0, 20), (4.0, 20)]
    assert json.loads((out / "report.json").read_text()) == reports
    names = {path.name for path in out.iterdir()}
    assert {"timeline-1x.png", "cdf-4x.png", "goodput.png"} <= names


def test_the_first_line_names_an_assumed_profile(tmp_path: Path) -> None:
    code, text = command(tmp_path)
    assert code == 0
    assert text.splitlines()[0] == (
        "no simulation.profile: workers have the profile built-in: an 8B model on a GPU like "
        "H100, for first tries, and 6000 KV blocks each"
    )


def test_a_named_profile_is_not_called_assumed(tmp_path: Path) -> None:
    code, text = command(tmp_path, "--limit", "5", config=EXAMPLE.read_text())
    assert code == 0
    assert text.splitlines()[0] == "simulated-8b at 1 x the trace's rate"


def test_runs_are_compared_side_by_side(tmp_path: Path) -> None:
    compare = ("--compare", "simulation.pools=[{blocks: 40}, {blocks: 40}],[]")
    code, text = command(tmp_path, *compare)
    assert code == 0
    rows = {line.split("  ")[0].strip(): line.split() for line in text.splitlines()}
    assert rows["offered"][-3:] == ["30", "30", "1"]
    assert "TTFT p99, ms" in rows and "pool 0 (prefill) busy, %" in rows
    assert "last by first" in text and text.count("simulation.pools") == 2
    code, text = command(tmp_path, *compare, "--format", "json", "--out", str(tmp_path / "out"))
    found = json.loads(text)
    assert (code, found["compare"]) == (0, "simulation.pools")
    assert [run["value"] for run in found["runs"]] == ['[{"blocks": 40}, {"blocks": 40}]', "[]"]
    reports = [run["reports"][0] for run in found["runs"]]
    assert [one["offered"] for one in reports] == [30, 30]
    assert reports[0]["timeline"] != reports[1]["timeline"]
    assert (tmp_path / "out" / "simulation.pools=[]" / "report.json").exists()


def test_each_rate_is_compared(tmp_path: Path) -> None:
    rates = ("--rate-scale", "1", "--rate-scale", "4")
    compare = ("--compare", "scheduler.prefill_chunk_tokens=512,2048")
    code, text = command(tmp_path, *rates, *compare, "--limit", "10")
    assert code == 0
    assert "at 1 x the trace's rate" in text and "at 4 x the trace's rate" in text


@pytest.mark.parametrize("text", ["", "seed", "=1,2", "simulation.seed=1"])
def test_a_comparison_needs_two_values(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--compare .*: expected path\.to\.key=A,B"):
        Override.parse_several(text)


def test_a_comparison_has_each_value_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--compare simulation\.seed=1,'1': each value once"):
        run_command(tmp_path, "--compare", "simulation.seed=1,'1'")


def test_what_cannot_be_drawn_is_told_before_the_simulation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output, "find_spec", lambda _: None)
    out = tmp_path / "out"
    with pytest.raises(ConfigError, match="--out draws with matplotlib"):
        run_command(tmp_path, "--out", str(out))
    assert not out.exists()


def test_rates_are_above_zero() -> None:
    with pytest.raises(ConfigError, match="--rate-scale: got 0"):
        simulate_rates(load_config(None), trace(2), [1.0, 0.0], 1)


def test_more_load_is_not_more_goodput_for_nothing() -> None:
    reports: list[Report] = [run(trace(150), rate=rate).report for rate in (1.0, 30.0)]
    assert reports[1].ttft_s and reports[0].ttft_s
    assert reports[1].ttft_s.mean > reports[0].ttft_s.mean


def overloaded(*settings: str, times: int = 2) -> Report:
    """A prefill worker with more than so many times what it can do, for 20 s."""
    requests = [
        TraceRequest(arrival_s=0.1 / times * i, input_tokens=4000, output_tokens=20)
        for i in range(200 * times)
    ]
    told = ("simulation.slo.told=true", "simulation.slo.ttft=1s", "simulation.slo.tpot=100ms")
    fleet = ("workers.0.replicas=1", "workers.1.replicas=1")
    profile = f"simulation.profile={json.dumps(LINEAR).replace('2e-05', '0.00002')}"
    return run(requests, *fleet, *told, profile, *settings).report


@pytest.mark.parametrize(
    ("routers", "rounding", "share"),
    [
        *((1, rounding, share) for share in (0.5, 1.0) for rounding in ("null", "1s")),
        *((3, rounding, share) for share in (0.5, 1.0) for rounding in ("null", "1s")),
    ],
)
def test_who_comes_back_when_told_to_is_admitted(routers: int, rounding: str, share: float) -> None:
    found = overloaded(
        f"router.replicas={routers}",
        "simulation.retries=1",
        f"simulation.retrying_share={share}",
        f"simulation.retry_rounding={rounding}",
    )
    assert found.retries > 50
    least = 0.9 if routers > 1 and share < 1 else 0.95  # three routers promise one place at times
    assert found.retried_admitted >= least * found.retries


@pytest.mark.parametrize(("rounding", "share"), [("null", 0.5), ("1s", 1.0)])
def test_also_at_four_times_what_is_served(rounding: str, share: float) -> None:
    """Most are promised times a minute ahead; what is learnt meanwhile must not crowd them."""
    back = (f"simulation.retrying_share={share}", f"simulation.retry_rounding={rounding}")
    found = overloaded("simulation.retries=1", *back, times=4)
    assert found.retried_admitted >= 0.95 * found.retries


def test_routers_that_know_of_each_other_by_the_workers_admit_little_too_much() -> None:
    one, three = overloaded(), overloaded("router.replicas=3")
    broken = three.offered - sum(three.refused.values()) - three.good
    assert broken < 0.02 * three.offered
    assert three.good >= 0.9 * one.good


def test_only_those_clients_come_back_that_do() -> None:
    assert overloaded().retries == 0
    found = overloaded("simulation.retries=1", "simulation.retrying_share=0.5")
    assert 0.4 * found.refusals < 2 * found.retries < found.refusals * 1.4


def test_routers_that_move_requests_from_the_same_workers_lose_none() -> None:
    """Small decode workers, of which one has a free slot now and then; at the end nothing is held,
    as `run` asserts."""
    settings = (
        *PLAIN,
        "router.replicas=3",
        "router.placement={policy: random, move_hot_spots: true}",
        "router.admission.policy=none",
        "workers.1.replicas=3",
        "simulation.pools=[{}, {blocks: 40}]",
    )
    config = load_config(None, map(Override.parse, settings))
    simulation = ClusterSimulation(config, trace(300, every_s=0.1), Scale())
    outcomes = simulation.run().outcomes
    assert all(done([*outcomes]))
    moved = [sum(router.core.state.moves.moved.values()) for router in simulation.routers]
    assert sum(one > 0 for one in moved) >= 2, moved


def preempted(moves: str, seed: int) -> int:
    """Nine that decode for long, placed as it happens: memory for four of them in each worker."""
    settings = (
        *PLAIN,
        f"router.placement={{policy: random, move_hot_spots: {moves}}}",
        "router.admission.policy=none",
        "workers.1.replicas=3",
        "simulation.block_size=16",
        "simulation.pools=[{}, {blocks: 200}]",
        f"simulation.seed={seed}",
    )
    requests = [
        TraceRequest(arrival_s=n * 0.2, input_tokens=64, output_tokens=800, hash_ids=(n,))
        for n in range(9)
    ]
    config = load_config(None, map(Override.parse, settings))
    result = simulate(config, requests, Scale())
    assert all(done([*result.outcomes]))
    return result.report.preemptions


def test_long_ones_leave_before_anything_is_preempted() -> None:
    seeds = range(6)
    assert sum(preempted("false", seed) for seed in seeds) > 4
    assert sum(preempted("true", seed) for seed in seeds) == 0


@pytest.mark.parametrize("share", SHARES)
def test_equal_requests_are_promised_times_that_any_router_keeps(share: float) -> None:
    """Whichever router their clients choose, and however many of them come back."""
    offers = [
        Offer(bottleneck=bottleneck, every_s=every_s, share=share)
        for bottleneck in BOTTLENECKS
        for every_s in (0.01, 0.03)
    ]
    found = sum(map(offer, offers), Became())
    assert found.back > 100
    assert found.share >= 0.95
    assert found.told == found.claimed + found.expired, "each is counted once"
    assert found.good >= 0.98 * found.done


# --- prompts that arrive in parts -----------------------------------------------------------------

IN_PARTS = "simulation.arriving={share: 1.0, over: 2s, every: 100ms}"


@pytest.mark.parametrize("routers", ["in_turn", "random"])
def test_what_has_come_of_a_prompt_is_computed_ahead(routers: str) -> None:
    settings = (
        "simulation.block_size=64",
        "router.replicas=2",
        f"simulation.balancing={routers}",
    )
    requests = [one for one in trace(60, every_s=0.5) if one.arrival_s > 2]
    whole, parts = run(requests, *settings), run(requests, *settings, IN_PARTS)
    assert all(done([*parts.outcomes]))
    assert whole.report.ahead_tokens == 0
    assert parts.report.ahead_tokens > 0.6 * parts.report.prompt_tokens
    assert whole.report.ttft_s and parts.report.ttft_s
    assert parts.report.ttft_s.mean < 0.6 * whole.report.ttft_s.mean
    long = [n for n, one in enumerate(requests) if one.input_tokens > 3000]
    for number in long:
        assert parts.outcomes[number].cached_tokens > 2000


def test_what_is_ahead_delays_nobody_for_long_where_all_is_full() -> None:
    """Prompts that are complete don't wait for what can't be computed ahead."""
    full = ("workers.0.replicas=1", "scheduler.max_running_requests=4", "simulation.block_size=64")
    result = run(trace(100, every_s=0.02), *full, IN_PARTS, "simulation.retries=100")
    assert all(done([*result.outcomes]))


def test_a_share_of_prompts_arrives_in_parts() -> None:
    some = run(trace(100), IN_PARTS.replace("1.0", "0.3"), "simulation.block_size=64").report
    every = run(trace(100), IN_PARTS, "simulation.block_size=64").report
    assert 0.1 * every.ahead_tokens < some.ahead_tokens < 0.6 * every.ahead_tokens
