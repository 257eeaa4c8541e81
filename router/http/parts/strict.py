"""Nested bodies: models that refuse unknown fields, drop neutral ones, and are told apart by
type."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, ClassVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Discriminator,
    ValidationError,
    model_validator,
)
from pydantic_core import PydanticCustomError

from router.http.bodies import BY_TYPE, Body, invalid_fields
from router.http.neutral_fields import Neutral

MAX_DEPTH = 64
"""Objects and lists within each other, in a field that holds any JSON."""


def _check_json(fields: dict[str, Any]) -> dict[str, Any]:
    level: list[object] = [fields]
    for _ in range(MAX_DEPTH):
        level = [inner for outer in level for inner in _inside(outer)]
    if level:
        raise PydanticCustomError("too_deep", f"is over {MAX_DEPTH} levels deep: make it flatter")
    return fields


def _inside(outer: object) -> Iterable[object]:
    match outer:
        case dict():
            return (*outer.keys(), *outer.values())
        case list():
            return outer
        case str():
            _check_text(outer)
    return ()


def _check_text(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise PydanticCustomError("surrogate", "has half of a surrogate pair in a text") from None


JsonObject = Annotated[dict[str, Any], AfterValidator(_check_json)]


class StrictPart(BaseModel):
    """A part of a body, at any depth."""

    model_config = ConfigDict(extra="forbid", strict=True)

    neutral: ClassVar[Mapping[str, Neutral]] = {}
    """Known fields without an effect here."""

    @model_validator(mode="before")
    @classmethod
    def drop_neutral(cls, fields: Any) -> Any:
        return without_neutral(fields, cls.neutral) if isinstance(fields, dict) else fields


def without_neutral(fields: dict[str, Any], neutral: Mapping[str, Neutral]) -> dict[str, Any]:
    """Raises PydanticCustomError for a value that would need an effect."""
    for name in neutral.keys() & fields.keys():
        if not neutral[name].accepts(fields[name]):
            told = {"field": name, "advice": neutral[name].advice()}
            raise PydanticCustomError("neutral", "{advice}", told)
    return {name: value for name, value in fields.items() if name not in neutral}


def by_type(expected: str, *, default: str = "", text: str = "") -> Discriminator:
    """Tells models apart by their field `type`. `default` is that of objects without one, `text`
    the name of a plain string."""

    def tag(given: object) -> str | None:
        if isinstance(given, str):
            return BY_TYPE + text
        named = given.get("type") if isinstance(given, dict) else getattr(given, "type", None)
        kind = default if named is None else named
        return BY_TYPE + kind if isinstance(kind, str) else None

    return _discriminator(tag, expected)


def text_or_list(expected: str) -> Discriminator:
    """Tells a text (tag `~text`) from a list (tag `~list`)."""

    def tag(given: object) -> str | None:
        match given:
            case str():
                return f"{BY_TYPE}text"
            case list():
                return f"{BY_TYPE}list"
            case _:
                return None

    return _discriminator(tag, expected)


def _discriminator(tag: Any, expected: str) -> Discriminator:
    return Discriminator(
        tag, custom_error_type="unexpected_kind", custom_error_message=f"must be {expected}"
    )


def strict(fields: dict[str, Any], kind: type[Body]) -> Body:
    """Raises InvalidRequest that names the first wrong field."""
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise invalid_fields(error) from None
