"""The documentation points at things that exist."""

from __future__ import annotations

import re
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
