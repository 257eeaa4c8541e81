"""A chat's form becomes a prompt and a grammar: formats found in templates, calls that the grammar
lets through, and that the reader of the format reads."""

from __future__ import annotations

import json
import random
from functools import cache, reduce
from pathlib import Path
from typing import Any

import pytest
from jsonschema import validate
from llguidance import LLMatcher, LLTokenizer
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask

from kvrelay.errors import InvalidRequest, ModelError
from router.chat.asking import chat_request
from router.chat.formats.choice import formats_of
from router.chat.reader import reader_of
from router.chat.values.events import AssistantTurn
from router.chat.values.form import ChatForm, Tool, ToolChoice, ToolUse
from router.live.metrics import RouterMetrics
from router.text.request import ChatPrompt, TextRequest
from router.text.sampling import GenerationDefaults, RequestedSampling
from router.text.service import TextService
from router.text.tokenizer import TextTokenizer
from tests.chat_checkpoints import FAMILIES, checkpoint_of
from tests.unit.chat_kit import NOW, WEATHER
from tests.unit.fake_dispatcher import FakeDispatcher

USER = {"role": "user", "content": "Hi"}
STRICT = Tool(
    name="light",
    parameters={
        "type": "object",
        "properties": {
            "room": {"enum": ["kitchen", "hall"]},
            "on": {"type": "boolean"},
            "levels": {"type": "array", "items": {"type": "integer"}, "maxItems": 2},
        },
        "required": ["room", "on", "levels"],
        "additionalProperties": False,
    },
    strict=True,
)
AUTO = ToolChoice()
REQUIRED = ToolChoice(use=ToolUse.REQUIRED)
ONE = ToolChoice(use=ToolUse.REQUIRED, parallel=False)

CHECKPOINTS: dict[str, Path] = {}


@pytest.fixture(scope="module", autouse=True)
def folders(tmp_path_factory: pytest.TempPathFactory) -> None:
    for name in FAMILIES:
        CHECKPOINTS[name] = checkpoint_of(name, tmp_path_factory.mktemp(name))


@cache
def service(name: str) -> TextService:
    tokenizer = TextTokenizer.load(CHECKPOINTS[name])
    return TextService(
        FakeDispatcher(),
        tokenizer,
        model_name="tiny",
        defaults=GenerationDefaults(),
        metrics=RouterMetrics("tiny"),
        formats=formats_of(tokenizer.tool_template),
    )


@cache
def token_tree(name: str) -> LLTokenizer:
    """Harmony's end of a message is not the end of an answer."""
    eos = service(name).tokenizer.special_token_id("<|return|>") or 0
    return LLTokenizer((CHECKPOINTS[name] / "tokenizer.json").read_text(), eos_token=[eos])


SCHEMA = '{"grammars":[{"json_schema":{"type":"object"}}]}'
DEEP = reduce(lambda inner, _: {"items": inner}, range(900), {"type": "object"})
LARGE = {"type": "object", "properties": {f"p{n}": {"enum": [n] * 100} for n in range(1000)}}


def form(*tools: Tool, choice: ToolChoice = AUTO, **more: Any) -> ChatForm:
    return ChatForm(messages=(USER,), tools=tools, choice=choice, **more)


def asked(name: str, chat: ChatForm, grammar: str = "") -> TextRequest:
    sampling = RequestedSampling(grammar=grammar)
    return chat_request(
        service(name), chat, TextRequest(request_id="x", prompt="", sampling=sampling)
    )


def rendered(name: str, chat: ChatForm) -> str:
    prompt = asked(name, chat).prompt
    assert isinstance(prompt, ChatPrompt)
    return service(name).tokenizer.render_chat(
        prompt.messages, tools=prompt.tools, template_kwargs=prompt.template_kwargs
    )


def matcher(name: str, grammar: str) -> LLMatcher:
    found = LLMatcher(token_tree(name), grammar, log_level=0)
    assert not found.is_error(), found.get_error()
    return found


def takes(name: str, chat: ChatForm, text: str, grammar: str = "") -> bool:
    """Whether the grammar lets the whole text through, and its end."""
    found = matcher(name, asked(name, chat, grammar).sampling.grammar)
    ids = list(service(name).tokenizer.encode(text, add_special_tokens=False))
    return found.try_consume_tokens(ids) == len(ids) and found.is_accepting()


