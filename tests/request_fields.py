"""Every field of OpenAI's and vLLM's requests for completions, and what becomes of it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from openai.types import completion_create_params as completions_params
from openai.types.chat import completion_create_params as chat_params
from pydantic import BaseModel

from router.http.bodies import ChatBody, CompletionBody
from router.http.neutral_fields import CHAT_NEUTRAL, COMPLETION_NEUTRAL, Neutral

VLLM = json.loads((Path(__file__).parent / "data" / "vllm_request_fields.json").read_text())
PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
BODIES: Mapping[str, type[BaseModel]] = {"completions": CompletionBody, "chat": ChatBody}
NEUTRAL: Mapping[str, Mapping[str, Neutral]] = {
    "completions": COMPLETION_NEUTRAL,
    "chat": CHAT_NEUTRAL,
}
OPENAI = {
    "completions": set(completions_params.CompletionCreateParamsBase.__annotations__),
    "chat": set(chat_params.CompletionCreateParamsBase.__annotations__),
}


def theirs(kind: str) -> set[str]:
    """Of a path: the fields that others document."""
    return OPENAI[kind] | {"stream"} | {*VLLM[kind], *VLLM["earlier"]}


def is_known(kind: str, name: str) -> bool:
    return name in BODIES[kind].model_fields or name in NEUTRAL[kind]
