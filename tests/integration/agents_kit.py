"""A model that thinks and calls tools: a chat template of hermes' kind, and scripted answers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import anthropic
import pytest

from router.text.tokenizer import TextTokenizer
from tests.integration.faces_kit import Served, served
from tests.tokenizer_fixture import byte_level
from tests.unit.fake_dispatcher import FACTS, FakeDispatcher

TEMPLATE = (
    "{% if tools %}<|system|>{% for tool in tools %}{{ tool | tojson }}{% endfor %}"
    "{{ eos_token }}{% endif %}"
    "{% for message in messages %}<|{{ message.role }}|>"
    "{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}"
    "{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}"
    "</tool_call>{% endfor %}{{ message.tool_call_id }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
    "{% endif %}{{ reasoning_effort }}"
)
THOUGHT = "It asks for two cities."
CALLS = (
    '<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>'
    '<tool_call>{"name": "weather", "arguments": {"city": "Oslo", "days": 2}}</tool_call>'
)
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module", name="folder")
def agent_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = byte_level(tmp_path_factory.mktemp("agent"), chat_template=TEMPLATE)
    (folder / "generation_config.json").write_text('{"eos_token_id": 0}')
    return folder


def saying(folder: Path, *answers: str) -> FakeDispatcher:
    """Answers in turn, each with an end token. The last one is said again and again."""
    tokenizer = TextTokenizer.load(folder)
    ids = [(*tokenizer.encode(text, add_special_tokens=False), 0) for text in answers]
    dispatcher = FakeDispatcher(facts=replace(FACTS, max_model_len=4096))
    dispatcher.script = lambda request, choice: ids[min(len(dispatcher.requests), len(ids)) - 1]
    return dispatcher


@asynccontextmanager
async def anthropic_client(served: Served) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic.AsyncAnthropic(
        base_url=served.url, api_key="none", max_retries=0
    ) as client:
        yield client


Prompt = Callable[[int], str]


@asynccontextmanager
async def agent(
    folder: Path, *answers: str, **options: Any
) -> AsyncIterator[tuple[Served, Prompt]]:
    """The servers, and the prompt of each request that came, as text."""
    dispatcher = saying(folder, *answers)
    tokenizer = TextTokenizer.load(folder)

    def prompt(number: int) -> str:
        ids = dispatcher.requests[number].prompt_ids
        return tokenizer.decode(ids, skip_special_tokens=False)

    async with served(folder, dispatcher, **options) as s:
        yield s, prompt
