"""OpenAI's batch file format: lines become requests, answers become lines. Pure.

https://platform.openai.com/docs/guides/batch. An answer's `id` names the line that it answers, by
its number and a digest of its text: so a run knows what an earlier run has answered.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

from kvrelay.errors import ConfigError
from kvrelay.types import value

URLS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
FIELDS = {"custom_id", "method", "url", "body"}


@value
class BatchRequest:
    """One good line. `number` counts all lines of the file from 1."""

    number: int
    answer_id: str
    custom_id: str
    url: str
    body: bytes


@value
class BadLine:
    """A line that can't be sent, and why."""

    number: int
    answer_id: str
    custom_id: str | None
    why: str


Line = BatchRequest | BadLine


def answer_id_of(number: int, text: bytes) -> str:
    return f"batch_req_{number}_{sha256(text.strip()).hexdigest()[:12]}"


def lines_of(file: Iterable[bytes]) -> Iterator[tuple[int, str, bytes]]:
    """(number, answer's id, text) of each line that isn't empty."""
    for number, text in enumerate(file, start=1):
        if text.strip():
            yield number, answer_id_of(number, text), text


def line_of(number: int, answer_id: str, text: bytes) -> Line:
    try:
        told = json.loads(text)
    except (ValueError, RecursionError) as error:
        return BadLine(
            number=number, answer_id=answer_id, custom_id=None, why=f"it is not JSON: {error}"
        )
    custom_id = told.get("custom_id") if isinstance(told, dict) else None
    custom_id = custom_id if isinstance(custom_id, str) else None
    why = _wrong(told)
    if why is not None:
        return BadLine(number=number, answer_id=answer_id, custom_id=custom_id, why=why)
    body = json.dumps(told["body"]).encode()
    assert custom_id is not None
    return BatchRequest(
        number=number, answer_id=answer_id, custom_id=custom_id, url=told["url"], body=body
    )


def _wrong(told: Any) -> str | None:
    """What is wrong with a line, if anything is."""
    if not isinstance(told, dict):
        return "it is no JSON object"
    if unknown := sorted(told.keys() - FIELDS):
        return f"it has an unknown field {unknown[0]!r}, expected {', '.join(sorted(FIELDS))}"
    if not isinstance(told.get("custom_id"), str) or not told["custom_id"]:
        return "custom_id is missing: expected a text that no other line has"
    if told.get("method", "POST") != "POST":
        return f"method: got {json.dumps(told['method'])}, expected POST"
    if told.get("url") not in URLS:
        return f"url: got {json.dumps(told.get('url'))}, expected {', '.join(URLS)}"
    if not isinstance(told.get("body"), dict):
        return "body: expected a JSON object, the request's fields"
    if told["body"].get("stream"):
        return "body.stream: answers of a batch come whole, leave it out"
    return None


class CustomIds:
    """No two lines have the same one."""

    def __init__(self) -> None:
        self._first: dict[str, int] = {}

    def checked(self, line: Line) -> Line:
        """The line; a bad one when an earlier line has its custom_id."""
        if isinstance(line, BadLine):
            return line
        first = self._first.setdefault(line.custom_id, line.number)
        if first == line.number:
            return line
        why = f"custom_id {line.custom_id!r} is line {first}'s already"
        return BadLine(
            number=line.number, answer_id=line.answer_id, custom_id=line.custom_id, why=why
        )


# --- answers ------------------------------------------------------------------------------------


def answer_line(request: BatchRequest, status: int, request_id: str, body: Any) -> bytes:
    """What the server said, whatever its status."""
    response = {"status_code": status, "request_id": request_id, "body": body}
    return _line(request.answer_id, request.custom_id, response, None)


def failure_line(line: Line, code: str, message: str) -> bytes:
    """For a line that got no answer."""
    return _line(line.answer_id, line.custom_id, None, {"code": code, "message": message})


def _line(answer_id: str, custom_id: str | None, response: object, error: object) -> bytes:
    told = {"id": answer_id, "custom_id": custom_id, "response": response, "error": error}
    return json.dumps(told, separators=(",", ":")).encode() + b"\n"


@dataclass(slots=True)
class Done:
    """What an output file holds already. `answered`: line number |-> (answer's id, whether the
    server's status was 200)."""

    answered: dict[int, tuple[str, bool]] = field(default_factory=dict)

    @property
    def good(self) -> int:
        return sum(is_good for _, is_good in self.answered.values())

    def has(self, number: int, answer_id: str) -> bool:
        """Raises ConfigError when another text of that line was answered."""
        if number not in self.answered:
            return False
        if self.answered[number][0] != answer_id:
            raise ConfigError(
                f"line {number} has changed since it was answered: "
                "name another output file, or remove its answer from this one"
            )
        return True

    def read(self, where: str, text: bytes) -> None:
        """One more line of the file. Raises ConfigError for what `kvrelay batch` never writes."""
        try:
            told = json.loads(text)
            answer_id = told["id"]
            number = int(answer_id.removeprefix("batch_req_").partition("_")[0])
            response = told["response"]
            is_good = response is not None and response["status_code"] == 200
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ConfigError(
                f"{where}: not an answer of kvrelay batch: name another output file"
            ) from None
        if number in self.answered:
            raise ConfigError(f"{where}: line {number} is answered twice")
        self.answered[number] = (answer_id, is_good)
