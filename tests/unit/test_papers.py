"""The published results that our formulas and the simulator must give."""

from __future__ import annotations

import json
from dataclasses import replace
from math import exp, log
from pathlib import Path

import pytest

from bench.papers import (
    distserve,
    dynamo,
    silicon,
    splitwise,
    splitwise_fleets,
)
from bench.papers.goodput import Objectives, attainment, highest_rate, poisson
from bench.papers.mooncake import admission, goodput, rejections
from bench.papers.silicon_fit import START, Fitted, fit, pattern_search, predict
from bench.papers.silicon_rows import Measured, read_measured
from cluster.config.schema import Config
from cluster.sim.profiles.roofline import Precision
from cluster.sim.results import output
from cluster.sim.simulation import Scale
from cluster.sim.trace import Outcome, TraceRequest
from engine.core.step_times import StepWork

_DATA = Path(__file__).parents[1] / "data"


# --- Splitwise ----------------------------------------------------------------------------------


def test_splitwise_s_example_is_met_to_every_digit() -> None:
    claims = list(splitwise.golden(_DATA / "splitwise-sim/perf_model.csv"))
    assert len(claims) == 3 * 3 + 3 * 4
    assert {claim.off for claim in claims} == {"every digit"}


def test_the_simulator_meets_it_where_nothing_is_moved() -> None:
    claims = list(splitwise.simulated(_DATA / "splitwise-sim/perf_model.csv"))
    alone = [claim for claim in claims if claim.what.startswith("one DGX")]
    assert len(alone) == 6 and {claim.off for claim in alone} == {"every digit"}
    split = [c for c in claims if c.what.startswith("Splitwise") and c.what.endswith("response")]
    assert all(c.paper is not None and 0.95 < c.ours / c.paper < 1.000001 for c in split)


class Alone:
    """A prompt takes a second, a token a tenth."""

    def step_s(self, work: StepWork) -> float:
        return 1.0 if work.prefill_tokens else 0.1


def test_nine_limits_are_of_slowdowns_against_a_request_alone() -> None:
    slow = outcome(1.5, 0.12)
    assert splitwise_fleets.slowdowns(slow, Alone()) == pytest.approx((1.5, 1.2, 2.7 / 2.0))
    assert splitwise_fleets.slowdowns(outcome(1, 1, done=False), Alone())[2] == float("inf")
    assert not splitwise_fleets.within_limits([slow], Alone())
    assert splitwise_fleets.within_limits([outcome(1.5, 0.1)], Alone())
    late = [outcome(1.0, 0.1)] * 8 + [outcome(3.5, 0.1)] * 2
    assert not splitwise_fleets.within_limits(late, Alone())


def test_the_fleets_of_equal_power_are_that() -> None:
    watts = [fleet.total(splitwise_fleets.POWER) for fleet in splitwise_fleets.FLEETS]
    assert watts == pytest.approx([81.6] * 6, rel=0.03)


# --- Mooncake -----------------------------------------------------------------------------------


def test_reuse_pays_from_the_bandwidths_that_mooncake_says() -> None:
    claims = list(goodput.claims())
    assert len(claims) == 3
    assert all(round(claim.ours) == claim.paper for claim in claims)


def test_longer_prefixes_need_less_bandwidth() -> None:
    model = goodput.Llama70b()
    short, long = (goodput.break_even_bytes_per_s(model, 2.5e15, n) for n in (1024, 131_072))
    assert short / long == pytest.approx((22 * 8192 + 4 * 131_072) / (22 * 8192 + 4 * 1024))


def test_mooncake_s_baseline_rejects_what_it_has_computed() -> None:
    requests = [
        TraceRequest(arrival_s=0.05 * i, input_tokens=1000, output_tokens=200) for i in range(40)
    ]
    setting = rejections.Setting(prefill=1, decode=1, tpot_s=0.015, rate=1.0)
    found = {
        policy: rejections.simulated(policy, requests, setting) for policy in admission.SIMULATIONS
    }
    refused = {policy: one.report.refused.keys() for policy, one in found.items()}
    assert refused["baseline"] == {"after_prefill"}
    assert refused["early rejection"] == {"after_prefill", "tpot_unreachable"}
    assert refused["predictive"] == {"tpot_unreachable"}
    for one in found.values():
        assert one.served_tokens == pytest.approx(one.report.attainment), "all are alike"
    claimed = {claim.what: claim for claim in rejections.claims(found)}
    paper = claimed["prediction: against baseline"].paper
    assert paper == pytest.approx(-14.2, abs=0.05)


