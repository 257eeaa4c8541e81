"""Random JSON schemas of the keywords that structured output supports, from a seed."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

Schema = dict[str, Any]

NAMES = ("name", "age", "kind", "tags", "x", "is ok", "größe", 'quo"te', "next", "a/b")
TEXTS = ("red", "green", "blue", "", "a b", "ä", "\\", 'say "so"', "1", "null")
PATTERNS = (
    "^[a-z]{1,8}$",
    "^[A-Z][a-z]+( [A-Z][a-z]+)?$",
    "^\\d{3}-\\d{4}$",
    "^(yes|no|maybe)$",
    "^[^aeiou]{0,6}$",
    "[0-9]",
)
FORMATS = ("date", "uuid", "ipv4", "time", "date-time")


def random_schema(seed: int) -> Schema:
    """An object at the top, as agents ask for; some with definitions that refer to each other."""
    rng = Random(seed)
    schema = _object(rng, 0)
    if rng.random() < 0.3:
        schema["$defs"] = {"node": _node(rng), "leaf": _plain(rng)}
        name = rng.choice(["root", "tree"])
        schema["properties"][name] = {"$ref": rng.choice(["#/$defs/node", "#/$defs/leaf"])}
        schema["required"].append(name)
    return schema


def _node(rng: Random) -> Schema:
    """Refers to itself."""
    return {
        "type": "object",
        "properties": {
            "value": _plain(rng),
            "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
        },
        "required": ["value"],
        "additionalProperties": False,
    }


def _value(rng: Random, depth: int) -> Schema:
    kinds: list[Callable[[], Schema]] = [lambda: _plain(rng)] * 4
    if depth < 2:
        kinds += [
            lambda: _object(rng, depth + 1),
            lambda: _array(rng, depth + 1),
            lambda: {"anyOf": [_value(rng, depth + 1), _value(rng, depth + 1)]},
        ]
    return rng.choice(kinds)()


def _object(rng: Random, depth: int) -> Schema:
    names = rng.sample(NAMES, rng.randint(1, 3))
    return {
        "type": "object",
        "properties": {name: _value(rng, depth) for name in names},
        "required": [name for name in names if rng.random() < 0.7],
        "additionalProperties": False,
    }


def _array(rng: Random, depth: int) -> Schema:
    least = rng.randint(0, 2)
    schema: Schema = {"type": "array", "minItems": least, "maxItems": least + rng.randint(0, 2)}
    if rng.random() < 0.2:
        first = [_plain(rng), _plain(rng)]
        return {"type": "array", "prefixItems": first, "items": False, "minItems": 2}
    return schema | {"items": _value(rng, depth)}


def _plain(rng: Random) -> Schema:
    kinds = (_integer, _number, _string, _string, _enum, _const, _simple)
    return rng.choice(kinds)(rng)


def _simple(rng: Random) -> Schema:
    return {"type": rng.choice(["boolean", "null", ["boolean", "null"], ["integer", "string"]])}


def _integer(rng: Random) -> Schema:
    schema: Schema = {"type": "integer"}
    low = rng.randint(-1000, 1000)
    if rng.random() < 0.8:
        schema[rng.choice(["minimum", "exclusiveMinimum"])] = low
    if rng.random() < 0.8:
        schema[rng.choice(["maximum", "exclusiveMaximum"])] = low + rng.randint(2, 10**6)
    if rng.random() < 0.2:
        schema = {"type": "integer", "multipleOf": rng.choice([2, 3, 7, 10])}
    return schema


def _number(rng: Random) -> Schema:
    schema: Schema = {"type": "number"}
    low = round(rng.uniform(-100, 100), rng.randint(0, 3))
    if rng.random() < 0.8:
        schema[rng.choice(["minimum", "exclusiveMinimum"])] = low
    if rng.random() < 0.8:
        width = rng.choice([0.5, 3, 1e4])
        schema[rng.choice(["maximum", "exclusiveMaximum"])] = low + width
    return schema


def _string(rng: Random) -> Schema:
    match rng.randrange(4):
        case 0:
            return {"type": "string", "pattern": rng.choice(PATTERNS)}
        case 1:
            return {"type": "string", "format": rng.choice(FORMATS)}
        case 2:
            least = rng.randint(0, 4)
            return {"type": "string", "minLength": least, "maxLength": least + rng.randint(0, 9)}
        case _:
            return {"type": "string", "maxLength": rng.randint(1, 20)}


def _enum(rng: Random) -> Schema:
    return {"enum": rng.sample([*TEXTS, 1, 2.5, True, None, [1, "a"], {"k": 1}], rng.randint(1, 4))}


def _const(rng: Random) -> Schema:
    return {"const": rng.choice([*TEXTS, 0, -7, False, None])}
