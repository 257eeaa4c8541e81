"""Bad requests against a real cluster: a clear message, the right status, and nothing held."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import psutil
import pytest

from kvrelay import Client
from kvrelay.errors import InvalidRequest
from tests.integration.split_kit import Cluster, WorkerHost, wait_until
from tests.models import VOCAB_SIZE

# (fields beside model and prompt, error's param, words of the message)
BAD_PARAMETERS: list[tuple[dict[str, Any], str, str]] = [
    ({"temperature": -0.1}, "temperature", "0"),
    ({"top_p": 0}, "top_p", "0"),
    ({"top_p": 1.5}, "top_p", "1"),
    ({"top_k": -2}, "top_k", "-1"),
    ({"min_p": 1.1}, "min_p", "1"),
    ({"presence_penalty": 2.5}, "presence_penalty", "2"),
    ({"frequency_penalty": -2.5}, "frequency_penalty", "2"),
    ({"repetition_penalty": 0}, "repetition_penalty", "0"),
    ({"max_tokens": 0}, "max_tokens", "1"),
    ({"max_tokens": 4, "min_tokens": 5}, "min_tokens", "0 to 4"),
    ({"n": 0}, "n", "1"),
    ({"n": 129}, "n", "128"),
    ({"logprobs": 21}, "logprobs", "20"),
    ({"seed": 2**64}, "seed", "64"),
    ({"logit_bias": {"5": 101}}, "logit_bias", "100"),
    ({"logit_bias": {str(VOCAB_SIZE): 1}}, "logit_bias", str(VOCAB_SIZE)),
    ({"stop": [""]}, "stop", "empty"),
    ({"stop": ["x"] * 17}, "stop", "16"),
    ({"stop_token_ids": [VOCAB_SIZE]}, "stop_token_ids", str(VOCAB_SIZE)),
]


@pytest.mark.parametrize(("fields", "param", "words"), BAD_PARAMETERS)
def test_parameters_out_of_range(
    split: Cluster, fields: dict[str, Any], param: str, words: str
) -> None:
    body = {"model": "test-model", "prompt": [5, 6], **fields}
    response = split.http.post("/v1/completions", json=body)
    error = response.json()["error"]
    assert response.status_code == 400
    assert error["param"] == param
    assert words in error["message"]
    split.assert_clean()


@pytest.mark.parametrize(
    ("prompt", "code", "words"),
    [
        ([], None, "empty"),
        ("", None, "empty"),
        ([VOCAB_SIZE], None, str(VOCAB_SIZE)),
        ([-1], None, "0"),
        ([5] * 1024, "context_length_exceeded", "1024"),
    ],
    ids=["no ids", "no text", "id too large", "id below 0", "too long"],
)
def test_prompts_that_can_not_be(
    split: Cluster, prompt: list[int] | str, code: str | None, words: str
) -> None:
    body = {"model": "test-model", "prompt": prompt, "max_tokens": 4}
    response = split.http.post("/v1/completions", json=body)
    assert response.status_code == 400, response.text
    assert words in response.json()["error"]["message"]
    if code is not None:
        assert response.json()["error"]["code"] == code
    split.assert_clean()


def test_unknown_model_is_404(split: Cluster) -> None:
    response = split.http.post("/v1/completions", json={"model": "other", "prompt": [5]})
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "model_not_found"
    assert "other" in response.json()["error"]["message"]
    split.assert_clean()


def test_malformed_json_is_400(split: Cluster) -> None:
    headers = {"content-type": "application/json"}
    response = split.http.post("/v1/completions", content=b'{"prompt": ', headers=headers)
    assert response.status_code == 400
    assert "JSON" in response.json()["error"]["message"]
    split.assert_clean()


def test_unknown_and_unsupported_fields_are_named(split: Cluster) -> None:
    for field, value in (("temprature", 1), ("suffix", "x"), ("best_of", 4)):
        body = {"model": "test-model", "prompt": [5], field: value}
        response = split.http.post("/v1/completions", json=body)
        assert response.status_code == 400, field
        assert field in response.json()["error"]["message"]
    split.assert_clean()


def test_a_body_over_the_limit_is_413(split: Cluster) -> None:
    body = {"model": "test-model", "prompt": "x" * (5 * 2**20)}
    response = split.http.post("/v1/completions", json=body)
    assert response.status_code == 413
    assert str(4 * 2**20) in response.json()["error"]["message"]
    split.assert_clean()


def test_the_same_over_grpc(split: Cluster) -> None:
    with Client(split.grpc_address) as client:
        for options, words in (
            ({"temperature": -1.0}, "temperature"),
            ({"top_p": math.nan}, "top_p"),
            ({"n": 0}, "n"),
        ):
            with pytest.raises(InvalidRequest, match=words):
                client.generate([5, 6], max_tokens=2, **options)
        with pytest.raises(InvalidRequest) as caught:
            client.generate([5] * 1024, max_tokens=4)
        assert caught.value.code == "context_length_exceeded"
        assert isinstance(caught.value.__cause__, grpc.RpcError)
    split.assert_clean()


@contextmanager
def suspended(host: WorkerHost) -> Iterator[None]:
    process = psutil.Process(host.pid)
    process.suspend()
    try:
        yield
    finally:
        process.resume()


def test_a_request_id_that_runs_already_is_refused(
    split: Cluster, hosts: tuple[WorkerHost, WorkerHost]
) -> None:
    """The first one can't have ended: its decode worker stands still."""
    running = split.router.process.dispatcher.running_requests
    with Client(split.grpc_address) as client:
        with suspended(hosts[1]):
            stream = client.stream([5, 6], max_tokens=600, ignore_eos=True, request_id="twice")
            wait_until(lambda: split.router.read(running) == 1, "the first one runs")
            with pytest.raises(InvalidRequest, match="twice"):
                client.generate([5, 6], max_tokens=2, request_id="twice")
        next(stream)
        stream.close()
    split.assert_clean()
