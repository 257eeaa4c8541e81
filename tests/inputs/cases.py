"""One case each: something is sent, and the answer must be an answer or a refusal, no crash."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable

import grpc
import httpx

from kvrelay.v1 import inference_pb2 as pb
from kvrelay.v1 import inference_pb2_grpc

CRASHES = (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN)
ERROR_FIELDS = {"message", "type", "code", "param"}


def post(client: httpx.Client, path: str, body: bytes, headers: dict[bytes, bytes]) -> None:
    given = {b"content-type": b"application/json", **headers}
    answer = client.post(path, content=body, headers=list(given.items()))
    where = f"{path} {body!r} {headers!r}: {answer.status_code} {answer.text}"
    assert answer.status_code < 500, where
    if answer.status_code >= 400:
        assert set(answer.json()["error"]) == ERROR_FIELDS, where
    elif answer.headers["content-type"].startswith("text/event-stream"):
        assert answer.text.endswith("data: [DONE]\n\n"), where
    else:
        json.loads(answer.content)


def generate(stub: inference_pb2_grpc.InferenceStub, request: pb.GenerateRequest) -> None:
    status = _status(lambda: stub.Generate(request, timeout=30))
    assert status not in CRASHES, request


def generate_parts(stub: inference_pb2_grpc.InferenceStub, parts: list[pb.PromptPart]) -> None:
    status = _status(lambda: stub.GenerateStream(iter(parts), timeout=30))
    assert status not in CRASHES, parts


def _status(call: Callable[[], Iterable[object]]) -> grpc.StatusCode:
    try:
        for _ in call():
            pass
    except grpc.RpcError as error:
        return error.code()
    return grpc.StatusCode.OK
