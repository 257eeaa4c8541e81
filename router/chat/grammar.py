"""What an answer must match: the grammar of its calls, of its content, and of the reasoning before
them."""

from __future__ import annotations

import json
from dataclasses import replace

from router.chat.formats.harmony import Harmony
from router.chat.machines.lark import Lark
from router.chat.prompt_end import begins_of
from router.chat.values.form import ChatForm, Tool, ToolUse
from router.text.service import TextService

CONTENT = "content"


def answer_grammar(service: TextService, form: ChatForm, content: str) -> str:
    """Empty: anything goes. `content` is the grammar of the answer's content, empty if it is free.
    Raises InvalidRequest."""
    tools = form.callable_tools()
    lark = Lark(_special_tokens(service))
    calls = _calls(service, form, lark, tools, content)
    if not calls and not content:
        return ""
    if calls and form.choice.use is ToolUse.REQUIRED:
        content = ""
    answer = _either(calls, _content(service, lark, content))
    prefix = _reasoning(service, form, lark)
    if answer == f"@{CONTENT}" and not prefix:
        return content
    return _grammar(lark.text(f"{prefix} {answer}".strip()), content)


def _calls(
    service: TextService, form: ChatForm, lark: Lark, tools: tuple[Tool, ...], content: str
) -> str:
    """A Lark expression; empty where calls are free."""
    chosen = service.formats.tools
    if chosen is None or not tools:
        return ""
    many = form.choice.parallel
    if form.choice.use is ToolUse.REQUIRED or content:
        return chosen.required(lark, [_lenient(tool) for tool in tools], many=many)
    if form.choice.only or not many or any(tool.strict for tool in tools):
        return chosen.allowed(lark, tools, many=many)
    return ""


def _lenient(tool: Tool) -> Tool:
    """A call that is asked for matches its schema, as far as the schema's keywords are known."""
    if tool.strict or not tool.parameters:
        return tool
    lenient = {**tool.parameters, "x-guidance": {"lenient": True}}
    return replace(tool, strict=True, parameters=lenient)


def _either(calls: str, content: str) -> str:
    return f"({calls} | {content})" if calls and content else calls or content


def _content(service: TextService, lark: Lark, content: str) -> str:
    if not content:
        return ""
    chosen = service.formats.tools
    return chosen.answer(lark, f"@{CONTENT}") if isinstance(chosen, Harmony) else f"@{CONTENT}"


def _reasoning(service: TextService, form: ChatForm, lark: Lark) -> str:
    formats = service.formats
    if isinstance(formats.tools, Harmony):
        return ""
    if formats.reasoning is None:
        return ""
    return formats.reasoning.prefix(lark, begins_of(service, form))


def _special_tokens(service: TextService) -> dict[str, int]:
    """Those that llguidance takes for special: the tokenizer's, and added ones in brackets < >."""
    added = service.tokenizer.backend.get_added_tokens_decoder()
    return {
        token.content: i
        for i, token in added.items()
        if token.special or (token.content.startswith("<") and token.content.endswith(">"))
    }


def _grammar(lark: str, content: str) -> str:
    """As llguidance takes several grammars that refer to each other."""
    grammars: list[object] = [{"lark_grammar": lark}]
    if content:
        grammars += _named(content)
    return json.dumps({"grammars": grammars}, ensure_ascii=False)


def _named(content: str) -> list[object]:
    """The first of its grammars gets our name; the others have names of their own."""
    if not content.lstrip().startswith("{"):
        return [{"name": CONTENT, "lark_grammar": content}]
    first, *others = json.loads(content)["grammars"]
    return [{**first, "name": CONTENT}, *others]
