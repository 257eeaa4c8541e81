"""Which rows benches print: headlines that are measured, and none that cannot differ."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from unittest.mock import Mock

import pytest

from bench.live.calibrate import Calibration, _check
from bench.live.offered import LIMIT, Mix, one
from bench.live.outcome import Outcome
from bench.live.points import Point
from bench.live.results import Results, read, write
from bench.live.subject import questions
from bench.serving import overload
from bench.serving.http_load import Sent
from bench.serving.serve import Arm, _latency_rows
from engine.bundled import checkpoint_path

CONTEXT = json.loads((checkpoint_path() / "config.json").read_text())["max_position_embeddings"]
KNOWN = Calibration(ttft_s=0.1, tpot_s=0.002, capacity_per_s=10.0)
TEXTS = {"own": "the model's own ends", "oracle": "exactly"}


def point(policy: str, *, own_ends: bool, good: int) -> Point:
    return Point(
        policy=policy,
        ladder=policy == "predictive",
        own_ends=own_ends,
        routers=1,
        factor=4.0,
        rate_per_s=40.0,
        seconds=10.0,
        offered=400,
        admitted=100,
        good=good,
        refused={},
        late_first=0,
        late_others=0,
        ttft_p50_s=0.1,
        ttft_p99_s=0.2,
        tpot_p50_s=0.002,
        tpot_p99_s=0.004,
        refusal_p99_s=None,
    )


@pytest.fixture
def results() -> Results:
    return Results(
        model="bundled",
        calibrations={"own": KNOWN, "oracle": KNOWN},
        points=[
            point("predictive", own_ends=False, good=90),
            point("predictive", own_ends=True, good=70),
            point("none", own_ends=True, good=10),
        ],
    )


def test_the_headline_has_outputs_that_end_by_themselves(results: Results) -> None:
    found = {
        row.name: row for row in overload.rows(results, TEXTS) if row.name.startswith("goodput")
    }
    assert {name: row.value for name, row in found.items()} == {
        "goodput at 4 x, none": 1.0,
        "goodput at 4 x, predictive": 7.0,
        "goodput at 4 x, predictive, oracle": 9.0,
    }
    assert list(found)[-1] == "goodput at 4 x, predictive, oracle"
    assert found["goodput at 4 x, predictive"].method.startswith("the model's own ends; ")
    assert found["goodput at 4 x, predictive, oracle"].method.startswith("exactly; ")


def test_results_of_both_ends_are_kept_in_one_file(results: Results, tmp_path: Path) -> None:
    write(tmp_path / "results.json", results)
    assert read(tmp_path / "results.json", "bundled") == results


def test_both_ends_are_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["bench.serving.overload"])
    assert overload._parsed().ends == ["own", "oracle"]


def test_the_oracle_is_predictive_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[tuple[str, str]] = []
    monkeypatch.setattr("sys.argv", ["bench.serving.overload"])
    monkeypatch.setattr(overload, "corpus", lambda: (1, 2, 3))
    monkeypatch.setattr(overload, "calibrate", lambda subject, text: KNOWN)
    kept = Results(model="bundled")
    args = overload._parsed()
    for ends in overload.ENDS:

        def run(plan: Mock, *_: object, ends: str = ends) -> Mock:
            measured.append((ends, plan.policy.admission))
            return Mock(points=[], predictions=[])

        monkeypatch.setattr(overload, "run", run)
        overload.measure(args, ends, Mock(), kept)
    assert measured == [*(("own", name) for name in overload.POLICIES), ("oracle", "predictive")]
    assert list(kept.calibrations) == ["own", "oracle"]


def test_the_split_has_no_row_that_cannot_differ() -> None:
    sent = Sent(token_s=(0.5, 0.51, 0.53), ledger_ms={})
    split, both = (Arm(cluster=Mock(), loops=[[sent]]) for _ in range(2))
    names = [row.name for row in _latency_rows(split, both, "method")]
    assert len(names) == 9 and not [name for name in names if "tokens/s" in name]


def test_random_weights_have_no_ends_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["bench.serving.overload", "--model", "smollm"])
    assert overload._parsed().ends == ["oracle"]
    monkeypatch.setattr(
        "sys.argv", ["bench.serving.overload", "--model", "smollm", "--ends", "own"]
    )
    with pytest.raises(SystemExit):
        overload._parsed()


def test_answers_that_end_by_themselves_say_nothing_of_their_length() -> None:
    corpus, mix = range(10_000), Mix(questions=((7, 8), (9,)))
    rng = Random(1)
    asked = [one(mix, corpus, rng) for _ in range(20)]
    assert {each.max_tokens for each in asked} == {LIMIT}
    assert {each.prompt_ids[-1] for each in asked} == {8, 9}
    assert not any(each.ignore_eos for each in asked)
    assert all(1024 <= len(each.prompt_ids) <= 1792 for each in asked)
    assert len({each.seed for each in asked}) == 20
    assert max(mix.prompt_tokens) + LIMIT <= CONTEXT, "every prompt leaves room for the limit"
    known = [one(Mix(), corpus, rng) for _ in range(20)]
    assert all(each.ignore_eos for each in known)
    assert len({each.max_tokens for each in known}) > 10


def test_questions_are_turns_of_a_chat() -> None:
    turns = questions()
    assert len(turns) > 50 and len({turn[0] for turn in turns}) == 1
    assert len({turn[-1] for turn in turns}) == 1


def test_calibration_counts_no_request_that_was_not_served() -> None:
    refused = Outcome(sent_s=0.0, ended="refused", reason="context_length_exceeded")
    with pytest.raises(RuntimeError, match="1 requests refused without load: context_length"):
        _check([refused])