def test_mooncake_s_prediction_takes_all_sequences_to_decode_equally_long() -> None:
    times = admission.DecodeTimes()
    for name, at_s, done in (("a", 1, False), ("b", 2, False), ("a", 5, True), ("b", 4, True)):
        times.delivered(name, at_s, done=done)
    assert times.usual_s == 3
    times.delivered("c", 7, done=False)
    times.forget("c")
    times.delivered("c", 9, done=False)
    times.delivered("c", 18, done=True)
    assert times.usual_s == 5


def test_a_part_of_a_trace_begins_at_once() -> None:
    requests = [TraceRequest(arrival_s=i, input_tokens=1, output_tokens=1) for i in range(4)]
    assert [one.arrival_s for one in rejections.from_(requests, 2)] == [0, 1]


# --- DistServe ----------------------------------------------------------------------------------


def outcome(ttft_s: float, tpot_s: float, *, done: bool = True) -> Outcome:
    request = TraceRequest(arrival_s=1.0, input_tokens=5, output_tokens=11)
    last_s = 1 + ttft_s + 10 * tpot_s
    return Outcome(
        request=request, first_token_s=1 + ttft_s, last_token_s=last_s, tokens=11, done=done
    )


def test_attainment_is_over_all_that_were_offered() -> None:
    objectives = Objectives(ttft_s=0.2, tpot_s=0.1)
    slow, stalling, broken = outcome(0.3, 0.05), outcome(0.1, 0.2), outcome(0.1, 0.05, done=False)
    assert attainment([outcome(0.1, 0.05), slow, stalling, broken], objectives) == 0.25


@pytest.mark.parametrize("knee", [0.3, 4.0, 97.0])
def test_the_highest_rate_is_found(knee: float) -> None:
    found = highest_rate(lambda rate: rate <= knee, start=4.0)
    assert knee * 0.97 <= found <= knee


def test_a_hopeless_fleet_has_no_rate() -> None:
    assert highest_rate(lambda rate: False, start=4.0) == 0.0


def test_poisson_arrivals_have_their_rate_and_a_seed() -> None:
    requests = poisson(4000, 5.0, 512, 64, seed=3)
    assert requests[-1].arrival_s == pytest.approx(800, rel=0.05)
    assert requests == poisson(4000, 5.0, 512, 64, seed=3) != poisson(4000, 5.0, 512, 64, seed=4)


def test_disaggregation_serves_more_per_gpu() -> None:
    profile: dict[str, object] = {
        "kind": "distserve",
        "file": str(_DATA / "distserve-sim/profiler-a100-80g.vllm.json"),
        "model": "facebook/opt-13b",
    }
    strict = Objectives(ttft_s=0.2, tpot_s=0.1)
    one, split = (
        distserve.goodput(distserve.cluster_of(fleet, profile), strict, count=60, seed=1)
        / fleet.gpus
        for fleet in (distserve.ONE, distserve.SPLIT)
    )
    assert split > 1.4 * one > 0


# --- silicon ------------------------------------------------------------------------------------

ROW = Measured(
    model="meta-llama/Llama-3.1-70B",
    backend="vllm",
    version="",
    precision=Precision(weights="float8", experts="float8"),
    tensor_parallel=4,
    prompt_tokens=1024,
    output_tokens=1024,
    concurrency=16,
    ttft_s=1.0,
    tpot_s=1.0,
)
TRUTH = tuple(log(x) for x in (0.8, 0.4, 1e-3, 3e-5, 2e-5, 0.3, 0.1))


def made_rows() -> list[Measured]:
    """What servers with the true shares would measure."""
    settings = [
        replace(ROW, tensor_parallel=ways, concurrency=clients, prompt_tokens=tokens)
        for ways in (1, 2, 4, 8)
        for clients in (1, 8, 64)
        for tokens in (1024, 8192)
    ]
    told = [predict(row, Fitted.at(TRUTH)) for row in settings]
    return [
        replace(row, ttft_s=one.ttft_s, tpot_s=one.tpot_s)
        for row, one in zip(settings, told, strict=True)
    ]


def test_a_fit_predicts_servers_that_follow_the_model() -> None:
    rows = made_rows()
    fitted = Fitted.at(fit(rows, START, pull=0.0))
    for row in rows:
        assert predict(row, fitted).tpot_s == pytest.approx(row.tpot_s, rel=0.06)


