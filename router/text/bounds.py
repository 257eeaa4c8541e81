"""What a client may send at most, whatever API it speaks. Pure. `docs/limits.md` has the table.

Each refusal names its bound. Bounds on bytes, headers and time are those of the listeners.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from kvrelay.errors import InvalidRequest

MAX_CHOICES = 128
"""`n` of one prompt."""
MAX_SEQUENCES = 256
"""Prompts of one call, times `n`."""
MAX_STOP_STRINGS = 16
MAX_STOP_BYTES = 1024
"""Of one stop string, in UTF-8."""
MAX_STOP_TOKEN_IDS = 256
MAX_LOGIT_BIAS_ENTRIES = 1024
MAX_MESSAGES = 4096
MAX_DEPTH = 64
"""Lists and objects within each other, in JSON that a request carries."""
MAX_CHARACTERS_PER_TOKEN = 32
"""A longer text is refused before it is tokenized: hardly a token stands for more characters."""
MAX_PROMPT_LOGPROBS = 1 << 17
"""Log probabilities of one prompt: its tokens, times the alternatives of each and itself."""


def check_count(param: str, count: int, most: int, unit: str) -> None:
    """Raises InvalidRequest."""
    if count > most:
        raise InvalidRequest(
            f"{param} has {count} {unit}, and at most {most} are allowed: send fewer", param=param
        )


def check_stops(stop: Sequence[str], stop_token_ids: Collection[int]) -> None:
    """Raises InvalidRequest."""
    check_count("stop", len(stop), MAX_STOP_STRINGS, "strings")
    check_count("stop_token_ids", len(stop_token_ids), MAX_STOP_TOKEN_IDS, "token ids")
    if "" in stop:
        raise InvalidRequest("stop must not hold an empty string", param="stop")
    for text in stop:
        size = len(text) if len(text) > MAX_STOP_BYTES else _bytes_of(text)
        if size > MAX_STOP_BYTES:
            raise InvalidRequest(
                f"stop has a string of {size} bytes, and at most {MAX_STOP_BYTES} are allowed: "
                "shorten it",
                param="stop",
            )


def _bytes_of(text: str) -> int:
    return len(text.encode("utf-8", "surrogatepass"))


def check_sequences(prompts: int, n: int | None) -> None:
    """Raises InvalidRequest."""
    if prompts * (n or 1) > MAX_SEQUENCES:
        raise InvalidRequest(
            f"{prompts} prompts times n are {prompts * (n or 1)} sequences, and at most "
            f"{MAX_SEQUENCES} are allowed in one call: send several calls",
            param="prompt" if prompts > MAX_SEQUENCES else "n",
        )


def check_characters(characters: int, max_model_len: int, param: str = "prompt") -> None:
    """Raises InvalidRequest for a text that can't fit into the model's context."""
    most = MAX_CHARACTERS_PER_TOKEN * max_model_len
    if characters > most:
        raise InvalidRequest(
            f"the prompt has {characters} characters, and at most {most} are allowed, "
            f"{MAX_CHARACTERS_PER_TOKEN} for each token of the model's context of {max_model_len} "
            "tokens: shorten the prompt",
            code="context_length_exceeded",
            param=param,
        )


def check_tokens(count: int, max_model_len: int, param: str) -> None:
    """Raises InvalidRequest for more tokens than the model's context."""
    if count > max_model_len:
        raise InvalidRequest(
            f"{param} has {count} token ids, and at most {max_model_len} are allowed, the model's "
            "context: send fewer",
            code="context_length_exceeded",
            param=param,
        )


def check_prompt_logprobs(prompt_tokens: int, top: int | None) -> None:
    """Raises InvalidRequest."""
    if top is not None and prompt_tokens * (top + 1) > MAX_PROMPT_LOGPROBS:
        raise InvalidRequest(
            f"{prompt_tokens} tokens of the prompt with {top} alternatives each are more than "
            f"{MAX_PROMPT_LOGPROBS} log probabilities: ask for fewer, or shorten the prompt",
            param="prompt_logprobs",
        )


def check_depth(value: object, param: str) -> None:
    """Raises InvalidRequest for JSON that is nested too deeply."""
    layer: list[Any] = [value]
    for _ in range(MAX_DEPTH + 1):
        layer = [inner for outer in layer for inner in _within(outer)]
        if not layer:
            return
    raise InvalidRequest(f"{param} is nested over {MAX_DEPTH} deep: send it flatter", param=param)


def _within(value: object) -> Collection[object]:
    match value:
        case Mapping():
            return value.values()
        case list() | tuple():
            return value
        case _:
            return ()
