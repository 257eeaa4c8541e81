"""Agent SDKs and a model that calls their tools: a server over scripted answers, which a random
model would not give."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import uvloop

from router.core.state.generation import GenerationRequest
from router.text.tokenizer import TextTokenizer
from tests.clients.environments import SDK_ENVIRONMENT, NotInstalled, python_of
from tests.clients.sdk_calls import SDKS
from tests.integration.agents_kit import agent_folder as agent_folder
from tests.integration.faces_kit import MODEL, served
from tests.unit.fake_dispatcher import FACTS, FakeDispatcher

pytestmark = [pytest.mark.clients, pytest.mark.timeout(1800)]
CALLS = Path(__file__).with_name("sdk_calls.py")
ANSWER = '{"city": "Rome"}'
OF_TOOL = "sunny"
"""What the tool of `sdk_calls` says."""


def answers(folder: Path) -> FakeDispatcher:
    """Calls the tool `weather` once, then one that takes the structured answer; else writes it."""
    tokenizer = TextTokenizer.load(folder)

    def script(request: GenerationRequest, _: int) -> Sequence[int]:
        prompt = tokenizer.decode(request.prompt_ids)
        tools = ["final_result", "Answer"]
        if OF_TOOL not in prompt:
            tools.insert(0, "weather")
        call = next((f'{{"name": "{one}", ' for one in tools if f'"{one}"' in prompt), None)
        said = ANSWER if call is None else f'<tool_call>{call}"arguments": {ANSWER}}}</tool_call>'
        return (*tokenizer.encode(said, add_special_tokens=False), 0)

    dispatcher = FakeDispatcher(facts=replace(FACTS, max_model_len=4096))
    dispatcher.script = script
    return dispatcher


@pytest.mark.parametrize("sdk", SDKS)
def test_every_call_of_an_sdk_succeeds(sdk: str, folder: Path) -> None:
    try:
        python = python_of(SDK_ENVIRONMENT)
    except NotInstalled as error:
        pytest.skip(str(error))

    async def told() -> list[dict[str, str | None]]:
        async with served(folder, answers(folder)) as s:
            done = await asyncio.to_thread(
                subprocess.run,
                [python, CALLS, s.url, sdk],
                stdout=subprocess.PIPE,
                text=True,
                env=os.environ | {"CLIENTS_MODEL": MODEL},
            )
        assert done.returncode == 0
        return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]

    calls = uvloop.run(told())
    assert {one["call"]: one["error"] for one in calls if one["error"]} == {}
    assert len(calls) >= 5
