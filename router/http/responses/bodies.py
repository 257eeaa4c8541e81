"""Bodies of /v1/responses, strict at every depth: each field is served, neutral or refused.

The fields are those of the `openai` package's types.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field, Tag

from router.http.bodies import AskingBody
from router.http.neutral_fields import (
    ANYTHING,
    NO_EXTENSIONS,
    NO_MEDIA,
    TEMPLATE_NEUTRAL,
    VLLM_NEUTRAL,
    Neutral,
)
from router.http.parts.strict import JsonObject, StrictPart, by_type, text_or_list

NO_HOSTED = "only function tools are supported: kvrelay runs no tools itself"
Status = Literal["in_progress", "completed", "incomplete"]
DIRECT = Neutral(values=({"type": "direct"},), instead=NO_HOSTED)


class InputText(StrictPart):
    type: Literal["input_text"]
    text: str
    neutral: ClassVar = {"prompt_cache_breakpoint": ANYTHING}


class OutputText(StrictPart):
    type: Literal["output_text"]
    text: str
    neutral: ClassVar = {"annotations": ANYTHING, "logprobs": ANYTHING}


class Refusal(StrictPart):
    type: Literal["refusal"]
    refusal: str


ContentPart = Annotated[
    Annotated[InputText, Tag("~input_text")]
    | Annotated[OutputText, Tag("~output_text")]
    | Annotated[Refusal, Tag("~refusal")],
    by_type(f"a part of type input_text, output_text or refusal: {NO_MEDIA}"),
]
Content = Annotated[
    Annotated[str, Tag("~text")] | Annotated[list[ContentPart], Tag("~list")],
    text_or_list("a string or a list of parts"),
]


class MessageItem(StrictPart):
    type: Literal["message"] | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: Content
    id: str | None = None
    status: Status | None = None
    phase: Literal["commentary", "final_answer"] | None = None


class FunctionCall(StrictPart):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: Status | None = None
    neutral: ClassVar = {
        "async": Neutral(values=(False,), instead="calls are answered in the next request"),
        "caller": DIRECT,
        "namespace": Neutral(instead="name the function itself"),
    }


OutputPart = Annotated[
    Annotated[InputText, Tag("~input_text")] | Annotated[OutputText, Tag("~output_text")],
    by_type(f"a part of type input_text: {NO_MEDIA}"),
]


class FunctionCallOutput(StrictPart):
    type: Literal["function_call_output"]
    call_id: str
    output: Annotated[
        Annotated[str, Tag("~text")] | Annotated[list[OutputPart], Tag("~list")],
        text_or_list("a string or a list of parts"),
    ]
    id: str | None = None
    status: Status | None = None
    name: str | None = None
    neutral: ClassVar = {
        "caller": DIRECT,
        "namespace": Neutral(instead="name the function itself"),
    }


class SummaryText(StrictPart):
    type: Literal["summary_text"]
    text: str


class ReasoningText(StrictPart):
    type: Literal["reasoning_text"]
    text: str


class ReasoningItem(StrictPart):
    """Of an earlier answer. What is encrypted for another server stays unread."""

    type: Literal["reasoning"]
    id: str | None = None
    summary: list[SummaryText] | None = None
    content: list[ReasoningText] | None = None
    status: Status | None = None
    neutral: ClassVar = {"encrypted_content": ANYTHING}


Item = Annotated[
    Annotated[MessageItem, Tag("~message")]
    | Annotated[FunctionCall, Tag("~function_call")]
    | Annotated[FunctionCallOutput, Tag("~function_call_output")]
    | Annotated[ReasoningItem, Tag("~reasoning")],
    by_type(
        "an item of type message, function_call, function_call_output or reasoning: "
        "kvrelay takes text and function tools",
        default="message",
    ),
]
Input = Annotated[
    Annotated[str, Tag("~text")] | Annotated[list[Item], Tag("~list")],
    text_or_list("a string or a list of items"),
]


class FunctionTool(StrictPart):
    type: Literal["function"]
    name: str = Field(min_length=1)
    description: str | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None
    neutral: ClassVar = {
        "allowed_callers": Neutral(values=(["direct"],), instead=NO_HOSTED),
        "async": Neutral(values=(False,), instead="calls are answered in the next request"),
        "defer_loading": Neutral(values=(False,), instead="every tool is shown to the model"),
        "output_schema": ANYTHING,
    }


ToolBody = Annotated[
    Annotated[FunctionTool, Tag("~function")], by_type(f"a tool of type function: {NO_HOSTED}")
]


class NamedFunction(StrictPart):
    type: Literal["function"]
    name: str


class AllowedTools(StrictPart):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[
        Annotated[
            Annotated[NamedFunction, Tag("~function")],
            by_type(f"a tool of type function: {NO_HOSTED}"),
        ]
    ]


ChoiceBody = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("~word")]
    | Annotated[NamedFunction, Tag("~function")]
    | Annotated[AllowedTools, Tag("~allowed_tools")],
    by_type(
        f"none, auto, required, or an object of type function or allowed_tools: {NO_HOSTED}",
        text="word",
    ),
]


class TextFormat(StrictPart):
    type: Literal["text"]


class JsonObjectFormat(StrictPart):
    type: Literal["json_object"]


class JsonSchemaFormat(StrictPart):
    type: Literal["json_schema"]
    name: str | None = None
    schema_: JsonObject = Field(alias="schema")
    description: str | None = None
    strict: bool | None = None


FormatBody = Annotated[
    Annotated[TextFormat, Tag("~text")]
    | Annotated[JsonObjectFormat, Tag("~json_object")]
    | Annotated[JsonSchemaFormat, Tag("~json_schema")],
    by_type("a format of type text, json_object or json_schema"),
]


class TextConfig(StrictPart):
    format: FormatBody | None = None
    neutral: ClassVar = {
        "verbosity": Neutral(values=("medium",), instead="ask for it in the instructions")
    }


class ReasoningConfig(StrictPart):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    """No summary is made: the answer has the reasoning itself."""
    neutral: ClassVar = {
        "generate_summary": ANYTHING,
        "context": Neutral(values=("auto",), instead="the chat template decides"),
        "mode": Neutral(values=("standard",), instead="there is one mode"),
    }


class StreamOptions(StrictPart):
    neutral: ClassVar = {"include_obfuscation": ANYTHING}


Include = Literal[
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
    "reasoning.encrypted_content",
    "message.output_text.logprobs",
]
"""What further parts an answer has; but for log probabilities none of them arises here."""

NO_CONVERSATION = "send previous_response_id, or the items themselves"
RESPONSES_NEUTRAL: Mapping[str, Neutral] = {
    "user": ANYTHING,
    "safety_identifier": ANYTHING,
    "prompt_cache_key": ANYTHING,
    "prompt_cache_options": ANYTHING,
    "prompt_cache_retention": ANYTHING,
    "max_tool_calls": ANYTHING,
    "access_programs": ANYTHING,
    "background": Neutral(values=(False,), instead="send stream: true and keep the stream open"),
    "background_options": Neutral(values=({},), instead="nothing runs in the background"),
    "context_management": Neutral(values=([],), instead="shorten the items you send"),
    "conversation": Neutral(instead=NO_CONVERSATION),
    "image": Neutral(values=({},), instead=NO_MEDIA),
    "moderation": Neutral(instead="answers are not moderated"),
    "prompt": Neutral(instead="there are no stored prompts: send instructions and input"),
    "service_tier": Neutral(values=("auto", "default"), instead="send tier"),
    "top_logprobs": Neutral(values=(0,), instead="/v1/chat/completions has log probabilities"),
    # vLLM's
    **VLLM_NEUTRAL,
    "media_io_kwargs": TEMPLATE_NEUTRAL["media_io_kwargs"],
    "mm_processor_kwargs": TEMPLATE_NEUTRAL["mm_processor_kwargs"],
    "enable_response_messages": Neutral(
        values=(False,), instead="/v1/chat/completions has return_token_ids"
    ),
    "previous_input_messages": Neutral(instead=NO_CONVERSATION),
    "include_reasoning": Neutral(values=(True,), instead="skip the items of type reasoning"),
    "include_stop_str_in_output": Neutral(values=(False,), instead="the text ends before it"),
    "skip_special_tokens": Neutral(values=(True,), instead="/v1/chat/completions has it"),
    "structured_outputs": Neutral(instead="send text.format, or use /v1/chat/completions"),
    "priority": Neutral(values=(0,), instead="send tier"),
    "request_id": Neutral(instead="send the header x-request-id"),
    "logits_processors": Neutral(values=([],), instead=NO_EXTENSIONS),
}
"""max_tool_calls bounds tools that the server runs; kvrelay runs none."""


class PromptFields(StrictPart):
    """What decides the prompt."""

    input: Input
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: list[ToolBody] | None = None
    tool_choice: ChoiceBody | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    truncation: Literal["auto", "disabled"] | None = None
    """No prompt is truncated: one that is too long is refused."""
    chat_template_kwargs: JsonObject | None = None
    """From vLLM: further variables of the chat template."""


class ResponsesBody(PromptFields, AskingBody):
    max_output_tokens: int | None = Field(default=None, ge=1)
    """What exceeds the model's context is cut."""
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    """From vLLM, as the seven before it."""
    seed: int | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    include: list[Include] | None = None
    neutral: ClassVar[Mapping[str, Neutral]] = RESPONSES_NEUTRAL


class InputTokensBody(PromptFields, AskingBody):
    neutral: ClassVar[Mapping[str, Neutral]] = {
        "conversation": Neutral(instead=NO_CONVERSATION),
        "personality": Neutral(instead="ask for it in the instructions"),
    }
