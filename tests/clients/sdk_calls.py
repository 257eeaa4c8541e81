"""What programs with agent SDKs do: a tool, a structured answer, streamed and not, all else at its
default. Runs in the environment of the SDKs: python sdk_calls.py URL SDK. Prints one line of JSON
for each call: its name, and what went wrong or null.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable, Iterable
from importlib.metadata import version
from typing import Any, Literal

MODEL = os.environ.get("CLIENTS_MODEL", "m")
QUESTION = "Which city is it?"
KEY = "none"
Call = Callable[[], Any]


City = Literal["Paris", "Rome"]
"""So that whatever a tiny model says in it is short."""


def weather(city: City) -> str:
    """The weather of a city."""
    return f"sunny in {city}"


TOOL_SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}


def openai(url: str) -> dict[str, Call]:
    from openai import OpenAI
    from pydantic import BaseModel

    class Answer(BaseModel):
        city: City

    client = OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0)
    messages: Any = [{"role": "user", "content": QUESTION}]
    function = {"name": "weather", "parameters": TOOL_SCHEMA}
    chat: Any = {"model": MODEL, "messages": messages}
    once: Any = {"tool_choice": "required", "parallel_tool_calls": False}
    tools: Any = {"tools": [{"type": "function", "function": function}], **once}
    responses: Any = {"model": MODEL, "input": QUESTION}
    flat: Any = {"tools": [{"type": "function", **function}], **once}

    def completion(**options: Any) -> Any:
        return client.completions.create(model=MODEL, prompt="It was", max_tokens=8, **options)

    def chat_tools() -> None:
        said = client.chat.completions.create(**chat, **tools).choices[0].message
        (call, *_) = said.tool_calls
        assert json.loads(call.function.arguments)["city"] in ("Paris", "Rome")
        answered = {"role": "tool", "tool_call_id": call.id, "content": weather("Rome")}
        client.chat.completions.create(model=MODEL, messages=[*messages, said, answered])

    def chat_tools_streamed() -> None:
        with client.chat.completions.stream(**chat, **tools) as stream:
            (call, *_) = stream.get_final_completion().choices[0].message.tool_calls
        assert json.loads(call.function.arguments)["city"] in ("Paris", "Rome")

    def chat_parse() -> None:
        parsed = client.chat.completions.parse(**chat, response_format=Answer)
        assert parsed.choices[0].message.parsed.city in ("Paris", "Rome")

    def chat_parse_streamed() -> None:
        with client.chat.completions.stream(**chat, response_format=Answer) as stream:
            parsed = stream.get_final_completion()
        assert parsed.choices[0].message.parsed.city in ("Paris", "Rome")

    def responses_again() -> None:
        first = client.responses.create(**responses)
        assert first.output_text
        client.responses.create(model=MODEL, input="And then?", previous_response_id=first.id)

    def responses_tools() -> None:
        answer = client.responses.create(**responses, **flat)
        (call, *_) = [item for item in answer.output if item.type == "function_call"]
        assert json.loads(call.arguments)["city"] in ("Paris", "Rome")

    def responses_tools_streamed() -> None:
        with client.responses.stream(**responses, **flat) as stream:
            kinds = {event.type for event in stream}
        assert "response.function_call_arguments.delta" in kinds

    def responses_parse() -> None:
        assert client.responses.parse(**responses, text_format=Answer).output_parsed is not None

    def responses_streamed() -> None:
        with client.responses.stream(**responses) as stream:
            assert stream.get_final_response().output_text

    return {
        "completions": lambda: _text(completion().choices[0].text),
        "completions, streamed": lambda: _some(completion(stream=True)),
        "chat": lambda: _text(client.chat.completions.create(**chat).choices[0].message.content),
        "chat, streamed": lambda: _some(client.chat.completions.create(**chat, stream=True)),
        "chat, tools": chat_tools,
        "chat, tools, streamed": chat_tools_streamed,
        "chat, structured": chat_parse,
        "chat, structured, streamed": chat_parse_streamed,
        "responses": responses_again,
        "responses, streamed": responses_streamed,
        "responses, tools": responses_tools,
        "responses, tools, streamed": responses_tools_streamed,
        "responses, structured": responses_parse,
    }


def anthropic(url: str) -> dict[str, Call]:
    from anthropic import Anthropic

    client = Anthropic(base_url=url, api_key=KEY, max_retries=0)
    messages: Any = [{"role": "user", "content": QUESTION}]
    plain: Any = {"model": MODEL, "max_tokens": 256, "messages": messages}
    tool: Any = {"name": "weather", "input_schema": TOOL_SCHEMA}
    tools: Any = {
        "tools": [tool],
        "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
    }

    def with_tools() -> None:
        said = client.messages.create(**plain, **tools)
        (call, *_) = [block for block in said.content if block.type == "tool_use"]
        assert call.input["city"] in ("Paris", "Rome")
        result = {"type": "tool_result", "tool_use_id": call.id, "content": weather("Rome")}
        turns = [
            {"role": "assistant", "content": said.content},
            {"role": "user", "content": [result]},
        ]
        client.messages.create(**{**plain, "messages": [*messages, *turns]}, tools=[tool])

    def with_tools_streamed() -> None:
        with client.messages.stream(**plain, **tools) as stream:
            (call, *_) = [b for b in stream.get_final_message().content if b.type == "tool_use"]
        assert call.input["city"] in ("Paris", "Rome")

    def streamed() -> None:
        with client.messages.stream(**plain) as stream:
            assert "".join(stream.text_stream)

    return {
        "messages": lambda: _text(client.messages.create(**plain).content[0].text),
        "messages, streamed": streamed,
        "messages, tools": with_tools,
        "messages, tools, streamed": with_tools_streamed,
        "count_tokens": lambda: _text(
            client.messages.count_tokens(model=MODEL, messages=messages).input_tokens
        ),
    }


def _text(answer: object) -> None:
    assert answer


def _some(chunks: Iterable[object]) -> None:
    assert list(chunks)


def openai_agents(url: str) -> dict[str, Call]:
    from agents import (
        Agent,
        OpenAIChatCompletionsModel,
        OpenAIResponsesModel,
        Runner,
        function_tool,
        set_tracing_disabled,
    )
    from openai import AsyncOpenAI
    from pydantic import BaseModel

    class Answer(BaseModel):
        city: City

    set_tracing_disabled(True)
    kinds = {"chat": OpenAIChatCompletionsModel, "responses": OpenAIResponsesModel}

    def agent(kind: str, **options: Any) -> Any:
        client = AsyncOpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0)
        model = kinds[kind](MODEL, client)
        return Agent(name="a", instructions="Answer.", model=model, **options)

    def run(kind: str, **options: Any) -> Any:
        return Runner.run_sync(agent(kind, **options), QUESTION, max_turns=4)

    async def stream(kind: str, **options: Any) -> None:
        run = Runner.run_streamed(agent(kind, **options), QUESTION, max_turns=4)
        async for _ in run.stream_events():
            pass

    tools = [function_tool(weather)]
    calls: dict[str, Call] = {}
    for kind in kinds:
        calls |= {
            f"{kind}, tools": lambda kind=kind: run(kind, tools=tools),
            f"{kind}, structured": lambda kind=kind: run(kind, output_type=Answer),
            f"{kind}, tools, streamed": lambda kind=kind: asyncio.run(stream(kind, tools=tools)),
        }
    return calls


def langchain_openai(url: str) -> dict[str, Call]:
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_openai import ChatOpenAI
    from pydantic import BaseModel

    class Answer(BaseModel):
        """An answer."""

        city: City

    def model(**options: Any) -> Any:
        return ChatOpenAI(base_url=f"{url}/v1", api_key=KEY, model=MODEL, max_retries=0, **options)

    def tools(**options: Any) -> None:
        bound = model(**options).bind_tools([weather])
        said: list[Any] = [HumanMessage(QUESTION)]
        answer = bound.invoke(said)
        said.append(answer)
        said += [ToolMessage("sunny", tool_call_id=call["id"]) for call in answer.tool_calls]
        bound.invoke(said)

    def stream(**options: Any) -> None:
        for _ in model(**options).bind_tools([weather]).stream(QUESTION):
            pass

    calls: dict[str, Call] = {}
    for kind, options in {"chat": {}, "responses": {"use_responses_api": True}}.items():
        calls |= {
            f"{kind}, tools": lambda o=options: tools(**o),
            f"{kind}, structured": lambda o=options: (
                model(**o).with_structured_output(Answer).invoke(QUESTION)
            ),
            f"{kind}, tools, streamed": lambda o=options: stream(**o),
        }
    return calls


def litellm(url: str) -> dict[str, Call]:
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
    import litellm as lite
    from pydantic import BaseModel

    class Answer(BaseModel):
        city: City

    function = {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": TOOL_SCHEMA,
    }
    tools = [{"type": "function", "function": function}]
    messages = [{"role": "user", "content": QUESTION}]
    bases = {"openai": f"{url}/v1", "hosted_vllm": f"{url}/v1", "anthropic": url}

    def complete(provider: str, **options: Any) -> Any:
        return lite.completion(
            model=f"{provider}/{MODEL}",
            api_base=bases[provider],
            api_key=KEY,
            messages=messages,
            **options,
        )

    calls: dict[str, Call] = {}
    for provider in bases:
        calls |= {
            f"{provider}, tools": lambda p=provider: complete(p, tools=tools),
            f"{provider}, structured": lambda p=provider: complete(p, response_format=Answer),
            f"{provider}, tools, streamed": lambda p=provider: list(
                complete(p, tools=tools, stream=True)
            ),
        }
    return calls


def pydantic_ai(url: str) -> dict[str, Call]:
    from pydantic import BaseModel
    from pydantic_ai import Agent, NativeOutput
    from pydantic_ai.models.anthropic import AnthropicModel
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.anthropic import AnthropicProvider
    from pydantic_ai.providers.openai import OpenAIProvider

    class Answer(BaseModel):
        city: City

    def agent(kind: str, **options: Any) -> Any:
        openai = OpenAIProvider(base_url=f"{url}/v1", api_key=KEY)
        makers: dict[str, Callable[[], Any]] = {
            "chat": lambda: OpenAIChatModel(MODEL, provider=openai),
            "responses": lambda: OpenAIResponsesModel(MODEL, provider=openai),
            "messages": lambda: AnthropicModel(
                MODEL, provider=AnthropicProvider(api_key=KEY, base_url=url)
            ),
        }
        return Agent(makers[kind](), **options)

    async def stream(kind: str) -> None:
        async with agent(kind, tools=[weather]).run_stream(QUESTION) as run:
            async for _ in run.stream_text():
                pass

    calls: dict[str, Call] = {}
    for kind in ("chat", "responses", "messages"):
        calls |= {
            f"{kind}, tools": lambda k=kind: agent(k, tools=[weather]).run_sync(QUESTION),
            f"{kind}, output tool": lambda k=kind: agent(k, output_type=Answer).run_sync(QUESTION),
            f"{kind}, tools, streamed": lambda k=kind: asyncio.run(stream(k)),
        }
        if kind != "messages":
            calls[f"{kind}, structured"] = lambda k=kind: agent(
                k, output_type=NativeOutput(Answer)
            ).run_sync(QUESTION)
    return calls


SDKS: dict[str, Callable[[str], dict[str, Call]]] = {
    "openai": openai,
    "anthropic": anthropic,
    "openai-agents": openai_agents,
    "langchain-openai": langchain_openai,
    "litellm": litellm,
    "pydantic-ai-slim": pydantic_ai,
}


def main(url: str, sdk: str) -> None:
    for name, call in SDKS[sdk](url).items():
        try:
            call()
            error = None
        except Exception as caught:
            error = f"{type(caught).__name__}: {caught}"[:600]
        print(json.dumps({"sdk": sdk, "version": version(sdk), "call": name, "error": error}))
        sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
