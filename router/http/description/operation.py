"""One operation of the public HTTP API: its route, and what the description says of it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from router.http.description.answers import ErrorAnswer
from router.http.neutral_fields import Neutral

OF_ANY = frozenset({431})
"""Statuses of errors that every operation may answer with."""
OF_KEYS = frozenset({401})
"""Of operations that want an API key, where the cluster has some."""
OF_BODIES = OF_KEYS | frozenset({400, 404, 408, 413, 415, 429, 503})
OF_GENERATION = OF_BODIES | {403, 422, 500, 504}

JSON = "application/json"
JSON_LINES = "application/x-ndjson"


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """`path` is as Starlette writes it. `answer` is the body of status 200, None: it has none.
    `event`: with `stream` the answer is a stream of these. `neutral`: fields that the body may have
    beside those of its model. `errors`: the statuses that it may answer with beside 200.
    `unready`: what status 503 says, if it is no error. `error`: the body of an error. `has_done`: a
    stream ends with `[DONE]`."""

    path: str
    endpoint: Callable[[Request], Awaitable[Response]]
    summary: str
    methods: tuple[str, ...] = ("GET",)
    body: type[BaseModel] | None = None
    body_type: str = JSON
    neutral: Mapping[str, Neutral] = field(default_factory=dict)
    answer: type[BaseModel] | None = None
    event: type[BaseModel] | None = None
    errors: frozenset[int] = frozenset()
    unready: type[BaseModel] | None = None
    error: type[BaseModel] = ErrorAnswer
    has_done: bool = True

    def route(self) -> Route:
        return Route(self.path, self.endpoint, methods=list(self.methods))