# --- which format -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "tools", "reasoning"),
    [
        ("hermes", "hermes", None),
        ("thinking", "hermes", "think"),
        ("qwen3-coder", "qwen3-coder", None),
        ("llama3", "llama3", None),
        ("mistral", "mistral", None),
        ("mistral-list", "mistral-list", None),
        ("harmony", "harmony", None),
        ("r1", None, "think"),
    ],
)
def test_the_template_shows_the_format(name: str, tools: str | None, reasoning: str | None) -> None:
    formats = service(name).formats
    assert (formats.tools and formats.tools.name) == tools
    assert (formats.reasoning and formats.reasoning.name) == reasoning


def test_a_format_that_resembles_one_is_none() -> None:
    glm = "{% if tools %}<tool_call>{name}<arg_key>k</arg_key><arg_value>v</arg_value>{% endif %}"
    assert formats_of(glm).tools is None


def test_the_configuration_decides_over_the_template() -> None:
    named = formats_of(FAMILIES["hermes"].template, "llama3", "think")
    assert named.tools is not None and named.reasoning is not None
    assert (named.tools.name, named.reasoning.name) == ("llama3", "think")
    assert formats_of(FAMILIES["thinking"].template, "none", "none").tools is None
    with pytest.raises(
        ModelError, match=r"model\.tool_format must be one of auto, hermes, .*, none"
    ):
        formats_of("", "openai")


# --- prompts ------------------------------------------------------------------------------------

CALLED = {
    "role": "assistant",
    "content": "",
    "reasoning_content": "I must look.",
    "tool_calls": [
        {
            "id": "abcdefghi",
            "type": "function",
            "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'},
        }
    ],
}
RESULT = {"role": "tool", "content": "rain", "tool_call_id": "abcdefghi"}


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "r1"])
def test_templates_show_tools_and_calls_to_the_model(name: str) -> None:
    chat = ChatForm(messages=(USER, CALLED, RESULT), tools=(WEATHER,))
    text = rendered(name, chat)
    for part in ("get_weather", "city", "rain", "Paris"):
        assert part in text, text
    reader = reader_of(service(name), chat)
    turn = AssistantTurn()
    said = text[text.index("Hi") : text.index("rain")]
    begins = {
        "mistral": "[TOOL",
        "mistral-list": "[TOOL",
        "harmony": "<|start|>",
        "llama3": "<|pyth",
    }
    turn.add(reader.push(said[said.index(begins.get(name, "<tool_call>")) :].split("<|end|>\n")[0]))
    assert [(c.name, json.loads(c.arguments)) for c in turn.calls] == [
        ("get_weather", {"city": "Paris"})
    ]


def test_with_choice_none_the_model_sees_no_tools() -> None:
    none = ToolChoice(use=ToolUse.NONE)
    assert rendered("hermes", form(WEATHER, choice=none)) == rendered("hermes", form())
    only = ToolChoice(only=("now",))
    assert "get_weather" not in rendered("hermes", form(WEATHER, NOW, choice=only))


def test_templates_that_take_arguments_as_text_get_text(tmp_path: Path) -> None:
    source = "{% for m in messages %}{{ m.tool_calls[0].function.arguments + '!' }}{% endfor %}"
    from tests.tokenizer_fixture import byte_level

    tokenizer = TextTokenizer.load(byte_level(tmp_path, chat_template=source))
    assert tokenizer.render_chat([CALLED]) == '{"city": "Paris"}!'


def test_a_template_of_its_own_for_tools(tmp_path: Path) -> None:
    from tests.tokenizer_fixture import byte_level

    named = [
        {"name": "default", "template": "plain"},
        {"name": "tool_use", "template": "{{ tools[0].function.name }} <tool_call>"},
    ]
    tokenizer = TextTokenizer.load(byte_level(tmp_path, chat_template=named))
    assert tokenizer.render_chat([USER]) == "plain"
    shown = [{"type": "function", "function": {"name": "now"}}]
    assert tokenizer.render_chat([USER], tools=shown) == "now <tool_call>"
    more = tmp_path / "additional_chat_templates"
    more.mkdir()
    (more / "tool_use.jinja").write_text("from a file")
    assert TextTokenizer.load(tmp_path).render_chat([USER], tools=shown) == "from a file"


