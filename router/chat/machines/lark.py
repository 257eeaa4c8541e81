"""Writes grammars in llguidance's variant of Lark. Pure.

Syntax: https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md. A special token of the
tokenizer never matches text, so it is named by its id.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

ANY_TEXT = "/(?s:.*)/"


class Lark:
    """`special`: # text of a special token |-> its id"""

    def __init__(self, special: Mapping[str, int]) -> None:
        self._special = special
        self._rules: list[str] = []

    def is_special(self, text: str) -> bool:
        return text in self._special

    def words(self, *texts: str) -> str:
        """These texts, one behind the other; each may be a special token."""
        parts = [f"<[{self._special[t]}]>" if t in self._special else quoted(t) for t in texts if t]
        return " ".join(parts)

    def rule(self, name: str, body: str, options: str = "") -> str:
        """Its name."""
        self._rules.append(f"{name}{options}: {body}")
        return name

    def until(self, name: str, end: str) -> str:
        """Any text up to and with the first `end`."""
        if self.is_special(end):
            return self.rule(name, f"{ANY_TEXT} {self.words(end)}")
        return self.rule(name, ANY_TEXT, f"[suffix={quoted(end)}]")

    def text(self, start: str) -> str:
        return "\n".join([f"start: {start}", *self._rules])


def quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


WHITE_SPACE = r" |\n[ \t]{0,32}"
"""Between JSON's tokens: a space, or a new line with its indentation. Without a bound a model may
write white space until its tokens end."""


def json_rule(schema: Mapping[str, Any]) -> str:
    """The schema's own `x-guidance` comes before ours."""
    own = schema.get("x-guidance")
    options = {"whitespace_pattern": WHITE_SPACE, **(own if isinstance(own, dict) else {})}
    bare = {**_without_words(schema), "x-guidance": options}
    return "%json " + json.dumps(bare, ensure_ascii=False, separators=(",", ":"))


WORDS = frozenset({"description", "title", "default", "examples", "$comment"})
SCHEMAS_BY_NAME = frozenset(
    {"properties", "patternProperties", "dependentSchemas", "$defs", "definitions"}
)


def _without_words(schema: object) -> Any:
    """What a schema tells people matters to no grammar, and is most of its text."""
    match schema:
        case Mapping():
            return {key: _part(key, one) for key, one in schema.items() if key not in WORDS}
        case list():
            return [_without_words(one) for one in schema]
        case _:
            return schema


def _part(key: str, part: object) -> Any:
    if key in SCHEMAS_BY_NAME and isinstance(part, Mapping):
        return {name: _without_words(one) for name, one in part.items()}
    return part if key in ("enum", "const", "required") else _without_words(part)


def either(alternatives: list[str]) -> str:
    return alternatives[0] if len(alternatives) == 1 else f"({' | '.join(alternatives)})"
