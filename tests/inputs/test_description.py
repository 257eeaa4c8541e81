"""The description in /openapi.json: complete, valid, and what the endpoints do."""

from __future__ import annotations

from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from starlette.routing import Route

from router.http.api import HttpApi
from router.http.description.document import document_of
from router.http_apps import METRICS, OPEN_PATHS, PUBLIC, create_public_app
from tests.integration.faces_kit import Served

DOCUMENT = document_of(PUBLIC, "1")
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]
schema = schemathesis.openapi.from_dict(DOCUMENT).exclude(path="/v1/completions/stream")
"""Lines of JSON are not among the bodies that it knows; `test_any_input` sends them."""


def test_every_route_is_described() -> None:
    nothing: Any = None
    api = HttpApi(
        service=nothing, conversations=nothing, max_body_bytes=1, version="1", started_s=0.0
    )
    routes = list(create_public_app(api, with_metrics=True).routes)
    assert all(isinstance(one, Route) for one in routes)
    served = {one.path.replace(":path", "") for one in routes if isinstance(one, Route)}
    assert served == {*DOCUMENT["paths"], METRICS.path, "/openapi.json"}


def test_what_needs_a_key_is_described_so() -> None:
    guarded = {
        path
        for path, methods in DOCUMENT["paths"].items()
        if any("401" in one["responses"] and "security" in one for one in methods.values())
    }
    assert guarded == {*DOCUMENT["paths"]} - {*OPEN_PATHS}


def test_every_reference_leads_somewhere() -> None:
    def references(node: object) -> list[str]:
        if isinstance(node, list):
            return [found for one in node for found in references(one)]
        if not isinstance(node, dict):
            return []
        own = [node["$ref"]] if isinstance(node.get("$ref"), str) else []
        return own + [found for one in node.values() for found in references(one)]

    known = {f"#/components/schemas/{name}" for name in DOCUMENT["components"]["schemas"]}
    assert {*references(DOCUMENT)} <= known


def test_fields_without_effect_are_described_with_the_values_they_may_have() -> None:
    completion = DOCUMENT["components"]["schemas"]["CompletionBody"]
    assert completion["properties"]["best_of"]["enum"] == [None, 1]
    assert "description" in completion["properties"]["user"]
    assert completion["additionalProperties"] is False


def test_errors_have_their_shape_in_the_description() -> None:
    answers = DOCUMENT["paths"]["/v1/completions"]["post"]["responses"]
    assert {"200", "400", "404", "408", "413", "415", "422", "429", "431", "503"} <= {*answers}
    for status, one in answers.items():
        if status != "200":
            reference = one["content"]["application/json"]["schema"]["$ref"]
            assert reference.endswith("/ErrorAnswer")


@schema.parametrize()
@settings(
    max_examples=30,
    database=None,
    derandomize=True,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
def test_what_the_description_allows_is_answered_as_it_says(
    case: schemathesis.Case, server: Served
) -> None:
    case.call_and_validate(base_url=server.url, checks=CHECKS, timeout=30)


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
