"""Every field of OpenAI's and vLLM's requests, and what becomes of it. Prints the page's table:

python -m tests.request_fields
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from openai.types import completion_create_params as completions_params
from openai.types.chat import completion_create_params as chat_params
from pydantic import BaseModel

from router.http.bodies import ChatBody, CompletionBody
from router.http.neutral_fields import ANYTHING, CHAT_NEUTRAL, COMPLETION_NEUTRAL, Neutral

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
NOT_THERE = "-"


def theirs(kind: str) -> set[str]:
    """Of a path: the fields that others document."""
    return OPENAI[kind] | {"stream"} | {*VLLM[kind], *VLLM["earlier"]}


def fate(kind: str, name: str) -> str:
    """What becomes of a field, in a few words."""
    if name in BODIES[kind].model_fields:
        return "accepted"
    neutral = NEUTRAL[kind].get(name)
    if neutral is None:
        return NOT_THERE
    if neutral is ANYTHING:
        return "ignored"
    values = ", ".join(f"`{json.dumps(value)}`" for value in (*neutral.values, None))
    return f"only {values}: {neutral.instead}"


def rows() -> list[tuple[str, str, str]]:
    """# field, at completions, at chat"""
    names = {name for kind in PATHS for name in (*theirs(kind), *BODIES[kind].model_fields)}
    return [(name, fate("completions", name), fate("chat", name)) for name in sorted(names)]


def table() -> str:
    lines = ["| field | `/v1/completions` | `/v1/chat/completions` |", "|---|---|---|"]
    for name, completions, chat in rows():
        lines.append(
            f"| `{name}` | {completions} | {'the same' if chat == completions else chat} |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(table())
