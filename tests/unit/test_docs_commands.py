"""Every `kvrelay` command in the docs is one that the program takes: its names, options and values.
What the commands do is tested elsewhere."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from cluster.cli.main import app
from tests.unit.test_docs import PAGES

NOT_PARSED = ("--install-completion", "--version")
"""They act while the line is parsed."""
PLACEHOLDER = re.compile(r"\.\.\.|…|\[")
FOR_A_PLACEHOLDER = {"ROLE": "prefill"}
IN_A_POD = re.compile(r"kubectl exec .*? -- (?=kvrelay )")


def in_blocks(text: str) -> Iterator[str]:
    """Whole commands."""
    for block in re.findall(r"^```[a-z]*\n(.*?)^```", text, re.S | re.M):
        for line in block.replace("\\\n", " ").splitlines():
            command = IN_A_POD.sub("", " ".join(line.split()).removeprefix("$ "))
            if command.startswith("kvrelay "):
                yield command


def in_sentences(text: str) -> Iterator[str]:
    """They may leave out what a command needs."""
    prose = re.sub(r"^```.*?^```", "", text, flags=re.S | re.M)
    for command in re.findall(r"`(kvrelay [^`]+)`", prose):
        if not PLACEHOLDER.search(command):
            yield " ".join(command.split())


def trouble(line: str) -> Exception | None:
    """Why the program would not take it."""
    given = shlex.split(line, comments=True)[1:]
    words = [FOR_A_PLACEHOLDER.get(word, word) for word in given]
    command: Any = get_command(app)
    context = command.make_context("kvrelay", [], resilient_parsing=True)
    try:
        while hasattr(command, "commands"):
            name, command, words = command.resolve_command(context, words)
            context = command.make_context(name, words, parent=context)
            words = [*getattr(context, "_protected_args", ()), *context.args]
    except Exception as error:
        return None if "does not exist" in str(error) else error  # a user's own file
    return None


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_are_taken(page: Path) -> None:
    text = page.read_text()
    for line in in_blocks(text):
        if not any(option in line for option in NOT_PARSED):
            assert trouble(line) is None, f"{line}: {trouble(line)}"
    for line in in_sentences(text):
        if not any(option in line for option in NOT_PARSED):
            found = trouble(line)
            is_short = "issing" in str(found) or "requires an argument" in str(found)
            assert found is None or is_short, f"{line}: {found!r} {found}"


def test_what_the_program_does_not_take_is_found() -> None:
    assert trouble("kvrelay flip decode-1 prefill") is None
    for wrong in ("kvrelay flap x", "kvrelay flip x chef", "kvrelay drain x --now"):
        assert trouble(wrong) is not None, wrong
