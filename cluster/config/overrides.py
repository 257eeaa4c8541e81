"""`--set KEY=VALUE`, and the YAML of cluster files. Light to import, as most commands need it."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import yaml

from kvrelay.errors import ConfigError

Node = Any
"""A mapping, list or scalar as YAML reads it, not yet checked."""


@dataclass(frozen=True, slots=True)
class Override:
    """One `--set path.to.key=value`; list items are named by their index."""

    path: tuple[str, ...]
    value: Node

    @staticmethod
    def parse(text: str) -> Override:
        """The value is read as YAML. Raises ConfigError without a "="."""
        path, equals, value = text.partition("=")
        if not equals or not path:
            raise ConfigError(f"--set {text}: expected path.to.key=value")
        return Override(tuple(path.split(".")), parse_yaml(value, f"--set {path}"))

    @staticmethod
    def parse_several(text: str) -> list[Override]:
        """`path.to.key=A,B`: one override for each value. Raises ConfigError for fewer than two."""
        path, _, values = text.partition("=")
        found = parse_yaml(f"[{values}]", f"--compare {path}")
        if not path or not isinstance(found, list) or len(found) < 2:
            raise ConfigError(f"--compare {text}: expected path.to.key=A,B")
        return [Override(tuple(path.split(".")), value) for value in found]


def parse_yaml(text: str, where: str) -> Node:
    try:
        return yaml.load(text, Loader=_UniqueKeys)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or "unreadable"
        raise ConfigError(f"{where}{line}: not valid YAML: {problem}") from None


class _UniqueKeys(yaml.SafeLoader):
    """YAML silently lets the last of two equal keys win; here they are an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Node]:
        seen: set[Hashable] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, Hashable) and key in seen:
                problem = f"the key {key} is given twice"
                raise yaml.constructor.ConstructorError(None, None, problem, key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)
