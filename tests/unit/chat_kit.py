"""What the tests of chat formats share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import count

from router.chat.formats.choice import TOOL_FORMATS
from router.chat.machines.machine import Machine
from router.chat.values.events import AssistantTurn
from router.chat.values.form import Tool

WEATHER = Tool(
    name="get_weather",
    description="Tells the weather of a city.",
    parameters={
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
        },
        "required": ["city"],
    },
)
WRITE = Tool(
    name="write_file",
    parameters={
        "type": "object",
        "properties": {
            "path": {"type": "string"},
            "lines": {"type": "array", "items": {"type": "string"}},
            "mode": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
            "any": {},
        },
        "required": ["path", "lines"],
    },
)
NOW = Tool(name="now")
TOOLS = (WEATHER, WRITE, NOW)

Reading = Callable[[], Machine]


def reading(name: str, tools: Sequence[Tool] = TOOLS) -> Reading:
    """Makes a reader of the format, whose calls have the ids c0, c1, ..."""

    def machine() -> Machine:
        numbers = count()
        return TOOL_FORMATS[name].machine(lambda: f"c{next(numbers)}", tools)

    return machine


def turn_of(machine: Machine, pieces: Sequence[str]) -> AssistantTurn:
    turn = AssistantTurn()
    for piece in pieces:
        turn.add(machine.push(piece))
    turn.add(machine.finish())
    return turn


def prefixes(machine: Machine, text: str) -> Iterator[AssistantTurn]:
    """What has been said after each character."""
    turn = AssistantTurn()
    for character in text:
        turn.add(machine.push(character))
        yield AssistantTurn(turn.reasoning, turn.content, [*map(_copy, turn.calls)])


def _copy(call):  # type: ignore[no-untyped-def]
    return type(call)(call.call_id, call.name, call.arguments)


def assert_any_cut(new: Reading, text: str) -> AssistantTurn:
    """The same turn whole, cut once at any place, and one character at a time; and after each
    character the same has been said, however the text before it was cut."""
    whole = turn_of(new(), [text])
    for at in range(1, len(text)):
        assert turn_of(new(), [text[:at], text[at:]]) == whole, text[:at]
    assert turn_of(new(), list(text)) == whole
    for end, by_character in enumerate(prefixes(new(), text), 1):
        at_once = AssistantTurn()
        at_once.add(new().push(text[:end]))
        assert at_once == by_character, text[:end]
    return whole
