"""Grammars of structured output: llguidance takes them, and they match what they should."""

from __future__ import annotations

import json

import pytest
from llguidance import LLMatcher, LLTokenizer

from kvrelay.errors import InvalidRequest
from router.text.grammar.grammars import (
    JSON_OBJECT,
    grammar_of_choices,
    grammar_of_lark,
    grammar_of_regex,
    grammar_of_schema,
)

BYTES = LLTokenizer("byte")


def matches(grammar: str, text: str) -> bool:
    """Whether the text is all that the grammar lets one write, and may end there."""
    matcher = LLMatcher(BYTES, grammar)
    assert not matcher.is_error(), matcher.get_error()
    ids = list(text.encode())
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


@pytest.mark.parametrize("pattern", ["a/b", r"a\/b", "[/]b?a?", "(a\n?/b|/)"])
def test_slashes_and_line_breaks_of_patterns(pattern: str) -> None:
    grammar = grammar_of_regex(pattern)
    assert matches(grammar, "a/b") or matches(grammar, "/")
    assert not matches(grammar, "a\\/b")


def test_choices_with_all_that_must_be_escaped() -> None:
    texts = ['a"b', "é\n", "\\", "\x01", " ", "<|x|>", "yes", "yes, sir", "\U0001f600"]
    grammar = grammar_of_choices(texts)
    assert all(matches(grammar, text) for text in texts)
    assert not any(matches(grammar, text) for text in ["ye", "yes,", "no", "", "yes sir", "\\\\"])


def test_lark_is_left_as_it_is() -> None:
    grammar = grammar_of_lark('start: "a" rest\nrest: "b"+')
    assert matches(grammar, "abb") and not matches(grammar, "a")


def test_any_object() -> None:
    assert matches(JSON_OBJECT, '{"a": [1, null]}') and matches(JSON_OBJECT, "{}")
    assert not matches(JSON_OBJECT, "[]") and not matches(JSON_OBJECT, '{"a": 1')


def test_white_space_between_tokens_can_be_forbidden() -> None:
    schema = {"type": "array", "items": {"type": "integer"}}
    assert matches(grammar_of_schema(schema), "[1, 2]")
    assert not matches(grammar_of_schema(schema, compact=True), "[1, 2]")
    assert matches(grammar_of_schema(schema, compact=True), "[1,2]")


def test_white_space_is_bounded_unless_asked_otherwise() -> None:
    schema = {"type": "array", "items": {"type": "integer"}}
    assert matches(grammar_of_schema(schema), "[\n    1,\n    2\n]")
    assert not matches(grammar_of_schema(schema), "[  1]")
    assert not matches(JSON_OBJECT, "{\n\n}")
    assert matches(grammar_of_schema(schema, whitespace="[ \n]*"), "[  1\n\n]")
    own = {**schema, "x-guidance": {"whitespace_pattern": "\t"}}
    assert matches(grammar_of_schema(own), "[\t1]") and not matches(grammar_of_schema(own), "[ 1]")
    assert matches(grammar_of_schema(True), "17") and not matches(grammar_of_schema(True), "x")


def test_our_options_win_over_the_schemas_own() -> None:
    schema = {"x-guidance": {"whitespace_flexible": True}, "type": "array"}
    assert not matches(grammar_of_schema(schema, compact=True), "[ ]")


def test_a_lenient_schema_ignores_unknown_keywords() -> None:
    schema = {"type": "array", "uniqueItems": True, "maxItems": 2}
    assert "uniqueItems" in LLMatcher.validate_grammar(grammar_of_schema(schema))
    lenient = grammar_of_schema(schema, lenient=True)
    assert matches(lenient, "[1,1]") and not matches(lenient, "[1,1,1]")


@pytest.mark.parametrize("texts", [[], [""], ["a", ""], [str(i) for i in range(1025)]])
def test_bad_choices_are_refused(texts: list[str]) -> None:
    with pytest.raises(InvalidRequest) as refused:
        grammar_of_choices(texts, param="choice")
    assert refused.value.param == "choice"


def test_too_much_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="at most 65536"):
        grammar_of_regex("a" * 70_000)
    with pytest.raises(InvalidRequest, match="at most 65536"):
        grammar_of_schema({"enum": list(range(70_000))})
    deep = json.loads('{"items":' * 70 + "{}" + "}" * 70)
    with pytest.raises(InvalidRequest, match="64 levels"):
        grammar_of_schema(deep)
    with pytest.raises(InvalidRequest, match="must not be empty"):
        grammar_of_lark(" \n")


def test_what_is_no_lark_or_no_text_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="must be Lark"):
        grammar_of_lark('{"grammars": []}')
    with pytest.raises(InvalidRequest, match="half of a surrogate pair"):
        grammar_of_regex("\ud800")


def test_the_known_fault_of_llguidance() -> None:
    """It takes an excluded whole bound for valid if the other bound is within 1 of it. When this
    fails, the library is mended, and `router.text.grammar.number_bounds` is needed no more."""
    narrow = {"type": "number", "exclusiveMinimum": 18, "maximum": 18.5}
    assert matches(json.dumps({"grammars": [{"json_schema": narrow}]}), "18")


@pytest.mark.parametrize(
    ("bounds", "valid", "invalid"),
    [
        ({"exclusiveMinimum": 18, "maximum": 18.5}, "18.2 18.5", "18 18.0 18.6"),
        ({"exclusiveMinimum": 18.0, "exclusiveMaximum": 19}, "18.2 18.99", "18 19"),
        ({"exclusiveMinimum": -9.5, "exclusiveMaximum": -9.0}, "-9.2", "-9 -9.0 -9.5"),
        ({"exclusiveMinimum": 0, "exclusiveMaximum": 1}, "0.5", "0 -0 1 0.0"),
        ({"exclusiveMinimum": -0.5, "exclusiveMaximum": 0}, "-0.2", "0 -0 -0.5"),
        ({"exclusiveMinimum": 18, "minimum": 18.2, "maximum": 19}, "18.3 19", "18 18.1"),
        ({"exclusiveMinimum": 18, "maximum": 20}, "19 20", "18 21"),
    ],
)
def test_excluded_bounds_are_kept_where_llguidance_forgets_them(
    bounds: dict[str, float], valid: str, invalid: str
) -> None:
    deep = {"type": "array", "items": {"anyOf": [{"type": "number", **bounds}]}}
    for schema, form in (({"type": "number", **bounds}, "{}"), (deep, "[{}]")):
        grammar = grammar_of_schema(schema)
        assert [one for one in valid.split() if not matches(grammar, form.format(one))] == []
        assert [one for one in invalid.split() if matches(grammar, form.format(one))] == []


def test_integers_and_data_are_left_as_they_are() -> None:
    whole = {"type": ["integer", "null"], "exclusiveMinimum": 18, "maximum": 19}
    assert matches(grammar_of_schema(whole), "19")
    assert not matches(grammar_of_schema(whole), "18")
    assert grammar_of_schema({"exclusiveMinimum": 10**4000, "maximum": 1})
    data = {"const": {"exclusiveMinimum": 18, "maximum": 18.5}}
    assert matches(grammar_of_schema(data), '{"exclusiveMinimum": 18, "maximum": 18.5}')
