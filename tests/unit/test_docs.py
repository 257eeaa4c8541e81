"""The documentation points at things that exist."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)", page.read_text())
    missing = [link for link in links if "://" not in link and not (page.parent / link).exists()]
    assert not missing


def test_the_readme_names_every_folder() -> None:
    text = (REPOSITORY / "README.md").read_text()
    modules = {p.parent.name for p in REPOSITORY.glob("*/__init__.py")} | {"proto", "deploy"}
    assert {name for name in modules if f"`{name}/`" not in text} == set()


LIVES = [page for page in PAGES if page.name.startswith("life-of-")]


def names_in(path: Path) -> Iterator[str]:
    """Functions and classes as `name`, methods as `Class.name`."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name
        elif isinstance(node, ast.ClassDef):
            yield node.name
            methods = (
                n for n in node.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)
            )
            yield from (f"{node.name}.{method.name}" for method in methods)


def test_there_are_lives_of_a_request_and_of_a_block() -> None:
    assert len(LIVES) == 2


@pytest.mark.parametrize("page", LIVES, ids=lambda page: page.name)
def test_a_life_names_what_exists(page: Path) -> None:
    named = re.findall(r"((?:`[\w.]+`(?:, )?)+) in `([\w/]+\.py)`", page.read_text())
    assert len(named) > 20
    for names, path in named:
        found = {*names_in(REPOSITORY / path)}
        assert {*re.findall(r"[\w.]+", names)} <= found, path


@pytest.mark.parametrize("page", LIVES, ids=lambda page: page.name)
def test_a_life_fits_on_a_screen(page: Path) -> None:
    assert len(page.read_text().splitlines()) <= 64
