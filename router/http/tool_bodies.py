"""Tools, the choice among them, and calls, as OpenAI's chat completions have them."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class FunctionBody(Strict):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """A JSON schema."""
    strict: bool | None = None


class ToolBody(BaseModel):
    """Tools of other types have other fields; they are refused by their type."""

    model_config = ConfigDict(extra="allow", strict=True)

    type: str = "function"
    function: FunctionBody | None = None


class NameBody(Strict):
    name: str


class AllowedToolBody(Strict):
    type: str = "function"
    function: NameBody


class AllowedToolsBody(Strict):
    mode: str
    tools: list[AllowedToolBody]


class ToolChoiceBody(Strict):
    """{"type": "function", "function": ...} or {"type": "allowed_tools", "allowed_tools": ...}"""

    type: str
    function: NameBody | None = None
    allowed_tools: AllowedToolsBody | None = None


class CalledBody(Strict):
    name: str
    arguments: str = ""
    """JSON."""


class ToolCallBody(Strict):
    """A call that is sent back; `index` is left over from a stream."""

    id: str
    type: str = "function"
    function: CalledBody
    index: int | None = Field(default=None)