def test_more_clients_wait_longer_for_both() -> None:
    few, many = (predict(replace(ROW, concurrency=n), Fitted.at(TRUTH)) for n in (1, 64))
    assert many.tpot_s > few.tpot_s and many.ttft_s > few.ttft_s


def test_shares_end_at_one() -> None:
    beyond = Fitted.at(tuple(x + 3 for x in TRUTH))
    assert (beyond.memory, beyond.compute, beyond.burst) == (1.0, 1.0, 1.0)


def test_a_search_finds_the_bottom_of_a_bowl() -> None:
    found = pattern_search(lambda p: (p[0] - 2) ** 2 + abs(p[1] + 1), (0.0, 0.0))
    assert found == pytest.approx((2.0, -1.0), abs=0.05)
    assert exp(found[0]) > 1


def test_repeats_of_a_setting_are_in_one_half() -> None:
    assert replace(ROW, ttft_s=2.0, tpot_s=3.0).half == ROW.half
    halves = {replace(ROW, concurrency=n).half for n in range(1, 30)}
    assert halves == {0, 1}


def test_held_out_silicon_is_predicted_as_well_as_published_simulators_do() -> None:
    rows, left_out = read_measured(_DATA / "silicon/h200_measured.csv")
    assert len(rows) + left_out.total() == 471
    fold = silicon.hold_out(rows, half=1)
    found = silicon.overall("all", fold.outcomes)
    assert found.rows == sum(row.half for row in rows)
    assert found.tpot_percent < 9 and found.ttft_percent < 20


# --- Dynamo -------------------------------------------------------------------------------------


def dynamo_prefill_s(tokens: int) -> float:
    return (4.209989e-7 * tokens**2 + 1.518344e-2 * tokens + 16.50142) / 1e3


def dynamo_decode_s(kv_tokens: int, blocks: int) -> float:
    used = kv_tokens / (512 * blocks)
    return (-25.74 * used**2 + 54.01 * used + 5.74) / 1e3


def test_round_robin_in_turn_and_packed_as_by_hand() -> None:
    """The third prompt shares a worker with the first, whose rest it is packed with."""
    asked = [(0.0, 9192), (0.0, 1000), (0.01, 500)]
    requests = [
        TraceRequest(
            arrival_s=at_s,
            input_tokens=tokens,
            output_tokens=11,
            hash_ids=tuple(range(1000 * i, 1000 * i + -(-tokens // 512))),
        )
        for i, (at_s, tokens) in enumerate(asked)
    ]
    config = Config.model_validate(dynamo.cluster_of("round_robin", 6000, 2), strict=False)
    found = output.simulate(config, requests, Scale()).outcomes
    both_s = dynamo_prefill_s(8192) + dynamo_prefill_s(1500)
    alone_s = [dynamo_decode_s(n, 6000) for n in range(1001, 1011)]
    assert [one.ttft_s for one in found] == pytest.approx(
        [both_s, dynamo_prefill_s(1000), both_s - 0.01], abs=2e-5
    )
    assert found[1].tpot_s == pytest.approx(sum(alone_s) / 10, rel=2e-3)
    together_s = dynamo_decode_s(9192 + 500 + 11, 6000)
    assert found[0].tpot_s is not None
    waited_s = found[0].tpot_s * 10 - together_s * 10
    assert 0 <= waited_s <= 1.01 * together_s, "the step that ran when it came, at most"


def test_dynamo_s_report_is_read() -> None:
    summary = {
        "num_requests": 2,
        "completed_requests": 2,
        "mean_ttft_ms": 30.0,
        "p99_ttft_ms": 40.0,
        "mean_tpot_ms": 6.5,
        "mean_e2e_latency_ms": 700.0,
        "prefix_cache_reused_ratio": 0.25,
    }
    said = {"summary": summary, "prompt_computed_ms": [20.0, 30.0]}
    measured = dynamo.parse_peer(json.dumps(said))
    assert (measured.ttft, measured.p99_ttft, measured.told_ttft) == (25.0, 30.0, 30.0)
    assert (measured.tpot, measured.e2e, measured.reuse) == (6.5, 700.0, 0.25)
    some = said | {"summary": summary | {"completed_requests": 1}}
    with pytest.raises(dynamo.PeerMissed, match="1 of 2"):
        dynamo.parse_peer(json.dumps(some))
    for broken in ("", "[]", "{}", json.dumps(said | {"prompt_computed_ms": []})):
        with pytest.raises(dynamo.PeerMissed, match="isn't its report"):
            dynamo.parse_peer(broken)
