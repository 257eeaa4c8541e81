"""Structured output through a router, a prefill and a decode worker: with what else one may ask."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from math import exp
from pathlib import Path
from typing import Any

import pytest

from engine.bundled import checkpoint_path
from kvrelay.types import Role
from tests.integration.local_kit import LocalHost
from tests.integration.split_kit import Cluster, running_cluster, worker_settings

PROMPT = "He said unto them,"
POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer"}, "y": {"enum": ["left", "right"]}},
    "required": ["x", "y"],
    "additionalProperties": False,
}
AS_JSON = {"json": POINT, "disable_any_whitespace": True}


@pytest.fixture(scope="module", name="cluster")
def a_cluster() -> Iterator[Cluster]:
    model = Path(checkpoint_path())
    with LocalHost() as first, LocalHost() as second:
        workers: Any = [
            (first, worker_settings("prefill", Role.PREFILL, model)),
            (second, worker_settings("decode", Role.DECODE, model)),
        ]
        with running_cluster(model, workers) as cluster:
            yield cluster


def choices(cluster: Cluster, structured: dict[str, Any], **fields: Any) -> list[dict[str, Any]]:
    asked = {"max_tokens": 60, "seed": 5, "temperature": 1.0, "structured_outputs": structured}
    found: list[dict[str, Any]] = cluster.completion(PROMPT, **asked | fields)["choices"]
    return found


def test_each_choice_is_an_answer_of_its_own(cluster: Cluster) -> None:
    found = choices(cluster, AS_JSON, n=4)
    ended = [json.loads(one["text"]) for one in found if one["finish_reason"] == "stop"]
    assert len(ended) > 1 and len({str(one) for one in ended}) > 1
    assert all(isinstance(one["x"], int) and one["y"] in ("left", "right") for one in ended)
    alone = choices(cluster, AS_JSON)[0]
    assert alone["text"] == found[0]["text"], "the same seed, the same first choice"
    assert alone["stop_reason"] is None


def test_log_probabilities_are_those_of_what_is_allowed(cluster: Cluster) -> None:
    (one,) = choices(cluster, {"choice": ["a", "b", "c"]}, logprobs=20)
    tops = one["logprobs"]["top_logprobs"]
    assert len(tops[0]) == 3 and sum(map(exp, tops[0].values())) == pytest.approx(1.0, abs=1e-3)
    assert one["text"] in tops[0]


def test_the_first_token_is_masked_too(cluster: Cluster) -> None:
    texts = {choices(cluster, {"choice": ["7"]}, max_tokens=1, seed=i)[0]["text"] for i in range(3)}
    assert texts == {"7"}


def test_stop_strings_and_stop_ids_cut_it(cluster: Cluster) -> None:
    (one,) = choices(cluster, {"regex": "[a-z]{9}#[a-z]{9}"}, stop=["#"])
    assert (one["finish_reason"], one["stop_reason"]) == ("stop", "#")
    assert len(one["text"]) == 9 and one["text"].isalpha()
    (whole,) = choices(cluster, {"regex": "[a-z]{9}#[a-z]{9}"})
    assert whole["text"].startswith(one["text"] + "#") and len(whole["text"]) == 19
    second = whole["token_ids"][1]
    (cut,) = choices(cluster, {"regex": "[a-z]{9}#[a-z]{9}"}, stop_token_ids=[second])
    assert cut["stop_reason"] == second and len(cut["token_ids"]) == 2


def test_min_tokens_and_ignored_ends(cluster: Cluster) -> None:
    word = {"regex": "[a-z]{1,40}"}
    for fields in ({"min_tokens": 60}, {"ignore_eos": True}):
        (one,) = choices(cluster, word, **fields)
        assert len(one["text"]) == 40 or one["finish_reason"] == "length", one
        (exact,) = choices(cluster, {"choice": ["done"]}, **fields)
        assert (exact["text"], exact["finish_reason"]) == ("done", "stop")


def test_a_free_answer_in_the_same_batch_is_left_as_it_is(cluster: Cluster) -> None:
    plain = {"max_tokens": 40, "seed": 1, "temperature": 1.0, "ignore_eos": True}
    alone = cluster.completion(PROMPT, **plain)["choices"][0]
    with ThreadPoolExecutor(4) as pool:
        bound = [pool.submit(choices, cluster, {"regex": "[0-9]{40}"}) for _ in range(3)]
        free = cluster.completion(PROMPT, **plain)["choices"][0]
        texts = [one.result()[0]["text"] for one in bound]
    assert all(text.isdigit() for text in texts) and len({*texts}) == 1
    assert free["token_ids"] == alone["token_ids"]


def test_a_continuation_that_its_grammar_forbids_ends_alone(cluster: Cluster) -> None:
    told = {"choices": [{"token_ids": [700, 701, 702]}]}
    body = {
        "model": "test-model",
        "prompt": PROMPT,
        "max_tokens": 20,
        "seed": 1,
        "continuation": told,
        "structured_outputs": {"regex": "[0-9]+"},
    }
    answer = cluster.http.post("/v1/completions", json=body)
    assert answer.status_code == 422, answer.text
    assert answer.json()["error"]["code"] == "grammar"
    assert choices(cluster, {"choice": ["7"]})[0]["text"] == "7", "the workers live"
