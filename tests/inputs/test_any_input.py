"""2,000 cases of `tests.inputs.soak`, which `make soak-inputs` runs 100,000 of."""

from __future__ import annotations

from collections.abc import Iterator

import grpc
import httpx
import pytest
from hypothesis import HealthCheck, given, settings

from kvrelay.v1 import inference_pb2 as pb
from kvrelay.v1 import inference_pb2_grpc
from tests.inputs import cases
from tests.inputs.strategies import generate_requests, headers, lines, prompt_parts, requests
from tests.integration.faces_kit import Served

FIXED = settings(
    database=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)


@pytest.fixture(scope="module", name="client")
def a_client(server: Served) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=30, trust_env=False) as client:
        yield client


@pytest.fixture(scope="module", name="stub")
def a_stub(server: Served) -> Iterator[inference_pb2_grpc.InferenceStub]:
    with grpc.insecure_channel(server.grpc_address) as channel:
        yield inference_pb2_grpc.InferenceStub(channel)


@settings(FIXED, max_examples=700)
@given(request=requests, headers=headers)
def test_any_body_and_headers(
    client: httpx.Client, request: tuple[str, bytes], headers: dict[bytes, bytes]
) -> None:
    cases.post(client, *request, headers)


@settings(FIXED, max_examples=150)
@given(body=lines)
def test_any_lines(client: httpx.Client, body: bytes) -> None:
    cases.post(client, "/v1/completions/stream", body, {})


@settings(FIXED, max_examples=300)
@given(request=generate_requests)
def test_any_message(stub: inference_pb2_grpc.InferenceStub, request: pb.GenerateRequest) -> None:
    cases.generate(stub, request)


@settings(FIXED, max_examples=150)
@given(parts=prompt_parts)
def test_any_parts(stub: inference_pb2_grpc.InferenceStub, parts: list[pb.PromptPart]) -> None:
    cases.generate_parts(stub, parts)
