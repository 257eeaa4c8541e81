"""Answers in each format, cut anywhere. The examples are ours; each follows the public source that
it names."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.chat.formats.choice import REASONING_FORMATS, TOOL_FORMATS
from router.chat.formats.plain import PlainMachine
from router.chat.formats.thinking import Begins, ThinkingMachine
from router.chat.values.events import ToolCall
from tests.unit.chat_kit import NOW, assert_any_cut, reading, turn_of


@dataclass(frozen=True, kw_only=True)
class Example:
    name: str
    format: str
    text: str
    content: str = ""
    reasoning: str = ""
    calls: list[tuple[str, object]] = field(default_factory=list)


PARIS = {"city": "Paris", "days": 3}

EXAMPLES = (
    # https://github.com/NousResearch/Hermes-Function-Calling, README, "Prompt Format for Function
    # Calling"; https://qwen.readthedocs.io/en/latest/framework/function_call.html
    Example(
        name="one call",
        format="hermes",
        text='<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}\n'
        "</tool_call>",
        calls=[("get_weather", PARIS)],
    ),
    Example(
        name="content, then two calls",
        format="hermes",
        text="I look both up.\n\n<tool_call>\n"
        '{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}\n</tool_call>\n'
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>\n',
        content="I look both up.",
        calls=[("get_weather", PARIS), ("now", {})],
    ),
    Example(
        name="arguments before the name",
        format="hermes",
        text='<tool_call>{"arguments": {"city": "Paris", "days": 3}, "name": "get_weather"}'
        "</tool_call>",
        calls=[("get_weather", PARIS)],
    ),
    Example(
        name="braces, quotes and marks within strings",
        format="hermes",
        text='<tool_call>{"name": "write_file", "arguments": {"path": "a}\\"{</tool_call>", '
        '"lines": ["\\\\", "é😀"]}}</tool_call> Done.',
        content="Done.",
        calls=[("write_file", {"path": 'a}"{</tool_call>', "lines": ["\\", "é😀"]})],
    ),
    Example(
        name="arguments in a string, and none at all",
        format="hermes",
        text='<tool_call>{"name": "get_weather", "arguments": "{\\"city\\": \\"Rome\\"}"}'
        '</tool_call><tool_call>{"name": "now"}</tool_call>',
        calls=[("get_weather", {"city": "Rome"}), ("now", {})],
    ),
    Example(
        name="a brace too many, and no end",
        format="hermes",
        text='<tool_call>\n{"name": "now", "arguments": {}}}\n</tool_call>\n'
        '<tool_call>\n{"name": "now", "arguments": {}}\n<tool_call>\n{"name": "now", '
        '"arguments": {}}',
        calls=[("now", {})] * 3,
    ),
    Example(
        name="no JSON",
        format="hermes",
        text="a <tool_call>now()</tool_call> b <tool_call>{}</tool_call>",
        content="a <tool_call>now()</tool_call> b <tool_call>{}</tool_call>",
    ),
    Example(
        name="a tool that isn't on offer",
        format="hermes",
        text='<tool_call>{"name": "rm", "arguments": {"x": null}}</tool_call>',
        calls=[("rm", {"x": None})],
    ),
    Example(
        name="a mark that isn't",
        format="hermes",
        text="if a <tool and b <tool_ then ",
        content="if a <tool and b <tool_ then ",
    ),
    # https://github.com/meta-llama/llama-models/blob/main/models/llama3_1/prompt_format.md and
    # .../llama3_2/text_prompt_format.md
    Example(
        name="bare JSON",
        format="llama3",
        text='{"name": "get_weather", "parameters": {"city": "Paris", "days": 3}}',
        calls=[("get_weather", PARIS)],
    ),
    Example(
        name="with a type",
        format="llama3",
        text='{"type": "function", "name": "get_weather", "parameters": {"city": "Paris", '
        '"days": 3}}',
        calls=[("get_weather", PARIS)],
    ),
    Example(
        name="tagged, several",
        format="llama3",
        text='<|python_tag|>{"name": "now", "parameters": {}}; {"name": "get_weather", '
        '"parameters": {"city": "Paris", "days": 3}}',
        calls=[("now", {}), ("get_weather", PARIS)],
    ),
    Example(
        name="JSON that is an answer",
        format="llama3",
        text='{"name": "Ada", "parameters": {"born": 1815}}',
        content='{"name": "Ada", "parameters": {"born": 1815}}',
    ),
    Example(
        name="JSON of other keys",
        format="llama3",
        text='{"answer": {"name": "now"}}',
        content='{"answer": {"name": "now"}}',
    ),
    Example(
        name="a built-in tool, which isn't offered",
        format="llama3",
        text='<|python_tag|>brave_search.call(query="x")',
        content='<|python_tag|>brave_search.call(query="x")',
    ),
    # https://docs.mistral.ai/capabilities/function_calling and the tokenizers v3 and v11 of
    # https://github.com/mistralai/mistral-common
    Example(
        name="a list",
        format="mistral",
        text='[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}, '
        '{"name": "now", "arguments": {}, "id": "abcdefghi"}]',
        calls=[("get_weather", PARIS), ("now", {})],
    ),
    Example(
        name="names and arguments",
        format="mistral",
        text='Yes.[TOOL_CALLS]get_weather[ARGS]{"city": "Paris", "days": 3}'
        "[TOOL_CALLS]now[CALL_ID]abcdefghi[ARGS]{}",
        content="Yes.",
        calls=[("get_weather", PARIS), ("now", {})],
    ),
    Example(
        name="no mark between name and arguments",
        format="mistral",
        text='[TOOL_CALLS]get_weather{"city": "Paris", "days": 3}',
        calls=[("get_weather", PARIS)],
    ),
    Example(
        name="no call",
        format="mistral",
        text="[TOOL_CALLS] are what I make, {often}",
        content="[TOOL_CALLS] are what I make, {often}",
    ),
    # https://huggingface.co/Qwen/Qwen3-Coder-30B-A3B-Instruct, chat_template.jinja
    Example(
        name="text and numbers",
        format="qwen3-coder",
        text="Sure.\n<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n"
        "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>",
        content="Sure.",
        calls=[("get_weather", PARIS)],
    ),
    Example(
        name="lists, nulls, lines and quotes",
        format="qwen3-coder",
        text='<tool_call>\n<function=write_file>\n<parameter=path>\n\na "b"\n\n c\\d\n'
        '</parameter>\n<parameter=lines>\n["x",\n "y"]\n</parameter>\n<parameter=mode>\nnull\n'
        "</parameter>\n<parameter=any>\nTrue\n</parameter>\n</function>\n</tool_call>\n"
        "<tool_call>\n<function=now>\n</function>\n</tool_call>",
        calls=[
            (
                "write_file",
                {"path": '\na "b"\n\n c\\d', "lines": ["x", "y"], "mode": None, "any": True},
            ),
            ("now", {}),
        ],
    ),
    Example(
        name="a number where text is asked, text where a number is",
        format="qwen3-coder",
        text="<tool_call>\n<function=get_weather>\n<parameter=city>\n75\n</parameter>\n"
        "<parameter=days>\nthree\n</parameter>\n</function>\n</tool_call>",
        calls=[("get_weather", {"city": "75", "days": "three"})],
    ),
    Example(
        name="tags left out",
        format="qwen3-coder",
        text="<function=get_weather>\n<parameter=city>\nParis\n<parameter=days>\n3\n</function>\n"
        "<function=now>\n</tool_call> Bye",
        content="Bye",
        calls=[("get_weather", PARIS), ("now", {})],
    ),
    Example(
        name="the same parameter twice",
        format="qwen3-coder",
        text="<tool_call><function=now><parameter=a>1</parameter><parameter=a>2</parameter>"
        "</function></tool_call>",
        calls=[("now", {"a": 1})],
    ),
    Example(
        name="no function",
        format="qwen3-coder",
        text="<tool_call> of <function= and <function=a b> stay",
        content="<tool_call> of <function= and <function=a b> stay",
    ),
    # https://cookbook.openai.com/articles/openai-harmony, "Receiving tool calls", "Preambles"
    Example(
        name="reasoning, then a call",
        format="harmony",
        text="<|channel|>analysis<|message|>Need the weather.<|end|><|start|>assistant<|channel|>"
        "commentary to=functions.get_weather <|constrain|>json<|message|>"
        '{"city": "Paris", "days": 3}<|call|>',
        reasoning="Need the weather.",
        calls=[("get_weather", PARIS)],
    ),
    Example(
        name="the recipient before the channel, the stop token taken away",
        format="harmony",
        text=" to=functions.now<|channel|>commentary<|message|>{}",
        calls=[("now", {})],
    ),
    Example(
        name="an answer",
        format="harmony",
        text="<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final"
        "<|message|>It rains.",
        reasoning="Hm.",
        content="It rains.",
    ),
    Example(
        name="a preamble and two calls",
        format="harmony",
        text="<|channel|>commentary<|message|>I look it up.<|end|><|start|>assistant<|channel|>"
        "commentary to=functions.now<|message|>{}<|call|><|start|>assistant<|channel|>"
        'commentary to=functions.get_weather<|message|>{"city": "Paris", "days": 3}',
        content="I look it up.",
        calls=[("now", {}), ("get_weather", PARIS)],
    ),
    Example(
        name="a built-in tool, which isn't offered",
        format="harmony",
        text="<|channel|>analysis to=python <|message|>print(1)<|call|>",
        reasoning="print(1)",
    ),
    Example(name="no channel", format="harmony", text="Plain text.", content="Plain text."),
)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda one: f"{one.format}: {one.name}")
def test_an_example_is_read_wherever_it_is_cut(example: Example) -> None:
    turn = assert_any_cut(reading(example.format), example.text)
    calls = [(call.name, json.loads(call.arguments)) for call in turn.calls]
    assert calls == example.calls
    assert (turn.content, turn.reasoning) == (example.content, example.reasoning)
    assert [call.call_id for call in turn.calls] == [f"c{n}" for n in range(len(calls))]


@pytest.mark.parametrize("name", ["hermes", "llama3", "mistral", "qwen3-coder", "harmony"])
def test_arguments_are_told_as_they_come(name: str) -> None:
    begins = {
        "hermes": '<tool_call>{"name": "get_weather", "arguments": {"city": "Par',
        "llama3": '{"name": "get_weather", "parameters": {"city": "Par',
        "mistral": '[TOOL_CALLS]get_weather[ARGS]{"city": "Par',
        "qwen3-coder": "<tool_call><function=get_weather><parameter=city>Par",
        "harmony": '<|channel|>commentary to=functions.get_weather<|message|>{"city": "Par',
    }
    turn = turn_of(reading(name)(), [begins[name]])
    assert turn.calls == [ToolCall("c0", "get_weather", '{"city": "Par')]


# https://huggingface.co/deepseek-ai/DeepSeek-R1 and https://huggingface.co/Qwen/Qwen3-8B, "Usage
# recommendations" and chat templates; https://huggingface.co/mistralai/Magistral-Small-2507
@pytest.mark.parametrize(
    ("begins", "text", "reasoning", "content"),
    [
        (Begins.BEFORE, "<think>\nHm, \n\n2.\n</think>\n\nTwo.", "Hm, \n\n2.", "Two."),
        (Begins.BEFORE, "<think>\n\n</think>\n\nTwo.", "", "Two."),
        (Begins.BEFORE, "\nTwo <think>.", "", "\nTwo <think>."),
        (Begins.BEFORE, " <thin", "", " <thin"),
        (Begins.INSIDE, "Hm </thin\n</think>Two. ", "Hm </thin", "Two. "),
        (Begins.INSIDE, "<think>Hm</think>Two.", "Hm", "Two."),
        (Begins.INSIDE, "Never done", "Never done", ""),
        (Begins.BEHIND, "<think> is a tag", "", "<think> is a tag"),
    ],
)
def test_reasoning_is_told_apart(begins: Begins, text: str, reasoning: str, content: str) -> None:
    def new() -> ThinkingMachine:
        return ThinkingMachine(REASONING_FORMATS["think"], begins, PlainMachine())

    turn = assert_any_cut(new, text)
    assert (turn.reasoning, turn.content) == (reasoning, content)


def test_a_call_behind_reasoning() -> None:
    def new() -> ThinkingMachine:
        hermes = reading("hermes")()
        return ThinkingMachine(REASONING_FORMATS["think"], Begins.BEFORE, hermes)

    text = '<think>\nNow?\n</think>\n\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    turn = assert_any_cut(new, text)
    assert (turn.reasoning, turn.content) == ("Now?", "")
    assert turn.calls == [ToolCall("c0", NOW.name, "{}")]


PIECES = (
    *(
        "<tool_call>",
        "</tool_call>",
        "<function=now>",
        "<function=",
        "<parameter=a>",
        "</function>",
    ),
    *(
        "</parameter>",
        "[TOOL_CALLS]",
        "[ARGS]",
        "[CALL_ID]",
        "now",
        "<|python_tag|>",
        "<|channel|>",
    ),
    *("<|message|>", "<|start|>", "<|end|>", "<|call|>", "<|constrain|>", "final", "analysis"),
    *("to=functions.now", " ", "\n", "{", "}", "[", "]", ",", ":", '"', "\\", ";", "<", "é", "12"),
    *('"name"', '"arguments"', '{"name": "now", "arguments": {', '"parameters": {}', "<think>"),
    *("</think>", "[THINK]", "[/THINK]", "null", '{"name": "now", "parameters": {}}'),
)
WORDS = st.one_of(st.sampled_from(PIECES), st.text(max_size=4))


@pytest.mark.parametrize("name", TOOL_FORMATS)
@settings(max_examples=100, deadline=None)
@given(words=st.lists(WORDS, max_size=25), cuts=st.randoms(use_true_random=False))
def test_no_text_breaks_a_reader(name: str, words: list[str], cuts) -> None:  # type: ignore[no-untyped-def]
    text = "".join(words)
    new = reading(name)
    for begins in Begins:
        whole = turn_of(ThinkingMachine(REASONING_FORMATS["think"], begins, new()), [text])
        cut = turn_of(ThinkingMachine(REASONING_FORMATS["think"], begins, new()), list(text))
        assert cut == whole
    at = cuts.randint(0, len(text))
    assert turn_of(new(), [text[:at], text[at:]]) == turn_of(new(), [text])


@pytest.mark.parametrize("name", TOOL_FORMATS)
@settings(max_examples=100, deadline=None)
@given(text=st.text(alphabet=st.characters(exclude_characters="<[{", codec="utf-8")))
def test_text_without_marks_is_all_content(name: str, text: str) -> None:
    if text.lstrip().startswith("to="):
        return
    turn = turn_of(reading(name)(), list(text))
    assert (turn.content, turn.calls, turn.reasoning) == (text, [], "")


@pytest.mark.parametrize("name", TOOL_FORMATS)
@settings(max_examples=100, deadline=None)
@given(words=st.lists(WORDS, max_size=15))
def test_where_no_call_begins_no_text_is_lost(name: str, words: list[str]) -> None:
    """But for harmony's own marks, which are never content."""
    text = "".join(words)
    turn = turn_of(reading(name)(), [text])
    if not turn.calls and name != "harmony":
        assert turn.content == text


def test_arguments_too_deep_for_json_are_told_as_they_are() -> None:
    deep = "[" * 100_000
    turn = turn_of(reading("hermes")(), [f'<tool_call>{{"name": "now", "arguments": "{deep}"}}'])
    assert turn.calls[0].arguments == f'"{deep}"'
    coder = f"<function=write_file><parameter=any>{deep}</parameter></function>"
    assert json.loads(turn_of(reading("qwen3-coder")(), [coder]).calls[0].arguments) == {
        "any": deep
    }


def test_a_head_that_never_ends_is_read_in_no_time() -> None:
    """A pattern in which a letter fits two places would take years."""
    text = "[TOOL_CALLS]" + "a" + "[AAAA" * 100 + "!"
    assert turn_of(reading("mistral")(), list(text)).content == text


def test_values_that_json_lacks_are_text() -> None:
    coder = "<function=write_file><parameter=any>NaN</parameter></function>"
    assert json.loads(turn_of(reading("qwen3-coder")(), [coder]).calls[0].arguments) == {
        "any": "NaN"
    }
