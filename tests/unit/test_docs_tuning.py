"""docs/tuning.md names metrics, keys, reasons and phases that exist."""

from __future__ import annotations

import re
from collections.abc import Iterator
from types import UnionType
from typing import Any, get_args

import pytest
from pydantic import BaseModel

from cluster.config.schema import Config
from kvrelay.errors import RefusalReason
from router.core.request import PHASES
from router.live.metrics import RouterMetrics
from tests.unit.fake_dispatcher import FakeDispatcher
from tests.unit.test_docs import REPOSITORY

PAGE = (REPOSITORY / "docs" / "tuning.md").read_text()


def families() -> dict[str, set[str]]:
    """# metric |-> the names of its labels; none where nothing was counted yet."""
    metrics = RouterMetrics("m")
    metrics.refused("ttft_unreachable", "default", 0.0)
    metrics.finished("stop", {"prefill": 1.0})
    text = metrics.exposition(FakeDispatcher().snapshot()).decode()
    found: dict[str, set[str]] = {name: set() for name in re.findall(r"# HELP (\S+)", text)}
    for name, labels in re.findall(r"^(kvrelay:\w+)\{(.*)\}", text, re.M):
        plain = re.sub(r"_(bucket|sum|count)$", "", name)
        found.setdefault(plain, set()).update(re.findall(r'(\w+)="', labels))
    return found


def keys(section: type[BaseModel] = Config, prefix: str = "") -> Iterator[str]:
    """Dotted names of all keys and sections of a cluster file."""
    for name, field in section.model_fields.items():
        yield prefix + name
        for inner in sections_in(field.annotation):
            yield from keys(inner, f"{prefix}{name}.")


def sections_in(annotation: Any) -> list[type[BaseModel]]:
    kinds = get_args(annotation) if isinstance(annotation, UnionType) else (annotation,)
    return [k for k in kinds if isinstance(k, type) and issubclass(k, BaseModel)]


def code() -> list[str]:
    return re.findall(r"`([^`]+)`", PAGE)


def missing_metrics(text: str) -> list[str]:
    known = families()
    asked = re.findall(r"`(kvrelay:\w+)(?:\{(\w+)[^}]*\})?", text)
    return [
        name for name, label in asked if name not in known or (label and label not in known[name])
    ]


def missing_keys(words: list[str]) -> list[str]:
    known = {*keys()}
    sections = "|".join(Config.model_fields)
    dotted = [re.match(rf"(?:{sections})\.[a-z_.]+", word) for word in words]
    return [found[0] for found in dotted if found and found[0] not in known]


def first_column(heading: str) -> list[str]:
    """The code in the first cells of the table below a heading."""
    section = PAGE.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    cells = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    return [word for cell in cells for word in re.findall(r"`(\w+)`", cell)]


def test_metrics_exist() -> None:
    assert len(re.findall("`kvrelay:", PAGE)) > 20
    assert not missing_metrics(PAGE)


def test_keys_exist() -> None:
    assert not missing_keys(code())
    assert len([word for word in code() if re.match(r"[a-z]+\.[a-z]", word)]) > 25


@pytest.mark.parametrize("wrong", ["`kvrelay:prefix_hits`", '`kvrelay:saturation{rule="a"}`'])
def test_a_metric_that_does_not_exist_is_found(wrong: str) -> None:
    assert missing_metrics(wrong)


def test_a_key_that_does_not_exist_is_found() -> None:
    assert missing_keys(["engine.speed", "pool.enabled", "k.v"]) == ["engine.speed"]


def test_reasons_are_those_of_refusals() -> None:
    reasons = first_column("Requests are refused")
    assert {*reasons} == {*RefusalReason}


def test_phases_are_those_of_the_ledger() -> None:
    phases = first_column("The first token is late")
    before_and_after = {"receive", "tokenize", "respond"}
    assert len(phases) > 5 and {*phases} <= {*PHASES.values()} | before_and_after