def test_developers_are_the_system_to_templates_that_do_not_know_them() -> None:
    chat = ChatForm(messages=({"role": "developer", "content": "Be brief."}, USER))
    assert "<|system|>Be brief." in rendered("hermes", chat)
    assert "<|start|>developer<|message|>Be brief." in rendered("harmony", chat)


def test_marks_are_text_and_other_special_tokens_are_not() -> None:
    tokenizer = service("mistral").tokenizer
    shown = asked("mistral", form(NOW)).sampling.shown_special
    assert {tokenizer.decode([i], skip_special_tokens=False) for i in shown} == {
        "[TOOL_CALLS]",
        "[ARGS]",
        "[CALL_ID]",
    }
    assert not asked("mistral", form()).sampling.shown_special


@pytest.mark.parametrize(
    ("chat", "param", "words"),
    [
        (ChatForm(messages=()), "messages", "at least one"),
        (form(Tool(name="a b")), "tools", "1 to 128"),
        (form(NOW, NOW), "tools", "two of the same name"),
        (form(*[Tool(name=f"t{n}") for n in range(513)]), "tools", "at most 512"),
        (form(NOW, choice=ToolChoice(use=ToolUse.REQUIRED, only=("x",))), "tool_choice", "'x'"),
        (form(choice=REQUIRED), "tool_choice", "send some"),
        (
            form(Tool(name="deep", parameters=DEEP), choice=REQUIRED),
            "tools[0].parameters",
            "64 deep",
        ),
        (form(Tool(name="large", parameters=LARGE), choice=REQUIRED), "tools", "too large"),
    ],
)
def test_wrong_tools_are_refused_in_words(chat: ChatForm, param: str, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words) as caught:
        asked("hermes", chat)
    assert caught.value.param == param


def test_a_model_without_tools_says_what_to_do() -> None:
    with pytest.raises(InvalidRequest, match=r"set model\.tool_format"):
        asked("r1", form(NOW))
    assert not asked("r1", form(NOW, choice=ToolChoice(use=ToolUse.NONE))).sampling.grammar


# --- grammars -----------------------------------------------------------------------------------

LIGHT = '{"room": "hall", "on": true, "levels": [1, 20]}'
HARMONY_CALL = "<|channel|>commentary to=functions.{0} <|constrain|>json<|message|>{1}"
QWEN_LIGHT = (
    "<tool_call>\n<function=light>\n<parameter=room>\nhall\n</parameter>\n<parameter=on>\ntrue\n"
    "</parameter>\n<parameter=levels>\n[1, 20]\n</parameter>\n</function>\n</tool_call>"
)


def said(name: str, tool: str, arguments: str) -> str:
    """A call as the family's models write it."""
    match name:
        case "llama3":
            return f'{{"name": "{tool}", "parameters": {arguments}}}'
        case "mistral":
            return f"[TOOL_CALLS]{tool}[ARGS]{arguments}"
        case "mistral-list":
            return f'[TOOL_CALLS] [{{"name": "{tool}", "arguments": {arguments}}}]'
        case "harmony":
            return HARMONY_CALL.format(tool, arguments)
        case "qwen3-coder" if tool == "light":
            return QWEN_LIGHT.replace("true", "true" if "true" in arguments else "false")
        case "qwen3-coder":
            return f"<tool_call>\n<function={tool}>\n</function>\n</tool_call>"
        case _:
            return f'<tool_call>\n{{"name": "{tool}", "arguments": {arguments}}}\n</tool_call>'


CALLERS = [name for name in FAMILIES if name != "r1"]


@pytest.mark.parametrize("name", CALLERS)
def test_a_required_call_is_all_that_may_be_said(name: str) -> None:
    chat = form(STRICT, NOW, choice=REQUIRED)
    assert takes(name, chat, said(name, "light", LIGHT))
    assert takes(name, chat, said(name, "now", "{}"))
    assert not takes(name, chat, said(name, "rm", "{}"))
    assert not takes(name, chat, "Hello.")
    assert not takes(name, chat, "")
    named = form(STRICT, NOW, choice=ToolChoice(use=ToolUse.REQUIRED, only=("now",)))
    assert takes(name, named, said(name, "now", "{}"))
    assert not takes(name, named, said(name, "light", LIGHT))


