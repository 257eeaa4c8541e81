"""The layout: small folders with a sentence each, and imports that only go down the map."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
TOPS = ("proto/kvrelay", "kvpool", "engine", "prefill_worker", "decode_worker", "router", "cluster")
MOST_MODULES = 12
GENERATED = "v1"
ROW = re.compile(r"^\| `([\w/]+)/` \|")


def folders() -> list[Path]:
    """With modules in them, relative to the repository."""
    found = {
        path.parent.relative_to(REPOSITORY)
        for top in TOPS
        for path in (REPOSITORY / top).rglob("*.py")
    }
    return sorted(one for one in found if GENERATED not in one.parts)


def modules(folder: Path) -> list[Path]:
    paths = (REPOSITORY / folder).glob("*.py")
    return sorted(path for path in paths if path.stem not in ("__init__", "__main__"))


def folder_of(module: str) -> Path | None:
    """Of a dotted name that an import says; None: it isn't ours."""
    parts = module.split(".")
    if parts[0] == "kvrelay":
        parts = ["proto", *parts]
    path = Path(*parts)
    if (REPOSITORY / path).with_suffix(".py").is_file():
        return path.parent
    return path if (REPOSITORY / path / "__init__.py").is_file() else None


def imported(path: Path) -> Iterator[str]:
    """Also inside functions."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if folder_of(inner) else node.module


def on_the_map() -> list[Path]:
    """From top to bottom."""
    text = (REPOSITORY / "docs/architecture.md").read_text(encoding="utf-8")
    return [Path(row[1]) for line in text.splitlines() if (row := ROW.match(line))]


def test_a_folder_has_at_most_twelve_modules() -> None:
    full = {str(one): len(modules(one)) for one in folders()}
    assert {name: count for name, count in full.items() if count > MOST_MODULES} == {}


def test_a_folder_says_in_one_sentence_what_lives_there() -> None:
    for folder in folders():
        path = REPOSITORY / folder / "__init__.py"
        assert path.is_file(), f"{folder}: no __init__.py"
        said = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        assert said.split("\n\n")[0].rstrip().endswith("."), f"{folder}: {said!r}"


def test_every_folder_is_on_the_map_once() -> None:
    assert sorted(on_the_map()) == folders()


def test_imports_only_go_down_the_map() -> None:
    height = {folder: -place for place, folder in enumerate(on_the_map())}
    upward = [
        f"{folder}/{path.name} imports {name}, which lies above it"
        for folder in folders()
        for path in modules(folder)
        for name in imported(path)
        if (other := folder_of(name)) in height and height[other] > height[folder]
    ]
    assert upward == []


def test_an_installation_brings_every_folder() -> None:
    listed = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]["setuptools"][
        "packages"
    ]
    tops = {name.split(".")[0] for name in listed} - {"kvrelay"}
    folders = {
        ".".join(file.parent.relative_to(REPOSITORY).parts)
        for top in tops
        for file in (REPOSITORY / top).rglob("__init__.py")
    }
    assert {name for name in listed if name.split(".")[0] != "kvrelay"} == folders
