"""bench.transfer --profile: a real handoff between two processes, read off their traces."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.transfer.pair import REHEARSAL
from bench.transfer.timeline.profile import profile_rows


@pytest.fixture(scope="module")
def profiled(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict, dict]:  # type: ignore[type-arg]
    """(the trace's ranges by process, the rows by name); on a busy machine the first profiles may
    have met no moment in which both workers had work."""
    for _ in range(3):
        shown, rows = profile(tmp_path_factory.mktemp("profile") / "new" / "trace.json")
        if rows["shm: of that behind the prompt's compute"].value > 0 and decodes_meanwhile(shown):
            break
    return shown, rows


def profile(path: Path) -> tuple[dict, dict]:  # type: ignore[type-arg]
    rows = profile_rows(path, REHEARSAL, ["shm"], repeats=1)
    events = json.loads(path.read_text())["traceEvents"]
    process = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    shown: dict[str, list] = {name: [] for name in process.values()}  # type: ignore[type-arg]
    for event in events:
        if event["ph"] == "X":
            shown[process[event["pid"]]].append(event)
    return shown, {row.name: row for row in rows}


def named(events: list, start: str, request: str) -> list:  # type: ignore[type-arg]
    return [
        e
        for e in events
        if e["name"].startswith(start)
        and request in (e["args"].get("request"), *e["args"].get("requests", ()))
    ]


def decodes_meanwhile(shown: dict) -> bool:  # type: ignore[type-arg]
    """Between the last prompt's first chunk and its commit."""
    commit = [e for e in shown["decode-1"] if e["name"] == "commit"][-1]
    chunks = named(shown["prefill-0"], "prefill chunk", commit["args"]["request"])
    return any(
        step["ts"] < commit["ts"] and step["ts"] + step["dur"] > chunks[0]["ts"]
        for step in shown["decode-1"]
        if step["name"] == "decode step"
    )


def test_both_workers_ranges_are_there(profiled: tuple[dict, dict]) -> None:  # type: ignore[type-arg]
    shown, _ = profiled
    assert shown.keys() == {"prefill-0", "decode-1"}
    commits = [e["args"]["request"] for e in shown["decode-1"] if e["name"] == "commit"]
    request = commits[-1]
    chunks = named(shown["prefill-0"], "prefill chunk", request)
    assert [c["args"]["from"] for c in chunks] == [0, 128, 256, 384]
    groups = [e for e in shown["prefill-0"] if e["name"].startswith("layer group")]
    assert [g["name"].split()[-1] for g in groups[-4:]] == ["1", "3", "5", "layer"]
    moves = [e for name in ("scatter", "fetch") for e in named(shown["decode-1"], name, request)]
    assert {m["args"]["piece"] for m in moves} == set(range(3 + 4))
    assert sum(m["args"]["bytes"] for m in moves) == 512 * 8192
    (commit,) = named(shown["decode-1"], "commit", request)
    last = chunks[-1]
    assert last["ts"] + last["dur"] < commit["ts"]
    assert decodes_meanwhile(shown)


def test_the_rows_say_what_was_hidden(profiled: tuple[dict, dict]) -> None:  # type: ignore[type-arg]
    _, rows = profiled
    assert [*rows] == [
        f"shm: {what}"
        for what in (
            "KV is on its way",
            "of that behind the prompt's compute",
            "of that after the last chunk's compute",
            "from the last chunk's compute until committed",
            "layer groups left then, of 4",
        )
    ]
    whole, hidden, exposed, commit, left = rows.values()
    assert 0 < hidden.value <= 100
    assert 0 < exposed.value <= commit.value
    assert exposed.value + whole.value * hidden.value / 100 <= whole.value + 1e-6
    assert 0 < left.value <= 4 and left.goal == 1.0
