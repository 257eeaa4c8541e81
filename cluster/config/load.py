"""A YAML file and `--set` options become a `Config`, or one line that says what is wrong."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable
from copy import deepcopy
from pathlib import Path
from typing import Any, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from cluster.config.overrides import Node, Override, parse_yaml
from cluster.config.schema import DEFAULT_POOLS, Config
from cluster.config.takes import Takes
from kvrelay.errors import ConfigError
from kvrelay.types import PromptRule


def load_config(path: Path | None, overrides: Iterable[Override] = ()) -> Config:
    """Raises ConfigError with the file, the path of the key, the value and what was expected."""
    raw = {} if path is None else read_yaml(path)
    where = "" if path is None else f"{path}: "
    raw.setdefault(
        "workers", [pool.model_dump(mode="json", exclude_unset=True) for pool in DEFAULT_POOLS]
    )
    for override in overrides:
        _apply(raw, override)
    return read_json(json.dumps(raw, default=str), where)


def read_json(text: str, where: str = "") -> Config:
    """A whole cluster file. Raises like `load_config`."""
    try:
        return Config.model_validate_json(text)
    except ValidationError as error:
        raise ConfigError(where + describe(error)) from None


def read_rule(text: str, where: str) -> PromptRule:
    """`takes` of a pool, as YAML. Raises ConfigError."""
    try:
        return Takes.model_validate_json(json.dumps(parse_yaml(text, where))).rule
    except ValidationError as error:
        raise ConfigError(f"{where}: {describe(error, Takes, 'the rule')}") from None


def describe(
    error: ValidationError, root: type[BaseModel] = Config, whole: str = "the cluster file"
) -> str:
    """The first problem in one line, and the number of further ones. `root` is the model that was
    read, `whole` its name. A misspelt key also leaves the right key missing; that problem comes
    later."""
    first, *others = sorted(error.errors(), key=lambda one: one["type"] == "missing")
    more = f" (and {len(others)} more)" if others else ""
    return _describe_one(first, root, whole) + more


def _describe_one(error: ErrorDetails, root: type[BaseModel], whole: str) -> str:
    path = ".".join(str(part) for part in error["loc"]) or whole
    match error["type"]:
        case "extra_forbidden":
            return f"{path}: unknown key, {_nearest(error['loc'], root)}"
        case "missing":
            return f"{path}: missing, it is required"
        case "value_error" if isinstance(error["input"], dict):
            return f"{path}: expected {_expected(error)}"  # of several keys together
        case _:
            return f"{path}: got {_shown(error['input'])}, expected {_expected(error)}"


def _expected(error: ErrorDetails) -> str:
    return error["msg"].removeprefix("Value error, ").removeprefix("Input should be ")


def _shown(given: object) -> str:
    match given:
        case dict():
            return "a mapping"
        case list():
            return f"a list of {len(given)}"
        case _:
            return json.dumps(given)


def _nearest(location: tuple[int | str, ...], root: type[BaseModel]) -> str:
    known = list(_keys_at(location[:-1], root))
    close = difflib.get_close_matches(str(location[-1]), known, n=1)
    return f"did you mean {close[0]}?" if close else f"expected one of {', '.join(sorted(known))}"


def _keys_at(location: tuple[int | str, ...], root: type[BaseModel]) -> Iterable[str]:
    """The keys that the section at `location` knows."""
    section = root
    for part in location:
        if isinstance(part, str) and part in section.model_fields:  # else a name that users give
            section = _section_of(section.model_fields[part].annotation)
    return section.model_fields


def _section_of(annotation: Any) -> type[BaseModel]:
    """The model itself, or the model inside a tuple or mapping."""
    if get_origin(annotation) is None:
        return annotation
    return next(one for one in get_args(annotation) if _is_section(one))


def _is_section(kind: object) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def read_yaml(path: Path) -> dict[str, Node]:
    """Raises ConfigError for anything but a readable mapping. An empty file is an empty mapping."""
    try:
        raw = parse_yaml(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ConfigError(f"{path}: can't read it: {reason}") from None
    if raw is None:
        return {}
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: got {_shown(raw)}, expected a mapping of keys")
    return raw


def _apply(raw: Node, override: Override) -> None:
    """Sets one key in place and creates missing sections. A list takes only an index that it
    has."""
    at = raw
    for depth, part in enumerate(override.path):
        last = depth == len(override.path) - 1
        key = _key_in(at, part, override.path[: depth + 1])
        if last:
            at[key] = deepcopy(override.value)
        elif isinstance(at, dict):
            at = at[key] if isinstance(at.get(key), dict | list) else at.setdefault(key, {})
        else:
            at = at[key]


def _key_in(at: Node, part: str, path: tuple[str, ...]) -> str | int:
    shown = ".".join(path)
    match at:
        case dict():
            return part
        case list() if part.isdecimal() and int(part) < len(at):
            return int(part)
        case list():
            raise ConfigError(f"--set {shown}: expected an index below {len(at)}")
        case _:
            raise ConfigError(f"--set {shown}: {'.'.join(path[:-1])} has no keys below it")
