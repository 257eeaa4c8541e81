"""`kvrelay trace`: what became of a request, by any id that its client knows."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cluster.cli.main import app
from kvrelay import Client
from kvrelay.errors import KvrelayError
from kvrelay.types import Role
from tests.integration.split_kit import (
    Cluster,
    WorkerHost,
    running_cluster,
    worker_settings,
)

PROMPT = list(range(2, 60))
TOKENS = 2000
ATTEMPT = [
    *("asked", "reserved", "sent to prefill", "prefill started"),
    *("first token", "handed over", "decodes"),
]


@pytest.fixture
def decoders() -> Iterator[tuple[WorkerHost, WorkerHost]]:
    """Two processes of this test, so that it may kill one."""
    with WorkerHost() as first, WorkerHost() as second:
        yield first, second


@pytest.fixture
def cluster(
    long_llama: Path,
    hosts: tuple[WorkerHost, WorkerHost],
    decoders: tuple[WorkerHost, WorkerHost],
) -> Iterator[Cluster]:
    prefill = (hosts[0], worker_settings("prefill-0", Role.PREFILL, long_llama))
    decode = [
        (host, worker_settings(f"decode-{number}", Role.DECODE, long_llama))
        for number, host in enumerate(decoders)
    ]
    with running_cluster(long_llama, [prefill, *decode]) as cluster:
        yield cluster


class Traced:
    """What the command prints."""

    def __init__(self, cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
        self._routers = ["--address", cluster.internal_grpc]
        self._capsys = capsys

    def table(self, request_id: str) -> list[str]:
        app(["trace", request_id, *self._routers], standalone_mode=False)
        return self._capsys.readouterr().out.splitlines()

    def stories(self, request_id: str, *more: str) -> list[dict[str, Any]]:
        options = [*self._routers, *more, "--format", "json"]
        app(["trace", request_id, *options], standalone_mode=False)
        facts: dict[str, Any] = json.loads(self._capsys.readouterr().out)
        return list(facts["stories"])


@pytest.fixture
def traced(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> Traced:
    return Traced(cluster, capsys)


def moments(story: dict[str, Any]) -> list[str]:
    return [event["moment"] for event in story["events"]]


def test_a_request_that_was_resumed_shows_both_attempts(
    cluster: Cluster, traced: Traced, decoders: tuple[WorkerHost, WorkerHost]
) -> None:
    body = {"prompt": PROMPT, "max_tokens": TOKENS, "ignore_eos": True, "stream": True}
    headers = {"x-request-id": "my-trace"}
    with cluster.http.stream("POST", "/v1/completions", json=body, headers=headers) as answer:
        lines = answer.iter_lines()
        first = json.loads(next(lines).removeprefix("data: "))
        (story,) = traced.stories("my-trace")
        while "decodes" not in moments(story):
            (story,) = traced.stories("my-trace")
        assert story["request_id"] == first["id"]
        doomed = story["events"][-1]["workers"][0]
        decoders[int(doomed[-1])].kill()
        assert [line for line in lines if line][-1] == "data: [DONE]"
    (story,) = traced.stories(first["id"])
    other = {"decode-0": "decode-1", "decode-1": "decode-0"}[doomed]
    told = moments(story)
    failed = told.index("tried again")
    assert told[:4] == ["submitted", *ATTEMPT[:3]]
    assert sorted(told[1:failed]) == sorted(told[failed + 1 : -1]) == sorted(ATTEMPT)
    assert told[-1] == "done"
    asked = [event["workers"] for event in story["events"] if event["moment"] == "asked"]
    assert asked == [["prefill-0", doomed], ["prefill-0", other]]
    (again,) = (event for event in story["events"] if event["moment"] == "tried again")
    assert f"worker lost: worker {doomed} was lost" in again["reason"]
    assert story["events"][-1]["reason"] == f"{TOKENS} tokens"
    assert_the_table_says_the_same(traced.table("my-trace"), story)


def assert_the_table_says_the_same(table: list[str], story: dict[str, Any]) -> None:
    assert table[0].startswith(f"{story['request_id']} at 127.0.0.1:")
    assert table[1].split() == ["seconds", "what", "worker", "why"]
    assert len(table) == 2 + len(story["events"])
    (lost,) = (line for line in table if " tried again " in line)
    assert "worker lost: worker decode-" in lost
    assert " prefill-0 -> decode-" in lost
    assert table[-1].rstrip().endswith(f" {TOKENS} tokens")
    seconds = [event["at_s"] for event in story["events"]]
    assert seconds[0] == 0.0
    assert 0 < seconds[-1] < story["age_s"]


def test_every_id_that_a_client_knows_leads_to_its_requests(
    cluster: Cluster, traced: Traced
) -> None:
    body = {"prompt": [PROMPT, PROMPT[1:]], "max_tokens": 2, "n": 2}
    headers = {"x-request-id": "two-prompts"}
    answer = cluster.http.post("/v1/completions", json=body, headers=headers).json()
    for known in ("two-prompts", answer["id"]):
        stories = traced.stories(known)
        assert [story["request_id"] for story in stories] == [f"{answer['id']}-{i}" for i in (0, 1)]
        assert [story["events"][-1]["reason"] for story in stories] == ["4 tokens"] * 2
        assert [moments(story).count("choice done") for story in stories] == [2, 2]
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    answer = cluster.http.post("/v1/chat/completions", json=chat).json()
    (story,) = traced.stories(answer["id"])
    assert moments(story)[-1] == "done"
    with Client(cluster.grpc_address) as client:
        client.generate("hi", max_tokens=2, request_id="job-1")
    (story,) = traced.stories("job-1")
    assert moments(story)[-1] == "done"


def test_an_unknown_id_says_what_is_kept(cluster: Cluster, traced: Traced) -> None:
    message = "no request 'nobody' is known here: give the id of an answer, or the x-request-id; "
    with pytest.raises(KvrelayError, match=message):
        traced.stories("nobody")
    with pytest.raises(KvrelayError, match=r"'nobody' is known.*; 127.0.0.1:1: no router answers"):
        traced.stories("nobody", "--address", "127.0.0.1:1")
