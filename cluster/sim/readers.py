"""Reads traces: Mooncake's JSON lines, Azure's CSV, and what a router recorded. Every error names
the file and the line.

A router's record as a trace: who came when, with what prompt, and how much they got. Pure.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from datetime import datetime
from itertools import chain, islice
from pathlib import Path

from cluster.sim.trace import HASH_TOKENS, TraceRequest
from kvpool.core.layout.hashes import CacheSalt, block_hashes
from kvrelay.errors import ConfigError
from router.core.events import Deliver, Submitted
from router.core.record import Entry, from_line
from router.core.start import Beginning
from router.core.state.generation import GenerationRequest

RECORDED_TOKENS = 16
"""Prompts are told apart in blocks of so many tokens."""
_SALT = CacheSalt(bytes(32))


@dataclass(slots=True)
class _Asked:
    number: int
    at_s: float
    request: GenerationRequest
    tokens: int = 0


@dataclass(slots=True)
class _Ids:
    """# the tokens up to a block's end |-> a number"""

    known: dict[bytes, int] = field(default_factory=dict)

    def of(self, request: GenerationRequest) -> tuple[int, ...]:
        """The last block, where it is short, is like no other."""
        prompt = tuple(request.prompt_ids)
        chain: list[bytes] = [*block_hashes(prompt, block_size=RECORDED_TOKENS, salt=_SALT)]
        if len(prompt) % RECORDED_TOKENS:
            chain.append(request.request_id.encode())
        return tuple(self.known.setdefault(one, len(self.known)) for one in chain)


def recorded_requests(
    name: str, lines: Iterable[tuple[int, str]]
) -> Iterator[tuple[int, TraceRequest]]:
    """With the number of the line that it came in. Those that got no tokens asked for at most
    `max_tokens`. Raises ConfigError."""
    asked: dict[str, _Asked] = {}
    over: list[_Asked] = []
    for number, line in lines:
        entry = _parsed_record(name, number, line)
        if isinstance(entry, Entry):
            _follow(entry, number, asked, over)
    ids = _Ids()
    for one in sorted([*over, *asked.values()], key=lambda one: one.number):
        yield one.number, _request(one, ids)


def _follow(entry: Entry, number: int, asked: dict[str, _Asked], over: list[_Asked]) -> None:
    if isinstance(entry.event, Submitted):
        request = entry.event.request
        if request.request_id in asked:
            over.append(asked[request.request_id])
        asked[request.request_id] = _Asked(number, entry.at_s, request)
    for command in entry.commands:
        if isinstance(command, Deliver) and command.request_id in asked:
            asked[command.request_id].tokens += sum(len(one.token_ids) for one in command.tokens)


def _request(one: _Asked, ids: _Ids) -> TraceRequest:
    return TraceRequest(
        arrival_s=one.at_s,
        input_tokens=len(one.request.prompt_ids),
        output_tokens=one.tokens or one.request.sampling.max_tokens,
        hash_ids=ids.of(one.request),
        hash_tokens=RECORDED_TOKENS,
        tenant=one.request.tenant,
    )


def _parsed_record(name: str, number: int, line: str) -> Beginning | Entry:
    try:
        return from_line(line)
    except ValueError as error:
        raise ConfigError(f"{name}:{number}: {error}") from None


RECORD_MARK = '"Beginning"'
AZURE_COLUMNS = ["TIMESTAMP", "ContextTokens", "GeneratedTokens"]


def read_trace(path: Path, limit: int | None = None) -> list[TraceRequest]:
    """At most `limit` requests, in order of time; the first arrives at 0. Raises ConfigError."""
    try:
        with path.open(encoding="utf-8", newline="") as lines:
            requests = list(islice(_parsed(str(path), lines), limit))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ConfigError(f"{path}: can't read it: {reason}") from None
    if not requests:
        raise ConfigError(f"{path}: no requests in it")
    return requests


