"""Field by field, what becomes of the requests of OpenAI, vLLM and Anthropic. Writes
docs/compatibility.md:

python -m tests.compatibility
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from anthropic.types import message_count_tokens_params, message_create_params
from openai.types.responses import response_create_params
from pydantic import BaseModel

from router.http.messages.bodies import CountTokensBody, MessagesBody
from router.http.neutral_fields import ANYTHING, Neutral
from router.http.responses.bodies import ResponsesBody
from tests.request_fields import BODIES, NEUTRAL, OPENAI, VLLM

TESTS = Path(__file__).parent
PAGE = TESTS.parent / "docs" / "compatibility.md"
SENT = json.loads((TESTS / "data" / "sdk_requests.json").read_text())
"""SDK |-> its version, and the requests that it sends when all is at its default"""


class State(StrEnum):
    WORKS = "works"
    IGNORED = "ignored"
    NEUTRAL = "neutral values only"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call: its body here, and the names that others document for it."""

    path: str
    body: type[BaseModel]
    neutral: Mapping[str, Neutral]
    theirs: Mapping[str, frozenset[str]]
    """# whose |-> names"""

    @property
    def ours(self) -> set[str]:
        return {field.alias or name for name, field in self.body.model_fields.items()}

    @property
    def names(self) -> list[str]:
        return sorted(self.ours.union(*self.theirs.values()))

    def state(self, name: str) -> State:
        neutral = self.neutral.get(name)
        if name in self.ours:
            return State.WORKS
        if neutral is None:
            return State.REFUSED
        if neutral is ANYTHING:
            return State.IGNORED
        return State.NEUTRAL if neutral.values else State.REFUSED

    def detail(self, name: str) -> str:
        neutral = self.neutral.get(name)
        match self.state(name):
            case State.WORKS:
                return NOTES.get((self.path, name), NOTES.get(("", name), ""))
            case State.IGNORED:
                return "no value changes the answer"
            case State.NEUTRAL:
                assert neutral is not None
                return f"{_values(neutral)}; {neutral.instead}"
            case State.REFUSED:
                return neutral.instead if neutral else "an unknown field"

    def whose(self, name: str) -> str:
        found = [whose for whose, names in self.theirs.items() if name in names]
        return ", ".join(found) or "kvrelay"


def _values(neutral: Neutral) -> str:
    return " or ".join(f"`{json.dumps(value)}`" for value in neutral.values)


def _annotated(*kinds: Any) -> frozenset[str]:
    return frozenset(name for kind in kinds for name in kind.__annotations__)


_RESPONSES = (
    response_create_params.ResponseCreateParamsBase,
    response_create_params.ResponseCreateParamsStreaming,
)
_MESSAGES = (
    message_create_params.MessageCreateParamsBase,
    message_create_params.MessageCreateParamsStreaming,
)
_COUNTING = (message_count_tokens_params.MessageCountTokensParams,)
_EARLIER = frozenset(VLLM["earlier"])
CALLS: Mapping[str, Call] = {
    "completions": Call(
        path="/v1/completions",
        body=BODIES["completions"],
        neutral=NEUTRAL["completions"],
        theirs={
            "OpenAI": frozenset(OPENAI["completions"]),
            "vLLM": frozenset(VLLM["completions"]) | _EARLIER,
        },
    ),
    "chat": Call(
        path="/v1/chat/completions",
        body=BODIES["chat"],
        neutral=NEUTRAL["chat"],
        theirs={
            "OpenAI": frozenset(OPENAI["chat"]),
            "vLLM": frozenset(VLLM["chat"]) | _EARLIER - {"best_of"},
        },
    ),
    "responses": Call(
        path="/v1/responses",
        body=ResponsesBody,
        neutral=ResponsesBody.neutral,
        theirs={"OpenAI": _annotated(*_RESPONSES), "vLLM": frozenset(VLLM["responses"])},
    ),
    "messages": Call(
        path="/v1/messages",
        body=MessagesBody,
        neutral=MessagesBody.neutral,
        theirs={"Anthropic": _annotated(*_MESSAGES), "vLLM": frozenset(VLLM["messages"])},
    ),
    "count_tokens": Call(
        path="/v1/messages/count_tokens",
        body=CountTokensBody,
        neutral=CountTokensBody.neutral,
        theirs={"Anthropic": _annotated(*_COUNTING), "vLLM": frozenset(VLLM["count_tokens"])},
    ),
}
NOTES: Mapping[tuple[str, str], str] = {
    ("/v1/responses", "truncation"): "a prompt that is too long is refused, also with `auto`",
    ("/v1/responses", "include"): "but for `message.output_text.logprobs`",
    ("", "cache_salt"): "with API keys it divides the cache within their tenant",
    ("", "continuation"): "a stream that lost its router",
    ("", "max_completion_tokens"): "wins over `max_tokens`",
    ("", "metadata"): "comes back in the answer",
    ("", "tier"): "the QoS tier",
}
"""(path, or all if empty; field) |-> what there is to say"""

HEAD = """\
# Compatibility

What becomes of each field of a request. The names are those of OpenAI's and Anthropic's Python
packages and of vLLM's request models. `null` always means: not given. kvrelay's own fields are
listed too.

| state | what it means |
|---|---|
| works | the field has its effect |
| ignored | any value is accepted, because none would change the answer |
| neutral values only | these values and `null`; any other is a 400 that says what follows |
| refused | a 400 that names the field and says what follows; only `null` is accepted |

A field that is not listed is a 400 too: nothing that would change an answer is dropped silently. A
test compares this page with what the server accepts. `python -m tests.compatibility` writes it.
"""


def fields_sent(path: str) -> dict[str, set[str]]:
    """# SDK |-> the fields that it sends to a path"""
    sent = {
        sdk: {
            name
            for one in told["requests"]
            if one["path"] == path
            for name, value in one["body"].items()
            if value is not None
        }
        for sdk, told in SENT.items()
    }
    return {sdk: names for sdk, names in sent.items() if names}


def page() -> str:
    return "\n".join([HEAD, *_calls(), *_sdks()])


def _calls() -> Iterator[str]:
    for call in CALLS.values():
        yield f"## POST {call.path}\n"
        yield "| field | of | state | |"
        yield "|---|---|---|---|"
        for name in call.names:
            detail = call.detail(name)
            yield f"| `{name}` | {call.whose(name)} | {call.state(name)} | {detail} |"
        yield ""


def _sdks() -> Iterator[str]:
    yield "## What agent SDKs send\n"
    yield (
        "With a tool, with a structured answer, streamed and not, and all else at its default; "
        "recorded from the unmodified\npackages (`tests/clients`). No such field is refused, and "
        "a test sends each recorded request.\n"
    )
    yield "| SDK | call | fields |"
    yield "|---|---|---|"
    for sdk, told in SENT.items():
        for call in CALLS.values():
            if names := fields_sent(call.path).get(sdk):
                listed = ", ".join(f"`{name}`" for name in sorted(names))
                yield f"| {sdk} {told['version']} | `{call.path}` | {listed} |"
    yield ""


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
