"""The description itself: operations become an OpenAPI document."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from router.http.bodies import MessageBody
from router.http.description.operation import JSON, OF_ANY, OF_KEYS, Operation
from router.http.errors import REASONS
from router.http.neutral_fields import MESSAGE_NEUTRAL, Anything, Neutral

Json = dict[str, Any]

_SCHEMAS = "#/components/schemas/"
_PARAMETER = re.compile(r"\{(\w+)(:path)?\}")
_EVENTS = "text/event-stream"
_EVENT: Json = {
    "type": "object",
    "properties": {"event": {"type": "string"}, "data": {"type": "string"}},
}
"""Server-sent events have no schema in OpenAPI 3.1; this is one event as 3.2 describes it."""


def document_of(operations: Sequence[Operation], version: str) -> Json:
    """In the format of OpenAPI 3.1."""
    paths: Json = {}
    for one in operations:
        path = _PARAMETER.sub(r"{\1}", one.path)
        for method in one.methods:
            paths.setdefault(path, {})[method.lower()] = _described(one, method)
    return {
        "openapi": "3.1.0",
        "info": {"title": "kvrelay", "version": version},
        "paths": paths,
        "components": {
            "schemas": _schemas(operations),
            "securitySchemes": {"api_key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _described(one: Operation, method: str) -> Json:
    found: Json = {
        "operationId": f"{one.endpoint.__name__}_{method.lower()}",
        "summary": one.summary,
        "responses": {"200": _answer(one)} | {str(s): _error(one, s) for s in _errors(one)},
    }
    if one.unready is not None:
        content = {JSON: {"schema": _ref(one.unready)}}
        found["responses"]["503"] = {"description": REASONS[503], "content": content}
    if one.errors >= OF_KEYS:
        found["security"] = [{}, {"api_key": []}]
    if names := _PARAMETER.findall(one.path):
        found["parameters"] = [_parameter(name) for name, _ in names]
    if one.body is not None:
        content = {one.body_type: {"schema": _body_schema(one)}}
        found["requestBody"] = {"required": True, "content": content}
    return found


def _body_schema(one: Operation) -> Json:
    assert one.body is not None
    return _ref(one.body) if one.body_type == JSON else {"type": "string"}


def _errors(one: Operation) -> list[int]:
    return sorted(one.errors | OF_ANY)


def _answer(one: Operation) -> Json:
    content: Json = {}
    if one.answer is not None:
        content[JSON] = {"schema": _ref(one.answer)}
    if one.event is not None:
        name = one.event.__name__
        done = ", and at the end `[DONE]`" if one.has_done else ""
        told = f"With `stream`: events whose data are a {name}{done}."
        content[_EVENTS] = {"schema": _EVENT | {"description": told}}
    return {"description": "The answer."} | ({"content": content} if content else {})


def _error(one: Operation, status: int) -> Json:
    content = {JSON: {"schema": _ref(one.error)}}
    return {"description": REASONS[status], "content": content}


def _parameter(name: str) -> Json:
    return {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}


def _ref(model: type[BaseModel]) -> Json:
    return {"$ref": _SCHEMAS + model.__name__}


def _schemas(operations: Sequence[Operation]) -> Json:
    models = {model: None for one in operations for model in _models(one)}
    _, made = models_json_schema(
        [(model, "validation") for model in models], ref_template=_SCHEMAS + "{model}"
    )
    schemas: Json = _any_of(made["$defs"])
    for one in operations:
        if one.body is not None:
            _add_neutral(schemas[one.body.__name__], one.neutral)
    if MessageBody.__name__ in schemas:
        _add_neutral(schemas[MessageBody.__name__], MESSAGE_NEUTRAL)
    return schemas


def _models(one: Operation) -> Iterator[type[BaseModel]]:
    yield one.error
    yield from (
        model for model in (one.body, one.answer, one.event, one.unready) if model is not None
    )


def _any_of(schema: Any) -> Any:
    """An empty list is of several kinds of prompts, so it is not of exactly one."""
    match schema:
        case dict():
            return {("anyOf" if k == "oneOf" else k): _any_of(v) for k, v in schema.items()}
        case list():
            return [_any_of(one) for one in schema]
        case _:
            return schema


def _add_neutral(schema: Json, neutral: Mapping[str, Neutral]) -> None:
    for name, one in neutral.items():
        schema["properties"].setdefault(name, _neutral_schema(one))


def _neutral_schema(one: Neutral) -> Json:
    if isinstance(one, Anything):
        return {"description": "Accepted, without an effect."}
    told = f"Other values are refused: {one.instead}." if one.instead else "Nothing else."
    return {"enum": [None, *one.values], "description": told}
