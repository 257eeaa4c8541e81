"""Sends the lines of a batch, as many at once as the server takes, until each has its answer.

A refused request comes back at the time it was promised, with the promise. A request whose server
is gone is sent again until nobody has answered for the run's patience: then the run ends, and
another one goes on behind the lines that are done.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import httpx

from cluster.cli.for_users.batch_files import Output
from cluster.cli.for_users.batch_lines import (
    BadLine,
    BatchRequest,
    Line,
    answer_line,
    failure_line,
)
from cluster.cli.for_users.server import (
    CONNECT_S,
    PROMISE_HEADER,
    Problem,
    Server,
    ServerGone,
    gone,
    problem_of,
)
from cluster.cli.for_users.window import Window
from kvrelay.errors import KvrelayError

TRIES = 5
"""Of a request whose server fails, as HTTP 500 or 503 without a time to come back."""
FIRST_DELAY_S, LONGEST_DELAY_S = 0.25, 15.0
GATEWAY = (502, 504)
MOST_PROBLEMS = 20
NO_CAPACITY = "no_capacity"


@dataclass(slots=True)
class Tally:
    """What became of the lines of this run. `answered` came with status 200."""

    answered: int = 0
    failed: int = 0
    bad: int = 0
    refusals: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    problems: list[str] = field(default_factory=list)
    """Of the first lines that have no good answer."""


@dataclass(slots=True, kw_only=True)
class Told:
    """Progress as it comes. `waiting`: refused requests that come back."""

    on_change: Callable[[Tally, int], None] = lambda tally, waiting: None
    waiting: int = 0


class BatchRun:
    def __init__(
        self, server: Server, output: Output, window: Window, told: Told, *, patience_s: float
    ) -> None:
        self.tally = Tally()
        self._server = server
        self._output = output
        self._window = window
        self._told = told
        self._patience_s = patience_s
        self._room = asyncio.Event()

    async def run(self, lines: Iterator[Line]) -> None:
        """Returns when each line has its answer in the output. Raises KvrelayError when the
        server is gone or refuses the key; what is done stays done."""
        try:
            async with self._client() as client, asyncio.TaskGroup() as group:
                for line in lines:
                    if isinstance(line, BadLine):
                        self._settle_bad(line)
                        await asyncio.sleep(0)
                        continue
                    await self._until_room()
                    number = self._window.began()
                    group.create_task(self._answer(client, line, number))
        except* KvrelayError as errors:
            raise _first(errors) from None

    def _client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(
            base_url=self._server.url,
            headers=self._server.headers,
            verify=self._server.trusted,
            timeout=httpx.Timeout(None, connect=CONNECT_S),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
            trust_env=False,
        )

    async def _until_room(self) -> None:
        while not self._window.may_begin:
            self._room.clear()
            await self._room.wait()

    async def _answer(self, client: httpx.AsyncClient, request: BatchRequest, number: int) -> None:
        try:
            self._settle(request, await self._answered(client, request, number))
        finally:
            self._window.answered()
            self._room.set()

    async def _answered(
        self, client: httpx.AsyncClient, request: BatchRequest, number: int
    ) -> httpx.Response:
        """The answer that counts, whatever its status."""
        patience = _Patience(self._patience_s)
        promise = ""
        while True:
            try:
                answer = await client.post(
                    request.url, content=request.body, headers=_headers(request, promise)
                )
            except httpx.TransportError as error:
                await asyncio.sleep(patience.delay_s(gone(self._server, error)))
                continue
            if answer.status_code == 200:
                return answer
            problem = problem_of(answer.status_code, answer.headers, answer.content)
            if problem.is_refusal and problem.code != NO_CAPACITY:
                # A router that stops promises nothing; another one honours what it did before.
                promise, patience = problem.promise or promise, _Patience(self._patience_s)
                await self._wait_promised(problem, number)
            elif not await self._comes_back(problem, patience):
                return answer

    async def _comes_back(self, problem: Problem, patience: _Patience) -> bool:
        """After a wait; False: the problem is the answer."""
        if problem.is_about_the_key:
            raise KvrelayError(
                f"{self._server.url}: {problem.message}: --api-key or KVRELAY_API_KEY gives the key"
            )
        if problem.code == NO_CAPACITY or (problem.status in GATEWAY and not problem.code):
            left = ServerGone(f"{self._server.url}: {problem.message}")
            await asyncio.sleep(patience.delay_s(left))
            return True
        if problem.status in (500, 503) and patience.tries < TRIES - 1:
            await asyncio.sleep(patience.delay_s(None))
            return True
        return False

    async def _wait_promised(self, problem: Problem, number: int) -> None:
        self.tally.refusals += 1
        self._window.refused(number)
        assert problem.retry_after_s is not None
        self._tell(waiting=1)
        await asyncio.sleep(problem.retry_after_s)
        self._tell(waiting=-1)

    def _settle(self, request: BatchRequest, answer: httpx.Response) -> None:
        body = _json_of(answer)
        if body is None:
            line = failure_line(request, "invalid_answer", "the server's answer is not JSON")
        else:
            request_id = answer.headers.get("x-request-id", "")
            line = answer_line(request, answer.status_code, request_id, body)
        self._output.append(line)
        if body is not None and answer.status_code == 200:
            self.tally.answered += 1
            self._count_tokens(body)
        else:
            self.tally.failed += 1
            said = problem_of(answer.status_code, answer.headers, answer.content).message
            self._note(request, f"HTTP {answer.status_code}: {said}")
        self._tell()

    def _settle_bad(self, line: BadLine) -> None:
        self._output.append(failure_line(line, "invalid_line", f"line {line.number}: {line.why}"))
        self.tally.bad += 1
        self._note(line, line.why)
        self._tell()

    def _note(self, line: Line, why: str) -> None:
        named = "" if line.custom_id is None else f" ({line.custom_id})"
        if len(self.tally.problems) < MOST_PROBLEMS:
            self.tally.problems.append(f"line {line.number}{named}: {why}")

    def _count_tokens(self, body: dict[str, object]) -> None:
        usage = body.get("usage")
        if isinstance(usage, dict):
            self.tally.prompt_tokens += _count(usage, "prompt_tokens", "input_tokens")
            self.tally.completion_tokens += _count(usage, "completion_tokens", "output_tokens")

    def _tell(self, waiting: int = 0) -> None:
        self._told.waiting += waiting
        self._told.on_change(self.tally, self._told.waiting)


class _Patience:
    """How long one request waits for a server that fails or is gone."""

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._since_s: float | None = None
        self.tries = 0

    def delay_s(self, error: KvrelayError | None) -> float:
        """Until the next try; each is twice as far away. Raises the error, if there is one, when
        the patience since the first one is over."""
        now_s = time.monotonic()
        self._since_s = now_s if self._since_s is None else self._since_s
        if error is not None and now_s - self._since_s >= self._patience_s:
            raise error
        self.tries += 1
        return min(LONGEST_DELAY_S, FIRST_DELAY_S * 2.0 ** (self.tries - 1))


def _first(errors: BaseExceptionGroup[KvrelayError]) -> BaseException:
    """All requests of a server that is gone say the same."""
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _headers(request: BatchRequest, promise: str) -> dict[str, str]:
    headers = {"content-type": "application/json", "x-request-id": request.answer_id}
    return headers | {PROMISE_HEADER: promise} if promise else headers


def _json_of(answer: httpx.Response) -> dict[str, object] | None:
    try:
        body = json.loads(answer.content)
    except ValueError:
        return None
    return body if isinstance(body, dict) else None


def _count(usage: dict[str, object], *names: str) -> int:
    return next((n for name in names if isinstance(n := usage.get(name), int)), 0)
