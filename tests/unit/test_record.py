"""A router's record: every value comes back as it was, and a replay decides the same."""

from __future__ import annotations

from dataclasses import is_dataclass
from enum import Enum
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

from cluster.sim.readers import read_trace
from kvrelay.counters import Counters
from kvrelay.errors import ConfigError
from kvrelay.messages import (
    BlockChanges,
    CutRun,
    PoolUpdate,
    Reserved,
    ReserveRefused,
    StoredRun,
    Tokens,
)
from kvrelay.types import FinishReason, Incarnation, RequestKey, Role, Sampling, Tier
from router.core.events import (
    Command,
    Event,
    PoolNodeLost,
    PoolNodeSaid,
    Send,
    Submitted,
    WorkerJoined,
    WorkerLost,
    WorkerSaid,
)
from router.core.policy.choice import Policies
from router.core.record import Entry, _known, from_line, to_line
from router.core.start import Beginning, begin
from router.core.state.generation import GenerationRequest
from router.live.recorder import Recorder
from tests.unit.router_kit import hello

P, D = Incarnation("p"), Incarnation("d")
BLOCK = b"\x00\xff" * 16
UPDATE = PoolUpdate(
    sequence=0,
    node=Incarnation("node"),
    addresses=("ucx:h:1/node",),
    workers=(D,),
    blocks=(
        BlockChanges(
            tier=Tier.DISK,
            cut=(CutRun(number=3, end=4),),
            stored=(StoredRun(number=4, parent=0, start=0, hashes=BLOCK),),
        ),
    ),
)


def asked(name: str, prompt: range) -> Submitted:
    return Submitted(
        request=GenerationRequest(
            request_id=name,
            prompt_ids=tuple(prompt),
            sampling=Sampling(max_tokens=4, seed=1),
            tenant="t",
            phases_s={"tokenize": 0.25},
        )
    )


def said(worker: Incarnation, *events: object, stored: bytes = b"") -> WorkerSaid:
    run = StoredRun(number=1, parent=0, start=0, hashes=stored)
    blocks = (BlockChanges(tier=Tier.DEVICE, stored=(run,)),)
    return WorkerSaid(
        incarnation=worker,
        events=events,  # type: ignore[arg-type]
        counters=Counters(running=3, transfer_s=0.5),
        blocks=blocks if stored else (),
    )


def a_day(first: int) -> list[tuple[float, Event]]:
    """One request is served, one refused, one loses its worker."""
    one, two, three = (RequestKey(name, first + i) for i, name in enumerate("abc"))
    tokens = Tokens(
        key=one,
        at_s=3.0,
        choice=0,
        first_index=0,
        token_ids=(5, 6),
        finish_reason=FinishReason.STOP,
        stop_token_id=6,
    )
    return [
        (0.0, WorkerJoined(hello=hello(P, Role.PREFILL))),
        (0.5, WorkerJoined(hello=hello(D, Role.DECODE))),
        (1.0, asked("a", range(40))),
        (1.5, said(D, Reserved(key=one, at_s=1.25, held_tokens=16), stored=BLOCK)),
        (3.5, said(P, tokens)),
        (4.0, asked("b", range(8))),
        (4.5, said(D, ReserveRefused(key=two, at_s=4.2, reason="kv_exhausted"))),
        (5.0, asked("c", range(40))),
        (5.5, said(D, Reserved(key=three, at_s=5.2))),
        (5.6, PoolNodeSaid(update=UPDATE)),
        (5.8, PoolNodeLost(node=UPDATE.node)),
        (6.0, WorkerLost(incarnation=P)),
    ]


SPLIT = Policies(local_prefill=False)


def record(path: Path, most_bytes: int = 1 << 20, policies: Policies = SPLIT) -> list[list[object]]:
    """What a core said to each event, recorded as a live router does."""
    beginning = Beginning(first_attempt=70, policies=policies)
    core = begin(beginning)
    recorder = Recorder(path, most_bytes, beginning)
    said: list[list[object]] = []
    for at_s, event in a_day(70):
        commands = core.handle(event, at_s)
        recorder.heard(event, commands, at_s)
        said.append([*commands])
    recorder.close()
    return said


