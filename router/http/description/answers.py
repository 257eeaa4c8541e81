"""The bodies of answers, for the description. The endpoints write them as plain objects."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

Logprob = float


class Answer(BaseModel):
    model_config = ConfigDict(extra="allow")


class ErrorBody(BaseModel):
    """OpenAI's. `code` is for programs, `param` names the wrong field."""

    model_config = ConfigDict(extra="forbid")

    message: str
    type: str
    code: str | None
    param: str | None
    promise: str = ""
    """In a refusal: send it back with the request, at the time that it names, in Base64."""


class ErrorAnswer(BaseModel):
    model_config = ConfigDict(extra="forbid")

    error: ErrorBody


class CachedTokens(Answer):
    cached_tokens: int


class Usage(Answer):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens | None = None


class PromptLogprob(Answer):
    """Of one token of the prompt, as vLLM writes it."""

    logprob: Logprob
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]


class CompletionLogprobs(Answer):
    text_offset: list[int]
    token_logprobs: list[Logprob | None]
    tokens: list[str]
    top_logprobs: list[dict[str, Logprob] | None]


class Choice(Answer):
    index: int
    finish_reason: Literal["stop", "length", "abort"] | None
    stop_reason: str | int | None
    token_ids: list[int] | None = None
    """With `return_token_ids`."""


class CompletionChoice(Choice):
    text: str
    logprobs: CompletionLogprobs | None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None


class Generated(Answer):
    id: str
    created: int
    """Unix time, in seconds."""
    model: str


class CompletionAnswer(Generated):
    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: Usage


class CompletionEvent(Generated):
    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: Usage | None = None
    ticket: str = ""
    """In the first event, with `return_token_ids`: what a continuation needs."""


class ChatLogprobs(Answer):
    content: list[dict[str, Any]]


class ChatMessage(Answer):
    role: Literal["assistant"]
    content: str | None


class ChatDelta(Answer):
    role: Literal["assistant"] = "assistant"
    content: str | None = None


class ChatChoice(Choice):
    message: ChatMessage
    logprobs: ChatLogprobs | None


class ChatEventChoice(Choice):
    delta: ChatDelta
    logprobs: ChatLogprobs | None


class ChatAnswer(Generated):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None


class ChatEvent(Generated):
    object: Literal["chat.completion.chunk"]
    choices: list[ChatEventChoice]
    usage: Usage | None = None
    ticket: str = ""


class ResponseAnswer(Answer):
    """OpenAI's. `output` has items of type reasoning, message and function_call."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["completed", "incomplete", "failed", "in_progress"]
    model: str
    output: list[dict[str, Any]]
    usage: dict[str, Any] | None


class ResponseEvent(Answer):
    type: str
    sequence_number: int


class DeletedResponse(Answer):
    id: str
    object: Literal["response"]
    deleted: Literal[True]


class InputTokens(Answer):
    object: Literal["response.input_tokens"]
    input_tokens: int


class MessageAnswer(Answer):
    """Anthropic's. `content` has blocks of type thinking, text and tool_use."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
    stop_reason: str | None
    stop_sequence: str | None
    usage: dict[str, Any]


class MessageEvent(Answer):
    type: str


class MessageTokens(Answer):
    input_tokens: int


class MessageErrorBody(Answer):
    type: str
    message: str


class MessageError(Answer):
    """Anthropic's."""

    type: Literal["error"]
    error: MessageErrorBody
    request_id: str


class ModelCard(Answer):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    max_model_len: int | None


class ModelList(Answer):
    object: Literal["list"]
    data: list[ModelCard]


class TokenizeAnswer(Answer):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str | None] | None


class DetokenizeAnswer(Answer):
    prompt: str


class HealthAnswer(Answer):
    status: Literal["ok"]


class LoadAnswer(Answer):
    server_load: int


class ReadyAnswer(Answer):
    ready: Literal[True]


class NotReadyAnswer(Answer):
    ready: Literal[False]
    reason: str


class VersionAnswer(Answer):
    version: str