@pytest.mark.parametrize("name", [n for n in CALLERS if n != "qwen3-coder"])
def test_arguments_match_the_schema(name: str) -> None:
    chat = form(STRICT, choice=REQUIRED)
    assert not takes(name, chat, said(name, "light", '{"room": "attic", "on": true, "levels": []}'))
    assert not takes(name, chat, said(name, "light", '{"room": "hall"}'))
    loose = form(Tool(name="light", parameters=STRICT.parameters), choice=REQUIRED)
    assert not takes(name, loose, said(name, "light", '{"room": "hall"}'))


def test_words_of_a_schema_are_no_part_of_the_grammar() -> None:
    schema = {
        "type": "object",
        "title": "Told",
        "description": "Told",
        "properties": {
            "title": {"const": {"title": "Kept"}, "description": "Told"},
            "description": {"type": "string", "enum": ["a"], "examples": ["Told"]},
        },
        "required": ["title", "description"],
    }
    chat = form(Tool(name="f", parameters=schema, strict=True), choice=REQUIRED)
    assert "Told" not in asked("hermes", chat).sampling.grammar
    arguments = '{"title": {"title": "Kept"}, "description": "a"}'
    assert takes("hermes", chat, said("hermes", "f", arguments))


def test_xml_parameters_match_the_schema() -> None:
    chat = form(STRICT, choice=REQUIRED)
    assert not takes("qwen3-coder", chat, QWEN_LIGHT.replace("hall", "attic"))
    assert not takes("qwen3-coder", chat, QWEN_LIGHT.replace("true", "maybe"))
    free = form(WEATHER, choice=REQUIRED)
    text = "<tool_call>\n<function=get_weather>\n<parameter=city>\nNew\n</York>\n</parameter>\n"
    assert takes("qwen3-coder", free, text + "</function>\n</tool_call>")


@pytest.mark.parametrize("name", ["hermes", "thinking", "qwen3-coder", "mistral"])
def test_several_calls_unless_they_are_not_wanted(name: str) -> None:
    between = "" if name == "mistral" else "\n"
    text = between.join([said(name, "now", "{}"), said(name, "light", LIGHT)])
    assert takes(name, form(STRICT, NOW, choice=REQUIRED), text)
    assert not takes(name, form(STRICT, NOW, choice=ONE), text)
    auto_one = form(STRICT, NOW, choice=ToolChoice(parallel=False))
    assert takes(name, auto_one, said(name, "now", "{}"))
    assert not takes(name, auto_one, text)


@pytest.mark.parametrize("name", CALLERS)
def test_a_strict_tool_is_obeyed_where_calls_are_free(name: str) -> None:
    chat = form(STRICT, NOW)
    final = "<|channel|>final<|message|>Hello." if name == "harmony" else "Hello."
    assert takes(name, chat, final)
    assert takes(name, chat, said(name, "light", LIGHT))
    assert not takes(name, chat, said(name, "rm", "{}"))
    if name != "qwen3-coder":
        assert not takes(name, chat, said(name, "light", '{"room": "hall"}'))
        assert takes(name, chat, said(name, "now", '{"any": 1}'))


def test_free_calls_of_tools_that_are_not_strict_have_no_grammar() -> None:
    assert not asked("hermes", form(WEATHER)).sampling.grammar


def test_reasoning_comes_before_what_is_constrained() -> None:
    chat = form(NOW, choice=REQUIRED)
    call = said("thinking", "now", "{}")
    assert takes("thinking", chat, f"<think>\nHm <a>\n</think>\n\n{call}")
    assert takes("thinking", chat, call)
    closed = form(NOW, choice=REQUIRED, template_kwargs={"enable_thinking": False})
    assert not takes("thinking", closed, f"<think>\nHm\n</think>\n\n{call}")
    opened = form(NOW, choice=REQUIRED, template_kwargs={"opens": True})
    assert takes("thinking", opened, f"Hm\n</think>\n\n{call}")
    assert not takes("thinking", opened, call)
    thought = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    assert takes("harmony", chat, thought + HARMONY_CALL.format("now", "{}"))
    answer = "<|channel|>final<|message|>{}"
    assert takes("harmony", form(), thought + answer, SCHEMA)
    assert takes("harmony", form(NOW), thought + answer, SCHEMA)
    assert not takes("harmony", chat, thought + answer, SCHEMA)


