"""How much a model shall think, in the names that chat templates have for it. Pure."""

from __future__ import annotations

from typing import Any


def effort_kwargs(effort: str | None) -> dict[str, Any]:
    """Variables of the chat template: `enable_thinking` of Qwen3's kind, `reasoning_effort` of
    harmony's. None: the template decides."""
    if effort is None:
        return {}
    if effort == "none":
        return {"enable_thinking": False}
    return {"enable_thinking": True, "reasoning_effort": effort}