@pytest.mark.parametrize("policies", [SPLIT, Policies(), Policies(shared_queue=True)])
def test_a_recorded_log_replays_to_identical_commands(tmp_path: Path, policies: Policies) -> None:
    path = tmp_path / "log"
    live = record(path, policies=policies)
    assert any(isinstance(command, Send) for commands in live for command in commands)
    header, *entries = map(from_line, path.read_text().splitlines())
    assert isinstance(header, Beginning)
    core = begin(header)
    for entry, expected in zip(entries, live, strict=True):
        assert isinstance(entry, Entry)
        assert [*entry.commands] == expected
        assert core.handle(entry.event, entry.at_s) == expected


def test_events_come_back_as_they_were() -> None:
    for at_s, event in a_day(0):
        entry = Entry(at_s=at_s, event=event, commands=())
        assert from_line(to_line(entry)) == entry


def test_enums_come_back_as_enums() -> None:
    entry = from_line(to_line(Entry(at_s=0, event=a_day(0)[0][1], commands=())))
    assert isinstance(entry, Entry) and isinstance(entry.event, WorkerJoined)
    assert entry.event.hello.role is Role.PREFILL


def test_only_its_user_can_read_a_record(tmp_path: Path) -> None:
    """Also where a file was there already; a link is not followed."""
    path = tmp_path / "record.jsonl"
    path.write_text("old")
    path.chmod(0o644)
    record(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert not path.read_text().startswith("old")
    link = tmp_path / "link.jsonl"
    link.symlink_to(path)
    with pytest.raises(ConfigError, match="can't write it"):
        record(link)


def test_a_full_record_ends_with_a_whole_line(tmp_path: Path) -> None:
    path = tmp_path / "log"
    record(path, most_bytes=2500)
    assert path.stat().st_size <= 2500
    assert len([*map(from_line, path.read_text().splitlines())]) > 2


def test_a_record_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"router.record: .*No such file"):
        Recorder(tmp_path / "no" / "log", 1000, Beginning(first_attempt=0))


def test_a_record_is_a_trace(tmp_path: Path) -> None:
    """Requests with their prompts' shared blocks, and the tokens that they got."""
    path = tmp_path / "log"
    record(path)
    first, second, third = read_trace(path)
    assert [one.arrival_s for one in (first, second, third)] == [0.0, 3.0, 4.0]
    assert [one.input_tokens for one in (first, second, third)] == [40, 8, 40]
    assert [one.output_tokens for one in (first, second, third)] == [2, 4, 4]
    assert first.hash_ids is not None and third.hash_ids is not None
    assert first.hash_ids[:2] == third.hash_ids[:2] and first.hash_ids[2] != third.hash_ids[2]
    assert first.tenant == "t" and first.hash_tokens == 16


@pytest.mark.parametrize("line", ["{", "[]", "3", '{"$":"Nobody"}', '{"$":"Entry"}'])
def test_a_broken_line_of_a_record_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "log"
    record(path)
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:2], line, *lines[2:]]))
    with pytest.raises(ConfigError, match=r"log:3: "):
        read_trace(path)


def test_all_that_events_and_commands_may_hold_is_known() -> None:
    seen: set[object] = set()
    waiting: list[object] = [*get_args(Event), *get_args(Command), Beginning]
    while waiting:
        hint = waiting.pop()
        waiting += get_args(hint)
        if hint in seen or not isinstance(hint, type) or get_args(hint):
            continue
        seen.add(hint)
        if issubclass(hint, Enum) or is_dataclass(hint) or hasattr(hint, "_fields"):
            assert _known()[hint.__name__] is hint
            waiting += get_type_hints(hint).values()
    assert len(seen) > 50
