"""The answer to POST /v1/chat/completions, streamed or whole, in OpenAI's shapes.

Reasoning is told under both names that clients know: `reasoning`, vLLM's, and `reasoning_content`,
DeepSeek's.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from kvrelay.types import FinishReason
from router.chat.reader import ChatReader, readers_of
from router.chat.values.events import (
    AssistantTurn,
    CallArguments,
    CallBegins,
    ChatEvent,
    ContentText,
    ReasoningText,
    ToolCall,
)
from router.chat.values.form import ChatForm
from router.http.api import HttpApi
from router.http.bodies import ChatBody, stop_reason, stream_flags
from router.http.reply import ChoiceTotals, Reply, chat_logprobs, prompt_logprobs
from router.text.choices import TextDelta


class ChatReply(Reply):
    def __init__(
        self, api: HttpApi, body: ChatBody, form: ChatForm, request_id: str, *, ledger: bool
    ) -> None:
        super().__init__(stream_flags(body), ledger=ledger, tickets=bool(body.return_token_ids))
        self.id = request_id
        self._new_reader = readers_of(api.service, form)
        self._readers: dict[int, ChatReader] = {}
        self._eos_ids = api.service.defaults.eos_token_ids
        self._tokenizer = api.service.tokenizer
        self._with_logprobs = bool(body.logprobs)
        self._with_token_ids = bool(body.return_token_ids)
        self._with_reasoning = body.include_reasoning is not False
        self._prompt_logprobs = body.prompt_logprobs
        self._begun: set[int] = set()
        self._envelope: dict[str, object] = {
            "id": self.id,
            "object": "chat.completion.chunk" if self.stream else "chat.completion",
            "created": int(time.time()),
            "model": api.service.model_name,
        }

    def chunk(self, position: int, delta: TextDelta) -> dict[str, object]:
        said = _said(self._read(delta), with_reasoning=self._with_reasoning)
        prompt: dict[str, object] = {}
        if delta.choice not in self._begun:
            prompt = self._prompt_extra() if not self._begun else {}
            self._begun.add(delta.choice)
            said = {"role": "assistant", "content": "", **said}
        choice = {**self._choice(delta), "delta": said}
        return {**self._envelope, **prompt, "choices": [choice]}

    def closing_chunk(self) -> dict[str, object]:
        return {**self._envelope, "choices": []}

    def whole(self, totals: ChoiceTotals) -> dict[str, object]:
        choices = [self._whole_choice(delta) for delta in totals.values()]
        extra = self._prompt_extra()
        return {**self._envelope, **extra, "choices": choices, "usage": self.usage()}

    def _whole_choice(self, delta: TextDelta) -> dict[str, object]:
        turn = AssistantTurn()
        turn.add(self._read(delta))
        message: dict[str, object] = {
            "role": "assistant",
            "content": turn.content if turn.content or not turn.calls else None,
            "refusal": None,
        }
        if turn.reasoning and self._with_reasoning:
            message |= _reasoning(turn.reasoning)
        if turn.calls:
            message["tool_calls"] = [_call(call) for call in turn.calls]
        return {**self._choice(delta), "message": message}

    def _read(self, delta: TextDelta) -> Sequence[ChatEvent]:
        reader = self._reader(delta.choice)
        events = reader.push(delta.text)
        return [*events, *reader.finish()] if delta.finish_reason is not None else events

    def _reader(self, choice: int) -> ChatReader:
        """Stands behind what another router has delivered."""
        if choice not in self._readers:
            reader = self._readers[choice] = self._new_reader()
            reader.push(self.generations[0].delivered_texts[choice])
        return self._readers[choice]

    def _choice(self, delta: TextDelta) -> dict[str, object]:
        choice: dict[str, object] = {
            "index": delta.choice,
            "logprobs": chat_logprobs(self._tokenizer, delta.logprobs)
            if self._with_logprobs
            else None,
            "finish_reason": self._finish_reason(delta),
            "stop_reason": stop_reason(delta, self._eos_ids),
        }
        if self._with_token_ids:
            choice["token_ids"] = delta.token_ids
        return choice

    def _finish_reason(self, delta: TextDelta) -> str | None:
        called = self._readers[delta.choice].calls > 0
        if called and delta.finish_reason is FinishReason.STOP:
            return "tool_calls"
        return delta.finish_reason

    def _prompt_extra(self) -> dict[str, object]:
        extra: dict[str, object] = {}
        prompt = self.generations[0]
        if self._with_token_ids:
            extra["prompt_token_ids"] = prompt.prompt_ids
        if (top := self._prompt_logprobs) is not None:
            told = prompt_logprobs(self._tokenizer, prompt.prompt_logprobs, top)
            extra["prompt_logprobs"] = told
        return extra


def _reasoning(text: str) -> dict[str, object]:
    return {"reasoning": text, "reasoning_content": text}


def _call(call: ToolCall) -> dict[str, object]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.call_id, "type": "function", "function": function}


def _said(events: Sequence[ChatEvent], *, with_reasoning: bool) -> dict[str, object]:
    """The `delta` of a chunk: at most one entry for each call."""
    content, reasoning = "", ""
    calls: dict[int, dict[str, object]] = {}
    arguments: dict[int, str] = {}
    for event in events:
        match event:
            case ContentText():
                content += event.text
            case ReasoningText():
                reasoning += event.text
            case CallBegins():
                calls[event.position] = {
                    "id": event.call_id,
                    "type": "function",
                    "name": event.name,
                }
                arguments[event.position] = ""
            case CallArguments():
                arguments[event.position] = arguments.get(event.position, "") + event.text
    said: dict[str, object] = {}
    if reasoning and with_reasoning:
        said |= _reasoning(reasoning)
    if content or not (said or arguments):
        said["content"] = content
    if arguments:
        said["tool_calls"] = [_piece(at, calls.get(at), text) for at, text in arguments.items()]
    return said


def _piece(at: int, begins: dict[str, object] | None, text: str) -> dict[str, object]:
    if begins is None:
        return {"index": at, "function": {"arguments": text}}
    function = {"name": begins["name"], "arguments": text}
    return {"index": at, "id": begins["id"], "type": "function", "function": function}