def _parsed(name: str, lines: Iterable[str]) -> Iterator[TraceRequest]:
    """Checks the order, whatever the kind."""
    first_s = last_s = None
    for number, request in _by_kind(name, lines):
        if first_s is None:
            first_s = request.arrival_s
        if last_s is not None and request.arrival_s < last_s:
            raise ConfigError(f"{name}:{number}: arrives before the line above it")
        last_s = request.arrival_s
        yield replace(request, arrival_s=request.arrival_s - first_s)


def _by_kind(name: str, lines: Iterable[str]) -> Iterator[tuple[int, TraceRequest]]:
    numbered = ((number, line) for number, line in enumerate(lines, 1) if line.strip())
    head = next(numbered, None)
    if head is None:
        return
    number, line = head
    if line.lstrip("\ufeff").lstrip().startswith("{"):
        if RECORD_MARK in line:
            yield from recorded_requests(name, chain([head], numbered))
            return
        yield number, _mooncake(name, number, line)
        for number, line in numbered:
            yield number, _mooncake(name, number, line)
        return
    if line.lstrip("\ufeff").strip().split(",") != AZURE_COLUMNS:
        expected = f"JSON lines, or the columns {','.join(AZURE_COLUMNS)}"
        raise ConfigError(f"{name}:{number}: expected {expected}")
    for number, line in numbered:
        yield number, _azure(name, number, line)


def _mooncake(name: str, number: int, line: str) -> TraceRequest:
    where = f"{name}:{number}"
    try:
        row = json.loads(line)
    except ValueError:
        raise ConfigError(f"{where}: not a line of JSON") from None
    if not isinstance(row, dict):
        raise ConfigError(f"{where}: expected an object")
    request = TraceRequest(
        arrival_s=_number(where, row, "timestamp") / 1000,
        input_tokens=_count(where, row, "input_length"),
        output_tokens=_count(where, row, "output_length"),
        hash_ids=_hash_ids(where, row),
    )
    _check_hashes(where, request)
    return request


def _number(where: str, row: dict[str, object], key: str) -> float:
    value = row.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e15:
        raise ConfigError(f"{where}: {key}: got {json.dumps(value)}, expected a number from 0")
    return float(value)


def _count(where: str, row: dict[str, object], key: str) -> int:
    value = row.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{where}: {key}: got {json.dumps(value)}, expected a count from 1")
    return value


def _hash_ids(where: str, row: dict[str, object]) -> tuple[int, ...] | None:
    ids = row.get("hash_ids")
    if ids is None:
        return None
    good = isinstance(ids, list) and all(
        isinstance(one, int) and not isinstance(one, bool) and 0 <= one < 2**63 for one in ids
    )
    if not good:
        raise ConfigError(f"{where}: hash_ids: expected a list of integers from 0")
    assert isinstance(ids, list)
    return tuple(ids)


def _check_hashes(where: str, request: TraceRequest) -> None:
    if request.hash_ids is None:
        return
    blocks = -(-request.input_tokens // HASH_TOKENS)
    if len(request.hash_ids) != blocks:
        raise ConfigError(
            f"{where}: hash_ids: got {len(request.hash_ids)}, expected {blocks} for "
            f"{request.input_tokens} tokens in blocks of {HASH_TOKENS}"
        )


def _azure(name: str, number: int, line: str) -> TraceRequest:
    where = f"{name}:{number}"
    cells = next(csv.reader([line]))
    if len(cells) != len(AZURE_COLUMNS):
        raise ConfigError(f"{where}: got {len(cells)} cells, expected {len(AZURE_COLUMNS)}")
    try:
        at_s = datetime.fromisoformat(cells[0][:26]).timestamp()
        row: dict[str, object] = {"ContextTokens": int(cells[1]), "GeneratedTokens": int(cells[2])}
    except ValueError:
        raise ConfigError(f"{where}: got {line.strip()}, expected a time and two counts") from None
    return TraceRequest(
        arrival_s=at_s,
        input_tokens=_count(where, row, "ContextTokens"),
        output_tokens=_count(where, row, "GeneratedTokens"),
    )