@pytest.mark.parametrize("grammar", [SCHEMA, 'start: "{" /[a-z]/ "}"'])
def test_a_grammar_of_the_content_is_for_the_content(grammar: str) -> None:
    good = '{"a":1}' if grammar == SCHEMA else "{a}"
    assert asked("hermes", form(), grammar).sampling.grammar == grammar
    assert takes("r1", form(), f"Hm {good}\n</think>\n\n{good}", grammar)
    assert not takes("r1", form(), good, grammar)
    assert not takes("r1", form(), "Hm</think>no", grammar)
    assert takes("harmony", form(), f"<|channel|>final<|message|>{good}", grammar)
    tools = form(NOW, grammar=grammar)
    assert takes("hermes", tools, good)
    assert takes("hermes", tools, said("hermes", "now", "{}"))
    assert not takes("hermes", tools, "Hello.")


def test_prompt_ids_say_whether_reasoning_has_begun() -> None:
    ids = service("r1").tokenizer.encode("Hi<think>\n", add_special_tokens=False)
    chat = ChatForm(messages=(), prompt_ids=ids)
    assert asked("r1", chat).prompt == ids
    turn = AssistantTurn()
    turn.add(reader_of(service("r1"), chat).push("Hm</think>Two."))
    assert (turn.reasoning, turn.content) == ("Hm", "Two.")
    plain = ChatForm(messages=(), prompt_ids=ids[:1])
    assert reader_of(service("r1"), plain).push("Two.")[0].text == "Two."  # type: ignore[union-attr]


@pytest.mark.parametrize("name", CALLERS)
def test_what_the_grammar_lets_through_is_read_as_calls(name: str) -> None:
    """Random answers within the grammar; those that end are calls that match their schema."""
    chat = form(STRICT, NOW, choice=ONE)
    if name == "thinking":
        chat = form(STRICT, NOW, choice=ONE, template_kwargs={"enable_thinking": False})
    grammar = asked(name, chat).sampling.grammar
    ended = 0
    for seed in range(12):
        text = _random_answer(name, grammar, seed)
        if text is None:
            continue
        ended += 1
        reader = reader_of(service(name), chat)
        turn = AssistantTurn()
        turn.add([*reader.push(text), *reader.finish()])
        (call,) = turn.calls
        tool = {one.name: one for one in (STRICT, NOW)}[call.name]
        validate(json.loads(call.arguments), tool.parameters or {"type": "object"})
        assert turn.content == ""
    assert ended >= 4, ended


FORCED = {"harmony": "<|channel|>commentary to"}
"""How an answer begins that isn't reasoning, which would not end by chance."""


def _random_answer(name: str, grammar: str, seed: int) -> str | None:
    rng = random.Random(seed)
    found = matcher(name, grammar)
    tokenizer, vocab = service(name).tokenizer, token_tree(name).vocab_size
    bits = allocate_token_bitmask(1, vocab)
    ids = list(tokenizer.encode(FORCED.get(name, ""), add_special_tokens=False))
    assert found.try_consume_tokens(ids) == len(ids)
    while not found.is_accepting():
        if len(ids) == 200:
            return None
        fill_next_token_bitmask(found, bits, 0)
        allowed = [i for i in range(vocab) if bits[0, i // 32] >> (i % 32) & 1]
        ids.append(_preferred(allowed, tokenizer, rng))
        found.consume_token(ids[-1])
    return tokenizer.decode(ids, skip_special_tokens=False)


def _preferred(allowed: list[int], tokenizer: TextTokenizer, rng: random.Random) -> int:
    """White space without end is allowed, and seldom wanted."""
    words = [i for i in allowed if tokenizer.decode([i], skip_special_tokens=False).strip()]
    return rng.choice(words or allowed)
