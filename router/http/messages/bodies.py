"""Bodies of /v1/messages, strict at every depth: each field is served, neutral or refused.

The fields are those of the `anthropic` package's types.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field, Tag

from router.http.bodies import AskingBody
from router.http.neutral_fields import ANYTHING, NO_MEDIA, VLLM_NEUTRAL, Neutral
from router.http.parts.strict import JsonObject, StrictPart, by_type, text_or_list

NO_HOSTED = "kvrelay runs no tools itself: declare tools with a name and an input_schema"
CACHE = {"cache_control": ANYTHING}
"""Prompts that begin alike share their KV without being marked."""
OF_TOOLSET = Neutral(instead="there are no toolsets")
DIRECT = Neutral(values=({"type": "direct"},), instead=NO_HOSTED)


class TextBlock(StrictPart):
    type: Literal["text"]
    text: str
    neutral: ClassVar = {**CACHE, "citations": ANYTHING}


class ThinkingBlock(StrictPart):
    """Of an earlier answer."""

    type: Literal["thinking"]
    thinking: str
    neutral: ClassVar = {"signature": ANYTHING}


class RedactedThinking(StrictPart):
    """It was encrypted for another server, so it stays unread."""

    type: Literal["redacted_thinking"]
    neutral: ClassVar = {"data": ANYTHING}


class ToolUseBlock(StrictPart):
    type: Literal["tool_use"]
    id: str
    name: str
    input: JsonObject
    neutral: ClassVar = {**CACHE, "caller": DIRECT, "toolset_name": OF_TOOLSET}


TextOnly = Annotated[
    Annotated[TextBlock, Tag("~text")], by_type(f"a block of type text: {NO_MEDIA}")
]
TextBlocks = Annotated[
    Annotated[str, Tag("~text")] | Annotated[list[TextOnly], Tag("~list")],
    text_or_list("a string or a list of text blocks"),
]


class ToolResult(StrictPart):
    type: Literal["tool_result"]
    tool_use_id: str
    content: TextBlocks | None = None
    is_error: bool | None = None
    neutral: ClassVar = {**CACHE, "toolset_name": OF_TOOLSET}


Block = Annotated[
    Annotated[TextBlock, Tag("~text")]
    | Annotated[ToolUseBlock, Tag("~tool_use")]
    | Annotated[ToolResult, Tag("~tool_result")]
    | Annotated[ThinkingBlock, Tag("~thinking")]
    | Annotated[RedactedThinking, Tag("~redacted_thinking")],
    by_type(f"a block of type text, tool_use, tool_result or thinking: {NO_MEDIA}"),
]


class Message(StrictPart):
    role: Literal["user", "assistant", "system"]
    content: Annotated[
        Annotated[str, Tag("~text")] | Annotated[list[Block], Tag("~list")],
        text_or_list("a string or a list of blocks"),
    ]


class CustomTool(StrictPart):
    type: Literal["custom"] | None = None
    name: str = Field(min_length=1)
    description: str | None = None
    input_schema: JsonObject
    strict: bool | None = None
    neutral: ClassVar = {
        **CACHE,
        "allowed_callers": Neutral(values=(["direct"],), instead=NO_HOSTED),
        "defer_loading": Neutral(values=(False,), instead="every tool is shown to the model"),
        "eager_input_streaming": ANYTHING,
        "input_examples": Neutral(values=([],), instead="put them into the description"),
    }


ToolBody = Annotated[
    Annotated[CustomTool, Tag("~custom")],
    by_type(f"a tool of type custom: {NO_HOSTED}", default="custom"),
]


class AutoChoice(StrictPart):
    type: Literal["auto"]
    disable_parallel_tool_use: bool | None = None


class AnyChoice(StrictPart):
    type: Literal["any"]
    disable_parallel_tool_use: bool | None = None


class ToolChoiceBody(StrictPart):
    type: Literal["tool"]
    name: str
    disable_parallel_tool_use: bool | None = None


class NoChoice(StrictPart):
    type: Literal["none"]


ChoiceBody = Annotated[
    Annotated[AutoChoice, Tag("~auto")]
    | Annotated[AnyChoice, Tag("~any")]
    | Annotated[ToolChoiceBody, Tag("~tool")]
    | Annotated[NoChoice, Tag("~none")],
    by_type("an object of type auto, any, tool or none"),
]

Display = Literal["summarized", "omitted"]


class ThinkingEnabled(StrictPart):
    """The chat template has no budget: `max_tokens` bounds the thinking too."""

    type: Literal["enabled"]
    budget_tokens: int = Field(ge=1)
    display: Display | None = None


class ThinkingAdaptive(StrictPart):
    type: Literal["adaptive"]
    display: Display | None = None


class ThinkingDisabled(StrictPart):
    type: Literal["disabled"]


ThinkingBody = Annotated[
    Annotated[ThinkingEnabled, Tag("~enabled")]
    | Annotated[ThinkingAdaptive, Tag("~adaptive")]
    | Annotated[ThinkingDisabled, Tag("~disabled")],
    by_type("an object of type enabled, adaptive or disabled"),
]


class JsonFormat(StrictPart):
    type: Literal["json_schema"]
    schema_: JsonObject = Field(alias="schema")


class OutputConfig(StrictPart):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: JsonFormat | None = None
    neutral: ClassVar = {"task_budget": Neutral(instead="send max_tokens")}


class ClearThinking(StrictPart):
    """The chat template decides which earlier thinking the model sees."""

    type: Literal["clear_thinking_20251015"]
    neutral: ClassVar = {"keep": ANYTHING}


class ContextManagement(StrictPart):
    edits: (
        list[
            Annotated[
                Annotated[ClearThinking, Tag("~clear_thinking_20251015")],
                by_type(
                    "an edit of type clear_thinking_20251015: other edits are the client's, "
                    "shorten the messages"
                ),
            ]
        ]
        | None
    ) = None


NOT_KEPT = "nothing is kept between requests"
PROMPT_NEUTRAL: Mapping[str, Neutral] = {
    "cache_control": ANYTHING,
    "speed": Neutral(values=("standard",), instead="send tier"),
    "user_profile_id": ANYTHING,
    "workspace_id": ANYTHING,
    "mcp_servers": Neutral(values=([],), instead=NO_HOSTED),
}
MESSAGES_NEUTRAL: Mapping[str, Neutral] = {
    **PROMPT_NEUTRAL,
    "billing_policy": ANYTHING,
    "compaction": Neutral(instead="shorten the messages"),
    "container": Neutral(instead="there are no containers"),
    "diagnostics": ANYTHING,
    "fallback_credit_token": ANYTHING,
    "fallbacks": Neutral(values=([],), instead="this cluster serves one model"),
    "inference_geo": Neutral(values=("not_available",), instead="the cluster's place is its own"),
    "metadata": ANYTHING,
    "service_tier": Neutral(values=("auto", "standard_only"), instead="send tier"),
    "thread": Neutral(instead=NOT_KEPT),
    **VLLM_NEUTRAL,
}


class PromptFields(StrictPart):
    """What decides the prompt."""

    messages: list[Message]
    system: TextBlocks | None = None
    tools: list[ToolBody] | None = None
    tool_choice: ChoiceBody | None = None
    thinking: ThinkingBody | None = None
    output_config: OutputConfig | None = None
    output_format: JsonFormat | None = None
    """The earlier name of `output_config.format`."""
    context_management: ContextManagement | None = None
    chat_template_kwargs: JsonObject | None = None
    """kvrelay's own: further variables of the chat template."""


class MessagesBody(PromptFields, AskingBody):
    max_tokens: int = Field(ge=1)
    """The thinking counts too. What exceeds the model's context is cut."""
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    """kvrelay's own."""
    stream: bool | None = None
    neutral: ClassVar[Mapping[str, Neutral]] = MESSAGES_NEUTRAL


class CountTokensBody(PromptFields, AskingBody):
    neutral: ClassVar[Mapping[str, Neutral]] = PROMPT_NEUTRAL
