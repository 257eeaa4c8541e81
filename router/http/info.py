"""The endpoints that need no text: models, health, metrics."""

from __future__ import annotations

import asyncio

from google.protobuf.json_format import MessageToDict
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response

from router.http.api import HttpApi, api_of, json_response


async def models(request: Request) -> Response:
    return json_response({"object": "list", "data": [_model_card(api_of(request))]})


async def model(request: Request) -> Response:
    api = api_of(request)
    api.service.check_model(request.path_params["model"])
    return json_response(_model_card(api))


def _model_card(api: HttpApi) -> dict[str, object]:
    facts = api.service.dispatcher.model()
    return {
        "id": api.service.model_name,
        "object": "model",
        "created": int(api.started_s),
        "owned_by": "kvrelay",
        "root": api.service.model_name,
        "max_model_len": facts.max_model_len if facts is not None else None,
    }


async def health(request: Request) -> Response:
    return json_response({"status": "ok"})


async def ping(request: Request) -> Response:
    """As in vLLM and SageMaker: `health` without a body."""
    return Response()


async def load(request: Request) -> Response:
    """As in vLLM: the number of requests that this router is serving."""
    running = api_of(request).service.dispatcher.running_requests()
    return json_response({"server_load": running})


async def ready(request: Request) -> Response:
    service = api_of(request).service
    if service.leaving:
        return json_response({"ready": False, "reason": "this router is stopping"}, status=503)
    reason = service.dispatcher.not_ready()
    if reason is None:
        return json_response({"ready": True})
    return json_response({"ready": False, "reason": reason}, status=503)


async def metrics(request: Request) -> Response:
    service = api_of(request).service
    snapshot = service.dispatcher.snapshot()
    content = await asyncio.to_thread(service.metrics.exposition, snapshot)
    return Response(content, media_type=CONTENT_TYPE_LATEST)


async def debug_kv(request: Request) -> Response:
    found = await api_of(request).service.dispatcher.debug_kv()
    return json_response(
        MessageToDict(
            found, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
        )
    )


async def version(request: Request) -> Response:
    return json_response({"version": api_of(request).version})
