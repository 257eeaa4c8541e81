"""The documentation points at things that exist."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]


def without_blocks(text: str) -> str:
    """Markdown without its fenced code."""
    return re.sub(r"^ *```.*?^ *```", "", text, flags=re.S | re.M)


def slug(heading: str) -> str:
    """GitHub's anchor of a heading: its words without markup and punctuation, with hyphens."""
    words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading.strip()).lower()
    return re.sub(r"[^\w\- ]", "", words).replace(" ", "-")


def anchors(text: str) -> set[str]:
    """Of all headings; one that comes again gets a number."""
    seen: Counter[str] = Counter()
    found = set()
    for heading in re.findall(r"^#{1,6} +(.+?)(?: +#+)?$", without_blocks(text), re.M):
        own = slug(heading)
        found.add(f"{own}-{seen[own]}" if seen[own] else own)
        seen[own] += 1
    return found


def dead_links(page: Path, text: str) -> list[str]:
    """Links to files that are missing, and to headings that no page has."""
    return [link for link in re.findall(r"\]\(([^)\s]+)", text) if not leads(page, text, link)]


def leads(page: Path, text: str, link: str) -> bool:
    path, _, anchor = link.partition("#")
    if "://" in link:
        return True
    if not path:
        return anchor in anchors(text)
    target = page.parent / path
    return target.exists() and (not anchor or anchor in anchors(target.read_text()))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    assert not dead_links(page, page.read_text())


def test_a_link_that_leads_nowhere_is_found() -> None:
    text = "# A `kvrelay x`: one\n## Same\n## Same\n```\n# no heading\n```\n"
    assert anchors(text) == {"a-kvrelay-x-one", "same", "same-1"}
    good = ["[a](#same-1)", "[b](tuning.md)", "[c](security.md#tls)", "[d](https://x.org#y)"]
    dead = ["#no-heading", "missing.md", "security.md#nothing"]
    text += " ".join([*good, *(f"[x]({link})" for link in dead)])
    assert dead_links(REPOSITORY / "docs" / "here.md", text) == dead


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
