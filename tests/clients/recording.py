"""A server that records what clients send to it, and says just enough for them to go on: a call of
the first tool where there are tools and no call was answered yet, else a JSON object as text.

It stands for OpenAI's and Anthropic's servers, and says what those would say.
"""

from __future__ import annotations

import itertools
import json
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TEXT = ARGUMENTS = '{"city": "Paris"}'
CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
COMPLETIONS, MESSAGES = "/v1/completions", "/v1/messages"
COUNT_TOKENS = "/v1/messages/count_tokens"
Json = dict[str, Any]
Event = tuple[str | None, Json | str]
"""(name, data)"""
USAGE = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}


@dataclass(slots=True)
class Recorded:
    """Each request's path and body, in order. `keys`: what came as its authorization."""

    url: str
    requests: list[tuple[str, Json]] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)


@contextmanager
def recording(tls: ssl.SSLContext | None = None) -> Iterator[Recorded]:
    server = _Server(("127.0.0.1", 0), _Handler)
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    scheme = "http" if tls is None else "https"
    server.recorded = Recorded(f"{scheme}://127.0.0.1:{server.server_address[1]}")  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server.recorded  # type: ignore[attr-defined]
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_: object) -> None:
        """A client may close its connection as it likes."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        length = int(self.headers.get("content-length", 0))
        body = json.loads(self.rfile.read(length))
        path = self.path.partition("?")[0].removesuffix("/")
        recorded: Recorded = self.server.recorded  # type: ignore[attr-defined]
        recorded.requests.append((path, body))
        recorded.keys.append(self.headers.get("authorization"))
        if body.get("stream"):
            self._send("text/event-stream", b"".join(map(_event, _events(path, body))))
        else:
            self._send("application/json", json.dumps(_whole(path, body)).encode())

    def _send(self, kind: str, content: bytes) -> None:
        self.send_response(200)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


def _event(event: Event) -> bytes:
    name, data = event
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {data if isinstance(data, str) else json.dumps(data)}\n\n".encode()


def _whole(path: str, body: Json) -> Json:
    tool = _tool_to_call(path, body)
    kinds = {
        CHAT: _chat,
        RESPONSES: _response,
        MESSAGES: _message,
        COMPLETIONS: _completion,
        COUNT_TOKENS: lambda _: {"input_tokens": 1},
    }
    return kinds[path](tool)


def _events(path: str, body: Json) -> Iterator[Event]:
    tool = _tool_to_call(path, body)
    kinds = {
        CHAT: _chat_events,
        RESPONSES: _response_events,
        MESSAGES: _message_events,
        COMPLETIONS: _completion_events,
    }
    return kinds[path](tool)


def _tool_to_call(path: str, body: Json) -> str | None:
    """The tool for the answer where there is one that is wanted, else the first."""
    told = json.dumps(body.get("messages", body.get("input")))
    was_called = any(mark in told for mark in ("tool_call_id", "tool_use_id", "call_output"))
    tools = body.get("tools") or []
    if was_called and (body.get("tool_choice") not in ("required", {"type": "any"})):
        return None
    names = [tool.get("function", tool).get("name") for tool in tools]
    return names[-1 if was_called else 0] if names else None


def _completion(_: str | None) -> Json:
    choice = {"index": 0, "text": TEXT, "logprobs": None, "finish_reason": "stop"}
    head = {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": "m"}
    return {**head, "choices": [choice], "usage": USAGE}


def _completion_events(tool: str | None) -> Iterator[Event]:
    yield None, _completion(tool)
    yield None, "[DONE]"


def _chat(tool: str | None) -> Json:
    message: Json = {"role": "assistant", "content": None if tool else TEXT}
    if tool:
        message["tool_calls"] = [_chat_call(tool)]
    reason = "tool_calls" if tool else "stop"
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": reason}
    head = {"id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": "m"}
    return {**head, "choices": [choice], "usage": USAGE}


def _chat_call(tool: str) -> Json:
    function = {"name": tool, "arguments": ARGUMENTS}
    return {"index": 0, "id": "call_1", "type": "function", "function": function}


def _chat_events(tool: str | None) -> Iterator[Event]:
    whole = {**_chat(tool), "object": "chat.completion.chunk"}
    choice = whole.pop("choices")[0]
    usage = whole.pop("usage")
    delta = choice.pop("message")
    yield None, {**whole, "choices": [{**choice, "delta": delta, "finish_reason": None}]}
    yield None, {**whole, "choices": [{**choice, "delta": {}}]}
    yield None, {**whole, "choices": [], "usage": usage}
    yield None, "[DONE]"


def _response(tool: str | None) -> Json:
    usage = {
        "input_tokens": 1,
        "output_tokens": 1,
        "total_tokens": 2,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens_details": {"reasoning_tokens": 0},
    }
    return {
        "id": "resp_1",
        "object": "response",
        "created_at": 1,
        "model": "m",
        "status": "completed",
        "output": [_item(tool)],
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "usage": usage,
    }


def _item(tool: str | None) -> Json:
    if tool:
        call = {"type": "function_call", "id": "fc_1", "call_id": "call_1", "name": tool}
        return {**call, "arguments": ARGUMENTS, "status": "completed"}
    part = {"type": "output_text", "text": TEXT, "annotations": []}
    head = {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed"}
    return {**head, "content": [part]}


def _response_events(tool: str | None) -> Iterator[Event]:
    whole, item = _response(tool), _item(tool)
    at, numbers = {"output_index": 0, "item_id": item["id"]}, itertools.count()

    def event(kind: str, **fields: Any) -> Event:
        return kind, {"type": kind, "sequence_number": next(numbers), **fields}

    yield event("response.created", response={**whole, "output": [], "status": "in_progress"})
    begun = {**item, "status": "in_progress", **({"arguments": ""} if tool else {"content": []})}
    yield event("response.output_item.added", output_index=0, item=begun)
    if tool:
        yield event("response.function_call_arguments.delta", **at, delta=ARGUMENTS)
        yield event("response.function_call_arguments.done", **at, arguments=ARGUMENTS, name=tool)
    else:
        part = {**at, "content_index": 0}
        empty = {**item["content"][0], "text": ""}
        yield event("response.content_part.added", **part, part=empty)
        yield event("response.output_text.delta", **part, delta=TEXT, logprobs=[])
        yield event("response.output_text.done", **part, text=TEXT, logprobs=[])
        yield event("response.content_part.done", **part, part=item["content"][0])
    yield event("response.output_item.done", output_index=0, item=item)
    yield event("response.completed", response=whole)


def _message(tool: str | None) -> Json:
    block: Json = {"type": "text", "text": TEXT}
    if tool:
        block = {"type": "tool_use", "id": "toolu_1", "name": tool, "input": json.loads(ARGUMENTS)}
    return {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "model": "m",
        "content": [block],
        "stop_reason": "tool_use" if tool else "end_turn",
        "stop_sequence": None,
        "usage": {"input_tokens": 1, "output_tokens": 1},
    }


def _message_events(tool: str | None) -> Iterator[Event]:
    whole = _message(tool)
    (block,) = whole["content"]

    def event(kind: str, **fields: Any) -> Event:
        return kind, {"type": kind, **fields}

    yield event("message_start", message={**whole, "content": [], "stop_reason": None})
    begun = {**block, **({"input": {}} if tool else {"text": ""})}
    yield event("content_block_start", index=0, content_block=begun)
    text = {"type": "text_delta", "text": TEXT}
    arguments = {"type": "input_json_delta", "partial_json": ARGUMENTS}
    yield event("content_block_delta", index=0, delta=arguments if tool else text)
    yield event("content_block_stop", index=0)
    ended = {"stop_reason": whole["stop_reason"], "stop_sequence": None}
    yield event("message_delta", delta=ended, usage={"output_tokens": 1})
    yield event("message_stop")
