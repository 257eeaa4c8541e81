"""Every field of the clients' types is served, neutral, or refused with advice: none is unknown."""

from __future__ import annotations

from typing import Any, get_args

import openai.types.responses as openai_types
import pytest
from anthropic import types as anthropic_types
from anthropic.types import beta as anthropic_beta
from anthropic.types import message_count_tokens_params, message_create_params
from anthropic.types.beta import message_create_params as beta_create_params
from openai.types.responses import (
    input_token_count_params,
    response_create_params,
    response_input_item_param,
    response_reasoning_item_param,
)
from openai.types.shared_params import Reasoning, ResponseFormatJSONObject, ResponseFormatText
from pydantic import BaseModel

from router.http.messages import bodies as messages
from router.http.parts.strict import StrictPart
from router.http.responses import bodies as responses

OURS_TO_THEIRS: list[tuple[type[StrictPart], tuple[Any, ...]]] = [
    (
        responses.ResponsesBody,
        (
            response_create_params.ResponseCreateParamsNonStreaming,
            response_create_params.ResponseCreateParamsStreaming,
        ),
    ),
    (responses.InputTokensBody, (input_token_count_params.InputTokenCountParams,)),
    (responses.InputText, (openai_types.ResponseInputTextParam,)),
    (responses.OutputText, (openai_types.ResponseOutputTextParam,)),
    (responses.Refusal, (openai_types.ResponseOutputRefusalParam,)),
    (
        responses.MessageItem,
        (
            openai_types.EasyInputMessageParam,
            response_input_item_param.Message,
            openai_types.ResponseOutputMessageParam,
        ),
    ),
    (responses.FunctionCall, (openai_types.ResponseFunctionToolCallParam,)),
    (responses.FunctionCallOutput, (response_input_item_param.FunctionCallOutput,)),
    (responses.ReasoningItem, (openai_types.ResponseReasoningItemParam,)),
    (responses.SummaryText, (response_reasoning_item_param.Summary,)),
    (responses.ReasoningText, (response_reasoning_item_param.Content,)),
    (responses.FunctionTool, (openai_types.FunctionToolParam,)),
    (responses.NamedFunction, (openai_types.ToolChoiceFunctionParam,)),
    (responses.AllowedTools, (openai_types.ToolChoiceAllowedParam,)),
    (responses.TextConfig, (openai_types.ResponseTextConfigParam,)),
    (responses.TextFormat, (ResponseFormatText,)),
    (responses.JsonObjectFormat, (ResponseFormatJSONObject,)),
    (responses.JsonSchemaFormat, (openai_types.ResponseFormatTextJSONSchemaConfigParam,)),
    (responses.ReasoningConfig, (Reasoning,)),
    (responses.StreamOptions, (response_create_params.StreamOptions,)),
    (
        messages.MessagesBody,
        (
            message_create_params.MessageCreateParamsNonStreaming,
            message_create_params.MessageCreateParamsStreaming,
            beta_create_params.MessageCreateParamsNonStreaming,
        ),
    ),
    (messages.CountTokensBody, (message_count_tokens_params.MessageCountTokensParams,)),
    (messages.TextBlock, (anthropic_types.TextBlockParam,)),
    (messages.ThinkingBlock, (anthropic_types.ThinkingBlockParam,)),
    (messages.RedactedThinking, (anthropic_types.RedactedThinkingBlockParam,)),
    (messages.ToolUseBlock, (anthropic_types.ToolUseBlockParam,)),
    (messages.ToolResult, (anthropic_types.ToolResultBlockParam,)),
    (
        messages.Message,
        (
            anthropic_types.UserMessageParam,
            anthropic_types.AssistantMessageParam,
            anthropic_types.SystemMessageParam,
        ),
    ),
    (messages.CustomTool, (anthropic_types.ToolParam, anthropic_beta.BetaToolParam)),
    (messages.AutoChoice, (anthropic_types.ToolChoiceAutoParam,)),
    (messages.AnyChoice, (anthropic_types.ToolChoiceAnyParam,)),
    (messages.ToolChoiceBody, (anthropic_types.ToolChoiceToolParam,)),
    (messages.NoChoice, (anthropic_types.ToolChoiceNoneParam,)),
    (messages.ThinkingEnabled, (anthropic_types.ThinkingConfigEnabledParam,)),
    (messages.ThinkingAdaptive, (anthropic_types.ThinkingConfigAdaptiveParam,)),
    (messages.ThinkingDisabled, (anthropic_types.ThinkingConfigDisabledParam,)),
    (
        messages.OutputConfig,
        (anthropic_types.OutputConfigParam, anthropic_beta.BetaOutputConfigParam),
    ),
    (messages.JsonFormat, (anthropic_types.JSONOutputFormatParam,)),
    (messages.ContextManagement, (anthropic_beta.BetaContextManagementConfigParam,)),
    (messages.ClearThinking, (anthropic_beta.BetaClearThinking20251015EditParam,)),
]
NOT_IN_BODIES = {"betas"}
"""The client sends it as a header."""


def named(model: type[BaseModel]) -> set[str]:
    return {field.alias or name for name, field in model.model_fields.items()}


@pytest.mark.parametrize(
    ("ours", "theirs"), OURS_TO_THEIRS, ids=[ours.__name__ for ours, _ in OURS_TO_THEIRS]
)
def test_every_field_is_known(ours: type[StrictPart], theirs: tuple[Any, ...]) -> None:
    fields = {name for kind in theirs for name in kind.__annotations__} - NOT_IN_BODIES
    assert len(fields) > 0
    assert fields - named(ours) - ours.neutral.keys() == set()


def test_what_is_neutral_is_no_field_too() -> None:
    for ours, _ in OURS_TO_THEIRS:
        assert named(ours) & ours.neutral.keys() == set(), ours


def test_all_that_can_be_included_is_known() -> None:
    assert set(get_args(openai_types.ResponseIncludable)) == set(get_args(responses.Include))


def test_every_refusal_gives_advice() -> None:
    for ours, _ in OURS_TO_THEIRS:
        for name, neutral in ours.neutral.items():
            if not neutral.accepts(object()):
                assert neutral.instead, (ours, name)
