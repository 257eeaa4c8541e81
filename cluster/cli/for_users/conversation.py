"""A conversation with a server, turn by turn, as text that comes in pieces.

A model without a chat template has no turns: each prompt is continued as plain text.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx

from cluster.cli.for_users.server import (
    CONNECT_S,
    PROMISE_HEADER,
    Problem,
    Server,
    error_in,
    gone,
    problem_of,
)
from kvrelay.errors import KvrelayError
from kvrelay.types import value

NO_TEMPLATE = "no_chat_template"
SSE_DATA = "data: "
DONE = "[DONE]"


@value
class Piece:
    """`is_reasoning`: the model thinks; this is no part of its answer."""

    text: str
    is_reasoning: bool = False


class Refusal(KvrelayError):
    """An answer that is an error."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.message)
        self.problem = problem


@dataclass(slots=True)
class Conversation:
    """`fields` go with every request. `promise` is sent with the next request, until one is
    answered."""

    server: Server
    fields: dict[str, Any]
    system: str = ""
    is_plain: bool = False
    messages: list[dict[str, str]] = field(default_factory=list)
    promise: str = ""
    client: httpx.Client = field(init=False)

    def __post_init__(self) -> None:
        self.client = httpx.Client(
            base_url=self.server.url,
            headers=self.server.headers,
            verify=self.server.trusted,
            timeout=httpx.Timeout(None, connect=CONNECT_S),
            trust_env=False,
        )
        self.reset()

    def reset(self) -> None:
        self.messages = [{"role": "system", "content": self.system}] if self.system else []

    def models(self) -> list[str]:
        """Raises Refusal or ServerGone."""
        try:
            answer = self.client.get("/v1/models")
        except httpx.TransportError as error:
            raise gone(self.server, error) from None
        _check(answer)
        return [str(one["id"]) for one in answer.json()["data"]]

    def ask(self, prompt: str) -> Generator[Piece, None, None]:
        """The answer as it comes. A turn that was stopped keeps what came of it; of one that
        failed nothing stays. Raises Refusal or ServerGone."""
        said = ""
        turn = {"role": "user", "content": prompt}
        try:
            for piece in self._stream(prompt, turn):
                said += "" if piece.is_reasoning else piece.text
                yield piece
        except (GeneratorExit, KeyboardInterrupt):
            self._keep(turn, said)
            raise
        self._keep(turn, said)

    def _keep(self, turn: dict[str, str], said: str) -> None:
        if not self.is_plain:
            self.messages += [turn, {"role": "assistant", "content": said}]

    def _stream(self, prompt: str, turn: dict[str, str]) -> Iterator[Piece]:
        body: dict[str, Any] = {**self.fields, "stream": True}
        if self.is_plain:
            url, body["prompt"] = "/v1/completions", prompt
        else:
            url, body["messages"] = "/v1/chat/completions", [*self.messages, turn]
        headers = {PROMISE_HEADER: self.promise} if self.promise else {}
        try:
            with self.client.stream("POST", url, json=body, headers=headers) as answer:
                if answer.status_code != 200:
                    answer.read()
                _check(answer)
                self.promise = ""
                yield from _pieces(answer.iter_lines())
        except httpx.TransportError as error:
            raise gone(self.server, error) from None


def _check(answer: httpx.Response) -> None:
    if answer.status_code != 200:
        raise Refusal(problem_of(answer.status_code, answer.headers, answer.content))


def _pieces(lines: Iterator[str]) -> Iterator[Piece]:
    """Raises Refusal for an error that comes in the stream."""
    for line in lines:
        data = line.removeprefix(SSE_DATA)
        if data in (line, DONE):
            continue
        if told := error_in(data.encode()):
            raise Refusal(Problem(status=200, message=str(told.get("message", "it failed"))))
        for choice in json.loads(data).get("choices", ()):
            yield from _pieces_of(choice)


def _pieces_of(choice: dict[str, Any]) -> Iterator[Piece]:
    delta = choice.get("delta", {})
    if thought := delta.get("reasoning_content") or delta.get("reasoning"):
        yield Piece(text=thought, is_reasoning=True)
    if text := delta.get("content") or choice.get("text"):
        yield Piece(text=text)
