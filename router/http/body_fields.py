"""The request bodies, as strict models. A field that isn't here or among the neutral ones
(`router.http.neutral_fields`) is refused, never ignored."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

TokenId = Annotated[int, Field(ge=0, lt=2**32)]


class StrictBody(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    model: str | None = None


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    continuous_usage_stats: bool | None = None
    """vLLM's: with `include_usage`, every chunk has the usage so far."""


class GenerationBody(StrictBody):
    """What completions and chat completions share. null means: not given."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    """Goes before `max_tokens`."""
    min_tokens: int | None = None
    n: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    logit_bias: dict[str, float] | None = None
    prompt_logprobs: int | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    cache_salt: str | None = None
    """vLLM's: requests with different ones share no cached KV."""
    tier: str | None = None
    """Of QoS."""
    stream: bool | None = None
    stream_options: StreamOptions | None = None


class CompletionBody(GenerationBody):
    prompt: str | list[str] | list[TokenId] | list[list[TokenId]]
    logprobs: int | None = None
    echo: bool | None = None


class TextPart(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    type: str
    text: str | None = None


class ChatMessage(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    role: str
    content: str | list[TextPart] | None = None
    name: str | None = None


class ChatBody(GenerationBody):
    messages: list[ChatMessage]
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class TokenizeBody(StrictBody):
    """vLLM's: a prompt or messages."""

    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(StrictBody):
    tokens: list[TokenId]
