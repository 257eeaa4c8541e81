"""The versions that the image installs: `python -m tests.pins` writes deploy/constraints.txt."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.metadata import distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

FILE = Path(__file__).parents[1] / "deploy" / "constraints.txt"
EXTRA = "nixl"
"""What the image has beyond the dependencies."""


def installed() -> dict[str, str]:
    """# distribution that kvrelay with the extra needs |-> its version here"""
    found: dict[str, str] = {}
    waiting = [("kvrelay", frozenset({EXTRA}))]
    seen = set(waiting)
    while waiting:
        name, extras = waiting.pop()
        package = distribution(name)
        found[canonicalize_name(name)] = Version(package.version).public
        needed = {*_needed(package.requires or (), extras)} - seen
        seen |= needed
        waiting += needed
    del found["kvrelay"]
    return found


def _needed(lines: Iterable[str], extras: frozenset[str]) -> list[tuple[str, frozenset[str]]]:
    asked = [Requirement(line) for line in lines]
    return [(one.name, frozenset(one.extras)) for one in asked if _applies(one, extras)]


def _applies(one: Requirement, extras: frozenset[str]) -> bool:
    marker = one.marker
    return marker is None or any(marker.evaluate({"extra": e}) for e in extras | {""})


def pinned() -> dict[str, str]:
    """# distribution |-> its version in the file"""
    lines = FILE.read_text().splitlines()
    return dict(line.split("==") for line in lines if not line.startswith("#"))


def main() -> None:
    kept = [line for line in FILE.read_text().splitlines() if line.startswith("#")]
    lines = [f"{name}=={version}" for name, version in sorted(installed().items())]
    FILE.write_text("\n".join([*kept, *lines, ""]))


if __name__ == "__main__":
    main()
