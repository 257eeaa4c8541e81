"""`kvrelay batch` without a server: lines, the output file, how many requests run at once."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.cli.for_users.batch_files import count_lines, opened
from cluster.cli.for_users.batch_lines import (
    BadLine,
    BatchRequest,
    CustomIds,
    Line,
    answer_line,
    failure_line,
    line_of,
    lines_of,
)
from cluster.cli.for_users.server import problem_of, server_at
from cluster.cli.for_users.window import Window
from kvrelay.errors import ConfigError


def text_of(**changes: Any) -> bytes:
    plain = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}
    return json.dumps(plain | changes).encode() + b"\n"


def parsed(text: bytes) -> Line:
    ((number, answer_id, text),) = lines_of([text])
    return line_of(number, answer_id, text)


def test_a_line_becomes_a_request() -> None:
    request = parsed(text_of(body={"prompt": "Grüße", "seed": 7}))
    assert isinstance(request, BatchRequest)
    assert (request.number, request.custom_id, request.url) == (1, "a", "/v1/completions")
    assert json.loads(request.body) == {"prompt": "Grüße", "seed": 7}


BAD = {
    "it is not JSON": b"{\n",
    "it is no JSON object": b"[1]\n",
    "an unknown field 'Body'": text_of(Body={}),
    "custom_id is missing": text_of(custom_id=None),
    "method: got": text_of(method="GET"),
    "url: got": text_of(url="/v1/embeddings"),
    "body: expected": text_of(body=[1]),
    "body.stream": text_of(body={"prompt": "x", "stream": True}),
}


@pytest.mark.parametrize(("why", "text"), BAD.items())
def test_a_bad_line_says_why(why: str, text: bytes) -> None:
    line = parsed(text)
    assert isinstance(line, BadLine)
    assert why in line.why


@given(st.binary(max_size=60))
def test_any_line_is_good_or_bad(text: bytes) -> None:
    for number, answer_id, one in lines_of([text]):
        assert isinstance(line_of(number, answer_id, one), BadLine)


def test_two_lines_with_one_custom_id() -> None:
    ids = CustomIds()
    first, second = (line_of(*one) for one in lines_of([text_of(), text_of()]))
    assert ids.checked(first) == first
    bad = ids.checked(second)
    assert isinstance(bad, BadLine)
    assert "line 1's already" in bad.why


def test_empty_lines_count_in_numbers_only(tmp_path: Path) -> None:
    path = tmp_path / "in"
    path.write_bytes(b"\n" + text_of() + b"  \n" + text_of())
    assert [number for number, _, _ in lines_of(path.read_bytes().splitlines())] == [2, 4]
    assert count_lines(path) == 2


# --- the output ---------------------------------------------------------------------------------


def good(text: bytes) -> bytes:
    request = parsed(text)
    assert isinstance(request, BatchRequest)
    return answer_line(request, 200, "r", {"choices": []})


def test_what_is_answered_is_known_again(tmp_path: Path) -> None:
    path = tmp_path / "out"
    with opened(path) as output:
        output.append(good(text_of()))
    assert path.stat().st_mode & 0o777 == 0o600
    with opened(path) as output:
        request = parsed(text_of())
        assert output.done.has(1, request.answer_id)
        assert not output.done.has(2, "other")
        assert output.done.good == 1
        with pytest.raises(ConfigError, match="line 1 has changed since it was answered"):
            output.done.has(1, parsed(text_of(custom_id="b")).answer_id)


def test_an_answer_in_openais_format(tmp_path: Path) -> None:
    request = parsed(text_of())
    assert isinstance(request, BatchRequest)
    told = json.loads(answer_line(request, 400, "r-1", {"error": {}}))
    assert set(told) == {"id", "custom_id", "response", "error"}
    assert told["response"] == {"status_code": 400, "request_id": "r-1", "body": {"error": {}}}
    failed = json.loads(failure_line(request, "invalid_line", "why"))
    assert (failed["response"], failed["error"]["code"]) == (None, "invalid_line")


@pytest.mark.parametrize("cut", range(1, 12))
def test_a_torn_last_line_is_cut_off(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "out"
    line = good(text_of())
    torn = good(b"\n".join([b"", text_of()]).strip() + b"\n")
    path.write_bytes(line + torn[: len(torn) * cut // 12])
    with opened(path) as output:
        assert output.done.answered.keys() == {1}
        output.append(failure_line(line_of(2, "batch_req_2_x", b"{"), "c", "m"))
    lines = path.read_bytes().splitlines()
    assert [json.loads(one)["id"][:12] for one in lines] == ["batch_req_1_", "batch_req_2_"]


@pytest.mark.parametrize("other", [b"hello\n", b'{"id": 3}\n', b'{"id": "x", "response": null}\n'])
def test_another_file_is_not_written_over(tmp_path: Path, other: bytes) -> None:
    path = tmp_path / "out"
    path.write_bytes(other)
    with pytest.raises(ConfigError, match="line 1: not an answer of kvrelay batch"), opened(path):
        pass
    assert path.read_bytes() == other


def test_two_runs_never_write_one_file(tmp_path: Path) -> None:
    path = tmp_path / "out"
    refused = pytest.raises(ConfigError, match="another kvrelay batch writes to it")
    with opened(path), refused, opened(path):
        pass


def test_a_full_disk_is_told() -> None:
    if not os.path.exists("/dev/full"):
        pytest.skip("no /dev/full here")
    from cluster.cli.for_users.batch_files import Output

    descriptor = os.open("/dev/full", os.O_WRONLY)
    try:
        with pytest.raises(ConfigError, match="can't write it: No space left"):
            Output(Path("out"), descriptor).append(b"{}\n")
    finally:
        os.close(descriptor)


# --- how many at once ---------------------------------------------------------------------------


def test_refusals_narrow_the_window_and_answers_widen_it() -> None:
    window = Window(most=8)
    numbers = [window.began() for _ in range(8)]
    assert not window.may_begin
    for number in numbers:  # all of one burst: they tell one thing
        window.refused(number)
    assert window.width == 6.0
    for _ in numbers:
        window.answered()
    assert 6.0 < window.width <= 8.0
    later = window.began()
    window.refused(later)
    assert window.width < 6.0


@given(st.lists(st.sampled_from(["begin", "refuse", "answer"]), max_size=200), st.integers(1, 9))
def test_the_window_keeps_its_bounds(acts: list[str], most: int) -> None:
    window, running = Window(most=most), []
    for act in acts:
        if act == "begin" and window.may_begin:
            running.append(window.began())
        elif act == "refuse" and running:
            window.refused(running[-1])
        elif act == "answer" and running:
            running.pop(0)
            window.answered()
        window.validate()
        assert window.open == len(running) <= most
    assert running or window.may_begin


# --- the server ---------------------------------------------------------------------------------


@pytest.mark.parametrize("address", ["nowhere", "ftp://h:1", "http://h", "h:0", "://h:1"])
def test_an_address_is_host_and_port(address: str) -> None:
    with pytest.raises(ConfigError, match="--address"):
        server_at(address, None, None)


def test_an_address_may_name_its_scheme() -> None:
    assert server_at("h:1", None, None).url == "http://h:1"
    assert server_at("https://h:1/", "k", None).url == "https://h:1"
    assert server_at("h:1", "k", None).headers == {"authorization": "Bearer k"}
    with pytest.raises(ConfigError, match="--api-key: expected printable ASCII"):
        server_at("h:1", "k\n", None)


def test_when_to_come_back() -> None:
    refused = problem_of(429, {"retry-after": "2", "retry-after-ms": "1250"}, b"")
    assert (refused.is_refusal, refused.retry_after_s) == (True, 1.25)
    assert problem_of(429, {"retry-after": "2"}, b"").retry_after_s == 2.0
    hopeless = problem_of(429, {"x-should-retry": "false", "retry-after": "2"}, b"")
    assert not hopeless.is_refusal
    assert problem_of(502, {}, b"<html>").message == "HTTP 502"
