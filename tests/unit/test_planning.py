"""`kvrelay plan` with a trace: arithmetic orders fleets, simulation settles them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from bench.papers.goodput import poisson
from cluster.cli.main import app
from cluster.config.load import load_config
from cluster.config.schema import Config
from cluster.sim.planning.candidates import (
    CandidateFleet,
    CandidatePool,
    Kind,
    fastest,
    fits,
    fleet_limits,
    grown,
    kinds,
    servable_file,
    smallest,
)
from cluster.sim.planning.estimate import (
    PIPELINE_CHUNK,
    Copy,
    PlanObjectives,
    busy_s,
    copies,
    decode_s,
    prefill_s,
    simulated_kv,
    workload,
)
from cluster.sim.planning.model_facts import find_facts
from cluster.sim.planning.settle import Task, enough, fastest_rate
from cluster.sim.profiles.capacity import Refusals
from cluster.sim.profiles.load import known_device
from cluster.sim.profiles.roofline import Parallel
from cluster.sim.profiles.schema import Dtype
from cluster.sim.simulation import kv_layout
from cluster.sim.trace import TraceRequest
from engine.core.step_times import decode_work, prefill_work
from kvpool.core.transfer.slabs import HEADER_BYTES
from kvpool.transport.send_buffers import SEND_BUFFERS
from kvrelay.errors import ConfigError, ModelError
from kvrelay.types import Role

FACTS = find_facts("llama-3.1-8b")
OBJECTIVES = PlanObjectives(ttft_s=0.5, tpot_s=0.05, attainment=0.9)
LIMITS = fleet_limits(FACTS, 0.9)
REQUESTS = poisson(60, 20.0, 1000, 50, seed=5)


def ways(stock: dict[str, int], longest: int = 1050) -> list[Copy]:
    devices = {name: known_device(name) for name in stock}
    return copies(FACTS, devices, stock, longest, LIMITS)


def possible(stock: dict[str, int]) -> list[Kind]:
    return list(kinds(ways(stock), workload(REQUESTS, 1.0), OBJECTIVES))


def task(stock: dict[str, int], rate: float = 1.0, requests: Sequence[TraceRequest] = ()) -> Task:
    return Task(
        model="llama-3.1-8b",
        facts=FACTS,
        requests=requests or REQUESTS,
        rate_scale=rate,
        objectives=OBJECTIVES,
        stock=stock,
    )


def of_role(found: Sequence[Kind], *roles: Role) -> Kind:
    return next(kind for kind in found if tuple(pool.role for pool in kind) == roles)


# --- arithmetic ---------------------------------------------------------------------------------


def test_copies_stay_within_the_stock_and_the_memory() -> None:
    assert {way.parallel.devices for way in ways({"h100-sxm": 4})} == {1, 2, 4}
    large = find_facts("llama-2-70b")
    fitting = copies(large, {"h100-sxm": known_device("h100-sxm")}, {"h100-sxm": 4}, 4096, LIMITS)
    assert min(way.parallel.devices for way in fitting) == 4
    with pytest.raises(ConfigError, match=r"no device holds llama-2-70b: l4, 1 of them: only 0"):
        copies(large, {"l4": known_device("l4")}, {"l4": 1}, 4096, LIMITS)


def test_a_device_without_a_price_is_refused() -> None:
    with pytest.raises(ConfigError, match="--price b200-sxm=NUMBER"):
        ways({"b200-sxm": 1})


def test_a_request_takes_its_prefill_and_its_share_of_a_batch() -> None:
    one, work = ways({"h100-sxm": 1})[0], workload(REQUESTS, 1.0)
    assert prefill_s(one, work) == pytest.approx(one.times.step_s(prefill_work(1000)))
    alone_s = one.times.step_s(decode_work(1, 1025))
    assert decode_s(one, work, tpot_s=alone_s * 1.0001) == pytest.approx(50 * alone_s)
    assert decode_s(one, work, tpot_s=alone_s / 2) is None
    shared_s = decode_s(one, work, tpot_s=0.05)
    assert shared_s is not None and shared_s < 5 * alone_s


def test_a_prompt_waits_for_the_bubble_and_others_for_a_stage() -> None:
    """Of two chunks in two stages: three turns of a quarter of the work each."""
    work = workload([replace(one, input_tokens=2 * PIPELINE_CHUNK) for one in REQUESTS], 1.0)
    staged = next(way for way in ways({"h100-sxm": 2}) if way.parallel == Parallel(pipeline=2))
    own_s = staged.times.step_s(prefill_work(2 * PIPELINE_CHUNK))
    assert prefill_s(staged, work) == pytest.approx(0.75 * own_s)
    assert busy_s(staged, work) == pytest.approx(own_s / 2)
    short = workload(REQUESTS, 1.0)
    own_s = staged.times.step_s(prefill_work(1000))
    assert prefill_s(staged, short) == pytest.approx(own_s), "one chunk fills one stage at a time"


def test_pipelines_compute_prompts_only() -> None:
    kinds = possible({"h100-sxm": 4})
    staged = {p.role for kind in kinds for p in kind if p.copy.parallel.pipeline > 1}
    assert staged == {Role.PREFILL}


def test_a_fleet_with_a_pipeline_is_simulated_with_its_bubble() -> None:
    """The same devices as two single ones: its first tokens come sooner, by less than half."""
    stock = {"h100-sxm": 3}
    requests = poisson(40, 0.5, 2 * PIPELINE_CHUNK, 2, seed=5)
    found = {}
    for name in ("h100-sxm tp1", "h100-sxm tp1 pp2"):
        kind = next(
            kind
            for kind in possible(stock)
            if len(kind) == 2 and [p.copy.name for p in kind] == [name, "h100-sxm tp1"]
        )
        settled = enough(task(stock, requests=requests), CandidateFleet(kind))
        assert settled is not None and settled.holds
        assert settled.report.ttft_s is not None
        found[name] = settled.report.ttft_s.p50
    one_s, two_s = found.values()
    assert 0.6 < two_s / one_s < 0.9


def test_the_smallest_fleet_is_never_busier_than_all_the_time() -> None:
    for kind in possible({"h100-sxm": 2, "l40s": 2}):
        fleet = smallest(kind, 100.0)
        assert fleet.most_rate_per_s >= 100.0
        fewer = [pool for pool in fleet.pools if pool.replicas > 1]
        assert all((pool.replicas - 1) / pool.seconds < 100.0 for pool in fewer)


def test_the_fastest_fleet_spends_no_more_than_there_is() -> None:
    stock = {"h100-sxm": 8, "l40s": 4}
    kind = of_role(possible(stock), Role.PREFILL, Role.DECODE)
    fleet = fastest(kind, 30.0, stock)
    assert fleet is not None and fits(fleet, stock) and fleet.price_per_hour <= 30.0
    assert fleet.most_rate_per_s > smallest(kind, 0.1).most_rate_per_s
    assert fastest(kind, 1.0, stock) is None


def test_prefill_and_decode_may_take_different_devices() -> None:
    mixes = {
        tuple(pool.copy.device for pool in kind)
        for kind in possible({"h100-sxm": 1, "l40s": 1})
        if len(kind) == 2
    }
    assert {("h100-sxm", "l40s"), ("l40s", "h100-sxm")} <= mixes
    both = CandidateFleet(next(k for k in possible({"h100-sxm": 1}) if len(k) == 2))
    assert not fits(both, {"h100-sxm": 1})


def test_simulated_kv_has_the_model_s_size() -> None:
    for name in ("llama-3.1-8b", "deepseek-v3", "gpt-oss-120b", "qwen3.5-397b-a17b", "glm-5"):
        facts = find_facts(name)
        config = Config.model_validate({"simulation": {"kv": simulated_kv(facts)}}, strict=False)
        assert kv_layout(config.simulation, 16).bytes_per_token == facts.kv_bytes_per_token


# --- simulation ---------------------------------------------------------------------------------


def test_a_fleet_grows_until_it_holds() -> None:
    stock = {"l40s": 16}
    start = smallest(of_role(possible(stock), Role.BOTH), 0.1)
    settled = enough(task(stock, rate=2.0), start)
    assert settled is not None and settled.holds
    assert settled.fleet.pools[0].replicas > start.pools[0].replicas == 1
    assert settled.report.attainment >= 0.9
    assert settled.report.cost.price_per_million_tokens is not None


def test_a_fleet_that_can_not_grow_is_given_up() -> None:
    stock = {"l40s": 1}
    start = smallest(of_role(possible(stock), Role.BOTH), 0.1)
    assert enough(task(stock, rate=20.0), start) is None


def test_growth_goes_to_the_pool_that_misses() -> None:
    stock = {"l40s": 16}
    start = CandidateFleet(of_role(possible(stock), Role.PREFILL, Role.DECODE))
    settled = enough(task(stock, rate=2.0), start)
    assert settled is not None
    prefill, decode = (pool.replicas for pool in settled.fleet.pools)
    assert prefill > decode
    assert [pool.replicas for pool in grown(start, 1).pools] == [1, 2]


def test_long_outputs_ask_for_more_decode_workers() -> None:
    stock = {"l40s": 16}
    start = CandidateFleet(of_role(possible(stock), Role.PREFILL, Role.DECODE))
    chatty = task(stock, requests=poisson(300, 30.0, 20, 400, seed=5))
    strict = replace(chatty, objectives=PlanObjectives(ttft_s=0.5, tpot_s=0.03, attainment=0.9))
    settled = enough(strict, start)
    assert settled is not None
    prefill, decode = (pool.replicas for pool in settled.fleet.pools)
    assert (prefill, decode > 1) == (1, True)


def test_the_highest_rate_holds_and_three_times_of_it_does_not() -> None:
    stock = {"h100-sxm": 1}
    fleet = CandidateFleet(of_role(possible(stock), Role.BOTH))
    requests = poisson(300, 20.0, 1000, 50, seed=5)
    settled = fastest_rate(task(stock, requests=requests), fleet)
    assert settled is not None and settled.holds
    assert enough(task(stock, 3 * settled.rate_scale, requests), fleet) is None


# --- files and the command ----------------------------------------------------------------------


def test_a_plan_of_single_devices_is_a_cluster_file_to_serve(tmp_path: Path) -> None:
    stock = {"h100-sxm": 2}
    fleet = CandidateFleet(of_role(possible(stock), Role.PREFILL, Role.DECODE))
    raw = servable_file(fleet, "llama-3.1-8b", FACTS, OBJECTIVES, LIMITS)
    (tmp_path / "plan.yaml").write_text(yaml.safe_dump(raw))
    loaded = load_config(tmp_path / "plan.yaml")
    assert [pool.role for pool in loaded.workers] == [Role.PREFILL, Role.DECODE]
    assert loaded.simulation.slo.tpot == pytest.approx(0.05)
    assert [pool.parallel.tensor for pool in loaded.workers] == [1, 1]


@pytest.mark.parametrize("roles", [(Role.BOTH,), (Role.PREFILL, Role.DECODE)])
def test_a_worker_of_a_plan_has_the_limits_that_its_kv_was_sized_for(
    roles: tuple[Role, ...], tmp_path: Path
) -> None:
    eight = find_facts("llama-3.1-8b", weights="float8", kv="float8")
    limits = fleet_limits(eight, 0.8)
    fleet = CandidateFleet(of_role(possible({"h100-sxm": 2}), *roles))
    raw = servable_file(fleet, "llama-3.1-8b", eight, OBJECTIVES, limits)
    (tmp_path / "plan.yaml").write_text(yaml.safe_dump(raw))
    loaded = load_config(tmp_path / "plan.yaml")
    assert loaded.transfer.staging_bytes == 4 * (HEADER_BYTES + 2048 * 65_536)
    assert loaded.transfer.staging_slabs == limits.staging_slabs
    assert loaded.engine.memory_fraction == 0.8 and loaded.engine.kv_dtype == "fp8"
    assert (loaded.model.quantization, loaded.model.dtype) == ("fp8", "bfloat16")
    assert loaded.scheduler.chunk_tokens(on_gpu=True) <= limits.prefill_chunk_tokens
    assert loaded.scheduler.max_running_requests == limits.max_running_requests
    assert limits.sending_slabs == SEND_BUFFERS


@pytest.mark.parametrize(
    ("weights", "dtype"), [(None, "auto"), ("float16", "bfloat16"), ("float32", "float32")]
)
def test_a_file_serves_the_format_that_was_planned(
    weights: Dtype | None, dtype: str, tmp_path: Path
) -> None:
    """Whatever the checkpoint is in."""
    facts = find_facts("llama-3.1-8b", weights=weights)
    fleet = CandidateFleet(of_role(possible({"h100-sxm": 2}), Role.BOTH))
    raw = servable_file(fleet, "llama-3.1-8b", facts, OBJECTIVES, LIMITS)
    (tmp_path / "plan.yaml").write_text(yaml.safe_dump(raw))
    loaded = load_config(tmp_path / "plan.yaml").model
    assert (loaded.dtype, loaded.quantization) == (dtype, "none")


def test_a_worker_has_a_rank_on_each_of_its_gpus(tmp_path: Path) -> None:
    for way in ways({"h100-sxm": 8}):
        pool = CandidatePool(role=Role.BOTH, copy=way, replicas=1, seconds=1.0)
        raw = servable_file(CandidateFleet((pool,)), "llama-3.1-8b", FACTS, OBJECTIVES, LIMITS)
        (tmp_path / "plan.yaml").write_text(yaml.safe_dump(raw))
        loaded = load_config(tmp_path / "plan.yaml").workers[0].parallel
        assert (loaded.tensor, loaded.pipeline) == (way.parallel.tensor, way.parallel.pipeline)


def test_no_copy_has_a_degree_that_no_worker_can_start() -> None:
    why = {8: "it has twelve heads"}
    facts = replace(FACTS, refusals=Refusals(unsplit=why, unstaged={4: "it has three layers"}))
    found = copies(facts, {"l40s": known_device("l40s")}, {"l40s": 8}, 1050, LIMITS)
    degrees = [(way.parallel.tensor, way.parallel.pipeline) for way in found]
    assert degrees == [(tensor, stages) for tensor in (1, 2, 4) for stages in (1, 2)]


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.csv"
    lines = [f"2023-11-16 18:00:{i:02}.0000000,1000,50" for i in range(40)]
    path.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *lines]))
    return path


def test_the_command_finds_the_cheapest_first(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "plan.yaml"
    asked = ["plan", "llama-3.1-8b", "--gpus", "l40s:2,h100-sxm:2", "--slo", "1s,50ms"]
    more = ["--trace", str(trace), "--tries", "3", "--processes", "1", "--out", str(out)]
    app([*asked, *more, "--budget", "4", "--format", "json"], standalone_mode=False)
    told = json.loads(capsys.readouterr().out)
    prices = [row["price_per_hour"] for row in told["cheapest"]]
    assert prices == sorted(prices) and prices[0] == pytest.approx(1.84)
    assert told["fastest"] and all(row["price_per_hour"] <= 4 for row in told["fastest"])
    assert load_config(out).workers[0].device == "cuda"


def test_a_fleet_that_can_not_serve_the_model_is_not_searched(trace: Path) -> None:
    options = ["--gpus", "h200-sxm:8", "--trace", str(trace), "--slo", "1s,50ms"]
    with pytest.raises(ModelError, match=r"no fleet can serve glm-5: the glm_moe_dsa .*indexed"):
        app(["plan", "glm-5", *options], standalone_mode=False)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--slo 1s,50ms", "give both"),
        ("--slo 1s --trace T --gpus l40s:1", "expected TTFT,TPOT"),
        ("--slo 1s,50ms --trace T --gpus l40s", "expected NAME:COUNT"),
        ("--slo 1s,50ms --trace T --gpus l40s:1 --price l4=1", "not among --gpus"),
        ("--slo 1s,50ms --trace T --gpus l40s:1 --price l40s=x", "NAME=NUMBER"),
        ("--slo 1s,1ms --trace T --gpus l40s:1 --processes 1", "no fleet of l40s:1"),
        ("--slo 1s,50ms --trace none.csv --gpus l40s:1", "none.csv: can't read it"),
    ],
)
def test_what_is_wrong_is_named(trace: Path, options: str, message: str) -> None:
    argv = ["plan", "llama-3.1-8b", *options.replace(" T ", f" {trace} ").split()]
    with pytest.raises(ConfigError, match=message):
        app(argv, standalone_mode=False)
