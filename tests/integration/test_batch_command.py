"""`kvrelay batch` and a real server: every line is answered once, whatever comes between."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from kvrelay.errors import Refused
from tests.integration.faces_kit import in_loop, served
from tests.integration.http_kit import checkpoint_folder as checkpoint_folder
from tests.integration.split_kit import Cluster, wait_until
from tests.integration.test_promises_brought_back import refusing
from tests.unit.fake_dispatcher import FakeDispatcher

COMMAND = [sys.executable, "-m", "cluster", "batch"]


def write(path: Path, lines: list[dict[str, Any] | str]) -> Path:
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("".join(f"{text}\n" for text in texts))
    return path


def line(custom_id: str, url: str = "/v1/completions", **body: Any) -> dict[str, Any]:
    given = {"prompt": "the earth"} if url == "/v1/completions" else {}
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": {**given, **body}}


def answers(path: Path) -> dict[str | None, dict[str, Any]]:
    told = [json.loads(text) for text in path.read_text().splitlines()]
    assert len({one["id"] for one in told}) == len(told)
    return {one["custom_id"]: one for one in told}


async def run(url: str, *arguments: object, expected: int = 0, **env: str) -> tuple[str, str]:
    """(stdout, stderr)"""
    process = await asyncio.create_subprocess_exec(
        *COMMAND,
        *map(str, arguments),
        f"--address={url}",
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | env,
    )
    out, err = (text.decode() for text in await process.communicate())
    assert process.returncode == expected, (out, err)
    return out, err


@in_loop
async def test_good_and_bad_lines(folder: Path, tmp_path: Path) -> None:
    chat = line("chat", "/v1/chat/completions", messages=[{"role": "user", "content": "the earth"}])
    source = write(
        tmp_path / "in",
        [line("good", max_tokens=2), "{", chat, line("wrong", top_p=7), line("good"), ""],
    )
    async with served(folder) as s:
        out, err = await run(s.url, source, tmp_path / "out", "--format", "json", expected=1)
        told = answers(tmp_path / "out")
        asked = len(s.dispatcher.requests)
        assert told["chat"]["response"]["body"]["object"] == "chat.completion"
        assert told["wrong"]["response"]["status_code"] == 400
        assert told[None]["error"]["message"].startswith("line 2: it is not JSON")
        summary = json.loads(out)
        assert (summary["lines"], summary["answered"], summary["failed"]) == (5, 2, 3)
        assert summary["bad_lines"] == 2
        assert "kvrelay: line 5 (good): custom_id 'good' is line 1's already" in err
        _, err = await run(s.url, source, tmp_path / "out", expected=1)
        assert len(s.dispatcher.requests) == asked, "every line was done"
        assert len(answers(tmp_path / "out")) == 4


@in_loop
async def test_a_refused_line_comes_back_with_its_promise(folder: Path, tmp_path: Path) -> None:
    source = write(tmp_path / "in", [line(str(i), max_tokens=1) for i in range(3)])
    async with served(folder, refusing(4)) as s:
        out, _ = await run(s.url, source, tmp_path / "out", "--format", "json")
        summary = json.loads(out)
        brought = [request.promise for request in s.dispatcher.requests]
    assert (summary["answered"], summary["failed"], summary["refusals"]) == (3, 0, 4)
    assert len(brought) == 7
    assert [told is None for told in brought[:3]] == [True] * 3
    for told in brought[3:]:
        assert told is not None and -1 < told.due_in_s < 0.05, "it is due"


@in_loop
async def test_a_hopeless_refusal_is_an_answer(folder: Path, tmp_path: Path) -> None:
    dispatcher = FakeDispatcher()
    dispatcher.refusal = Refused("ttft_unreachable", "never", retry_after_s=None)
    source = write(tmp_path / "in", [line("a")])
    async with served(folder, dispatcher) as s:
        await run(s.url, source, tmp_path / "out", expected=1)
    assert answers(tmp_path / "out")["a"]["response"]["status_code"] == 429


@in_loop
async def test_answers_of_another_file_end_the_run(folder: Path, tmp_path: Path) -> None:
    two, out = (
        write(tmp_path / "in", [line("a", max_tokens=1), line("b", max_tokens=1)]),
        tmp_path / "out",
    )
    async with served(folder) as s:
        await run(s.url, two, out)
        changed = write(tmp_path / "changed", [line("c"), line("b", max_tokens=1)])
        _, err = await run(s.url, changed, out, expected=2)
        assert err.startswith("kvrelay: line 1 has changed since it was answered: ")
        shorter = write(tmp_path / "shorter", [line("a", max_tokens=1)])
        _, err = await run(s.url, shorter, out, expected=2)
        assert err.startswith("kvrelay: line 2 is answered, but ")


@in_loop
async def test_without_a_server_the_run_ends_and_nothing_is_answered(tmp_path: Path) -> None:
    source, out = write(tmp_path / "in", [line("a")]), tmp_path / "out"
    _, err = await run("127.0.0.1:9", source, out, "--patience=0", expected=2)
    assert err.startswith("kvrelay: http://127.0.0.1:9: no server answers (")
    assert err.endswith("kvrelay serve starts one, --address names another\n")
    assert out.read_text() == ""


def test_kill_9_in_the_middle_and_every_line_is_answered_once(
    split: Cluster, tmp_path: Path
) -> None:
    lines = [line(str(i), prompt=f"number {i}", max_tokens=24, ignore_eos=True) for i in range(48)]
    source, out = write(tmp_path / "in", lines), tmp_path / "out"
    command = [*COMMAND, str(source), str(out), f"--address={split.http_url}", "--concurrency=4"]
    process = subprocess.Popen(command)
    try:
        wait_until(lambda: out.exists() and out.read_bytes().count(b"\n") >= 8, "some are answered")
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait(30)
    killed_at = out.read_bytes().count(b"\n")
    assert killed_at < len(lines), "it was killed in the middle"
    with out.open("ab") as file:
        file.write(b'{"id": "batch_req_48_torn')
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert re.match(rf"48 of 48 lines answered, 0 failed, {killed_at} of them", done.stdout)
    told = answers(out)
    assert told.keys() == {one["custom_id"] for one in lines}
    assert {one["response"]["body"]["usage"]["completion_tokens"] for one in told.values()} == {24}


def test_ctrl_c_ends_it_and_keeps_what_is_done(split: Cluster, tmp_path: Path) -> None:
    lines = [line(str(i), max_tokens=64, ignore_eos=True) for i in range(64)]
    source, out = write(tmp_path / "in", lines), tmp_path / "out"
    command = [*COMMAND, str(source), str(out), f"--address={split.http_url}", "--concurrency=2"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    wait_until(lambda: out.exists() and out.read_bytes().count(b"\n") >= 2, "some are answered")
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert err == "kvrelay: stopped: run it again, and it goes on\n"
    assert all(one["response"]["status_code"] == 200 for one in answers(out).values())
